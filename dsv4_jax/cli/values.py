"""What values of a command line are read by.

A value is checked as it is parsed, before anything is loaded; the error names its option.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping

from dsv4_jax.config.kinds import MAX_I32, show
from dsv4_jax.rules import UNITS, Bytes

_MAX_LISTED = 64
_WITH_UNIT = re.compile(r"([0-9]{1,15})([A-Za-z]{1,3})")
_THOUSANDS = {"K": 2**10, "k": 2**10, "M": 2**20}
"""As lengths of contexts are told: 128K tokens are 131,072."""
_EXAMPLES = ("131072", "128K", "1M", "512MiB", "64GiB")


def whole(
    least: int = 1, most: int = MAX_I32, *, units: Mapping[str, int] = _THOUSANDS
) -> Callable[[str], int]:
    """Reads an integer of that range, also in units: by default 128K is 131072, and 1M 1048576."""

    def read(text: str) -> int:
        number = _read_whole(text, units)
        if number is None or not least <= number <= most:
            such = "" if number is not None else _such_as(least, most, units)
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}{such}, got {show(text)}"
            )
        return number

    return read


def _read_whole(text: str, units: Mapping[str, int]) -> int | None:
    """A whole number, perhaps in one of the units; None if it is no such thing."""
    found = _WITH_UNIT.fullmatch(text)
    try:
        return int(found[1]) * units[found[2]] if found else int(text)
    except (KeyError, ValueError):
        return None


def _such_as(least: int, most: int, units: Mapping[str, int]) -> str:
    """How a number of that range is written in the units; "" where none is so large."""
    known = [(text, _read_whole(text, units)) for text in _EXAMPLES]
    fitting = [text for text, number in known if number is not None and least <= number <= most]
    return f", such as {', '.join(fitting[:-1])} or {fitting[-1]}" if len(fitting) > 1 else ""


def gib(least: float, most: float) -> Callable[[str], float]:
    """Reads a number of GiB, also as bytes in other units: 80, 80.5, 80GiB or 81920MiB."""
    read_number = real(least, most)

    def read(text: str) -> float:
        found = _WITH_UNIT.fullmatch(text)
        if found is not None and found[2] not in UNITS:
            raise argparse.ArgumentTypeError(
                f"must be a number of GiB from {least:g} to {most:g}, such as 80, 80GiB or "
                f"81920MiB, got {show(text)}"
            )
        if found is None:
            return read_number(text)
        return read_number(repr(int(found[1]) * UNITS[found[2]] / 2**30))

    return read


def num_bytes(text: str) -> int:
    """Reads a number of bytes, such as 64GiB."""
    try:
        return int(Bytes().check("value", text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes such as 4096, 512MiB or 64GiB, got {show(text)}"
        ) from None


def num_bytes_or_auto(text: str) -> int | str:
    """Reads the same, or auto."""
    if text == "auto":
        return text
    try:
        return num_bytes(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes such as 4096, 512MiB or 64GiB, or auto, got {show(text)}"
        ) from None


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


def points_of(text: str) -> list[tuple[int, int, bool]]:
    """Reads BATCH@CONTEXT, with /split or without, one or more."""
    points = []
    for part in text.split(","):
        sizes, slash, how = part.partition("/")
        batch, at, context = sizes.partition("@")
        if not at or (slash and how != "split"):
            raise argparse.ArgumentTypeError(
                f"must be BATCH@CONTEXT or BATCH@CONTEXT/split, one or more, got {show(text)}"
            )
        try:
            points.append((whole()(batch), whole()(context), bool(slash)))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, in {show(text)}") from None
    return points


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


def utf8_text(text: str) -> str:
    """Takes a text that is UTF-8, in whatever locale.

    Python shows bytes of a command line that its locale's encoding lacks as surrogates: in the C
    locale, where PYTHONUTF8 is 0, all of UTF-8 beyond ASCII.
    """
    given: str | bytes = text
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return text
    with contextlib.suppress(UnicodeEncodeError):  # surrogates that stand for no byte
        given = os.fsencode(text)
        with contextlib.suppress(UnicodeDecodeError):
            return given.decode()
    raise argparse.ArgumentTypeError(f"must be UTF-8, got {show(given)}")
