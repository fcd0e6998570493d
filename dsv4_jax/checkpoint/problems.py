"""The message of an error about all that is wrong with a checkpoint, by kind and short."""

from __future__ import annotations

import pathlib

from dsv4_jax.regular_files import show_path

MAX_LINES = 10


def list_problems(directory: pathlib.Path, problems: list[str]) -> str:
    """The message of an error about all of them; a kind is what stands before the first colon."""
    listed = "\n  ".join(shorten(problems))
    return f"{show_path(directory)} does not fit its config.json:\n  {listed}"


def shorten(problems: list[str]) -> list[str]:
    """At most `MAX_LINES` of the lines, some of every kind, and then how many there are.

    The last line that is shown of a kind says how many more there are.
    """
    lines = list(dict.fromkeys(problems))
    if len(lines) <= MAX_LINES:
        return lines
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kind = line.split(":")[0] if ": " in line else "other"
        kinds.setdefault(kind, []).append(line)
    shown = dict.fromkeys(list(kinds)[:MAX_LINES], 1)
    for _ in range(MAX_LINES):
        for kind in shown:
            if sum(shown.values()) < MAX_LINES and shown[kind] < len(kinds[kind]):
                shown[kind] += 1
    short = []
    for kind, count in shown.items():
        *first, last = kinds[kind][:count]
        more = len(kinds[kind]) - count
        short += [*first, f"{last}; and {more:,} more: {kind}" if more else last]
    return [*short, f"{len(lines):,} problems in all"]
