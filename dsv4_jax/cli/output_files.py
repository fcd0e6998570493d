"""Paths of files that a command is to write, checked before anything is done."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Callable

from dsv4_jax.config.kinds import show


def output_file(*suffixes: str) -> Callable[[str], pathlib.Path]:
    """Takes the path of a file that can be written, in a folder that is there already."""

    def read(text: str) -> pathlib.Path:
        path = pathlib.Path(text)
        try:
            problem = _find_obstacle(path, suffixes)
        except (OSError, ValueError) as error:  # too long, or no path at all
            problem = f"must be the path of a file, which this is not ({error.args[-1]})"
        if problem:
            raise argparse.ArgumentTypeError(f"{problem}, got {show(text)}")
        return path

    return read


def _find_obstacle(path: pathlib.Path, suffixes: tuple[str, ...]) -> str | None:
    """Why a file cannot be written there, or None."""
    folder = path.parent
    if suffixes and path.suffix.lower() not in suffixes:
        return f"must end in {' or '.join(suffixes)}"
    if path.is_dir():
        return "must be a file, and this is a folder"
    if not folder.is_dir():
        return f"must be a file in a folder that is there; make {folder} first"
    if not os.access(folder, os.W_OK):
        return f"must be a file in a folder that can be written to, not {folder}"
    return None
