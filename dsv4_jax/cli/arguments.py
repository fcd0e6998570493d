"""Arguments that several commands take, and what their values are read by.

A value is checked as it is parsed, before anything is loaded; the error names its option.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

from dsv4_jax.config.kinds import MAX_I32, show
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from pallas_kernels.common.weights import ACTIVATIONS

WEIGHTS = {"released": "released", "bfloat16": "dense"}
"""`--weights` and what `param_shapes` calls them: FP8 and FP4 as the release, or all bfloat16."""

MAX_DEVICES = 1024
_MAX_LISTED = 64


class Parser(argparse.ArgumentParser):
    """A parser that takes whole names of options alone, and raises what it has to say."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `argparse.ArgumentParser`."""
        super().__init__(*args, **options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the command and the message."""
        raise UsageError(f"{self.prog}: {message}")


class UsageError(ValueError):
    """What is wrong with a command line; its message begins with the command."""


def whole(least: int = 1, most: int = MAX_I32) -> Callable[[str], int]:
    """Reads an integer of that range."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, got {show(text)}"
            )
        return number

    return read


def wholes(least: int = 1, most: int = MAX_I32) -> Callable[[str], list[int]]:
    """Reads one integer or more, with commas between them."""
    read_one = whole(least, most)

    def read(text: str) -> list[int]:
        parts = text.split(",")
        if len(parts) > _MAX_LISTED:
            raise argparse.ArgumentTypeError(
                f"must be at most {_MAX_LISTED} numbers, got {len(parts)} in {show(text)}"
            )
        try:
            return [read_one(part) for part in parts]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error} in {show(text)}") from None

    return read


def real(least: float, most: float) -> Callable[[str], float]:
    """Reads a finite number of that range."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"must be a finite number from {least:g} to {most:g}, got {show(text)}"
            )
        return number

    return read


def prompt_text(text: str) -> str:
    """Takes a text that is UTF-8; Python shows other bytes of a command line as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be UTF-8, got {show(os.fsencode(text))}") from None
    return text


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


def add_activations(parser: argparse.ArgumentParser, *, prefill: bool = True) -> None:
    """Adds what multiplies quantised weights, with `prefill` for decode and prefill apart."""
    parser.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default=DEFAULT_ACTIVATIONS,
        help="what multiplies FP8 and FP4 weights: rows rounded to E4M3, or as they are",
    )
    if prefill:
        parser.add_argument(
            "--prefill-activations",
            choices=ACTIVATIONS,
            help="the same in steps that hold prompt tokens; if not given, as --activations",
        )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes of a mesh; both are None if neither is given."""
    parser.add_argument("--data", type=whole(1, MAX_DEVICES), help="data shards of the mesh")
    parser.add_argument(
        "--model", type=whole(1, MAX_DEVICES), help="devices of a data shard of the mesh"
    )


def refuse_mesh(args: argparse.Namespace) -> None:
    """Refuses meshes of several devices, which `Engine` does not take.

    Raises:
      ValueError: there is more than one device.
    """
    data, model = args.data or 1, args.model or 1
    if data * model > 1:
        raise ValueError(
            f"--data {data} --model {model}: Engine runs on one device, and takes no mesh; "
            "dsv4-jax plan takes both, and ds.jit_decode_step runs on a mesh"
        )


def add_loading(parser: argparse.ArgumentParser, *, check_weights: bool | None = None) -> None:
    """Adds what `load_checkpoint` trusts; `check_weights` is the default of that option."""
    parser.add_argument(
        "--check-weights",
        action=argparse.BooleanOptionalAction,
        default=check_weights,
        help="name every tensor that holds NaN or infinity; if not given, "
        + ("on" if check_weights else "where the tensors take 64 MiB at most"),
    )
    add_follow_links(parser)


def add_follow_links(parser: argparse.ArgumentParser) -> None:
    """Adds what `find_file` trusts."""
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="read files that are links out of the checkpoint directory; those of a Hugging Face "
        "cache are read anyway",
    )
