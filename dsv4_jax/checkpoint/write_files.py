"""Writes files whole or not at all, whenever the process is killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from dsv4_jax.checkpoint.header import DTYPES
from dsv4_jax.regular_files import show_path


@contextlib.contextmanager
def replacing(file: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file under another name, which becomes `file` once it is whole and on the disk.

    What is left under either name, by a process that was killed or as a link, is replaced itself;
    no link is written through.

    Raises:
      OSError: it cannot be written, or a directory that holds something has its name.
    """
    partial = file.with_name(f"{file.name}.partial")
    make_room(partial)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(partial, flags, 0o666), "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    if file.is_dir() and not file.is_symlink():
        make_room(file)
    os.replace(partial, file)


def make_room(path: pathlib.Path) -> None:
    """Removes what is at a path: a file, a link or an empty directory.

    Raises:
      OSError: it is a directory that holds something.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        told = f"{show_path(path)} stands where a file is to be written ({error.strerror})"
        raise OSError(f"{told}; move it away") from error


def write_json(file: pathlib.Path, data: dict[str, Any]) -> None:
    """Writes a file of JSON whole."""
    with replacing(file) as stream:
        stream.write((json.dumps(data, indent=2) + "\n").encode())


def write_tensors(
    file: pathlib.Path,
    header: Iterable[tuple[str, np.dtype, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
) -> tuple[int, str]:
    """Writes a safetensors file tensor by tensor.

    Args:
      file: its path.
      header: name, dtype and shape of every tensor.
      arrays: their contents, in that order; each is made when it is written.

    Returns:
      Bytes of the file, and their SHA-256 in hexadecimal.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    end = 0
    for name, dtype, shape in header:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        offsets = [begin, end]
        entries[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with replacing(file) as stream:

        def write(data: bytes | memoryview) -> None:
            stream.write(data)
            digest.update(data)

        write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            write(np.ascontiguousarray(array).view(np.uint8).data)
        assert stream.tell() == 8 + len(text) + end
    return 8 + len(text) + end, digest.hexdigest()
