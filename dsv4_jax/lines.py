r"""Lines of files that come from outside: they end at "\n" or "\r\n", and at nothing else.

`str.splitlines` ends lines at ten more characters, such as U+2028, U+0085, form feed and vertical
tab, which stand inside texts. A byte order mark at the beginning of a file is no content of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

BLANKS = b" \t\r\n"
"""What a blank line is made of: the white space of JSON."""


def without_mark(data: bytes) -> bytes:
    """The bytes of a UTF-8 file without a byte order mark at their beginning."""
    return data.removeprefix(codecs.BOM_UTF8)


def without_line_end(text: str) -> str:
    """A text without the end of its last line, if that has one."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def split_lines(text: str) -> list[str]:
    """The lines of a text without their ends; after the last end there is no line."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    last = text.rpartition("\n")[2]
    return [*lines[:-1], last] if last else lines[:-1]


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    """The lines of a file from where it stands, with their ends.

    Args:
      file: bytes; it may be larger than memory.
      max_bytes: of a line, its end not counted.

    Yields:
      A line, or None in place of one that is longer. The first has no byte order mark.
    """
    most = max_bytes + 2  # with "\r\n"
    mark = len(codecs.BOM_UTF8)
    line = without_mark(file.readline(most + mark))
    while line:
        is_long = len(line.removesuffix(b"\n").removesuffix(b"\r")) > max_bytes
        yield None if is_long else line
        while not line.endswith(b"\n") and line:
            line = file.readline(most)
        line = file.readline(most)
