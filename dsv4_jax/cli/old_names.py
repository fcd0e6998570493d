"""Names that options had before, which are taken for one more release, and said to be old."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from dsv4_jax.standard_streams import say

_FIRST = ("checkpoint", "config")


def add_old_name(parser: argparse.ArgumentParser, old: str, new: str, **options: Any) -> None:
    """Adds an option under the name that it had; no help shows it.

    Args:
      parser: what is added to.
      old: the former option.
      new: what takes its place, as a message tells it.
      **options: as of `add_argument`; `dest` is the field of the new one, whose default holds.
    """
    parser.add_argument(
        old, action=_OldName, new=new, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options
    )


def add_old_first(parser: argparse.ArgumentParser, field: str) -> None:
    """Adds the option that a first argument without a dash was; `settle_first` reads it."""
    new = f"the first argument, {field.upper()}"
    add_old_name(parser, f"--{field}", new, dest=f"named_{field}", metavar=field.upper())


def settle_first(args: argparse.Namespace) -> None:
    """Brings what was given as `--checkpoint` or `--config` to the field of the first argument.

    Where that is an option, the first word belongs to those that follow it, whose field
    `args.words_after` names.

    Raises:
      ValueError: it is given in both ways.
    """
    for field in _FIRST:
        given, first = getattr(args, f"named_{field}", None), getattr(args, field, None)
        if given is None:
            continue
        words_after: str = getattr(args, "words_after", "")
        if first is not None and not words_after:
            raise ValueError(
                f"the {field} is given twice, {first!r} and --{field} {given!r}; leave --{field} "
                "out"
            )
        if first is not None:
            setattr(args, words_after, [first, *getattr(args, words_after)])
        setattr(args, field, given)


def is_first_word(args: argparse.Namespace) -> bool:
    """Whether the checkpoint is the first argument without a dash, and was no option."""
    return args.checkpoint is not None and not hasattr(args, "named_checkpoint")


class _OldName(argparse.Action):
    """Stores a value, and says how its option is called now."""

    def __init__(self, *args: Any, new: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._new = new

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del parser
        say(f"[{option_string} is now {self._new}; the old name goes with the next release]")
        setattr(namespace, self.dest, values)
