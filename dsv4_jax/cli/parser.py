"""The parser of a command line, which raises what it has to say; it imports nothing of JAX."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from typing import Any, NoReturn

ELSEWHERE = {
    "--tensor-parallel-size": ("--model-shards",),
    "--tp-size": ("--model-shards",),
    "--tp": ("--model-shards",),
    "--data-parallel-size": ("--data-shards",),
    "--dp-size": ("--data-shards",),
    "--dp": ("--data-shards",),
    "--max-model-len": ("--max-context-tokens", "--context"),
    "--context-length": ("--max-context-tokens", "--context"),
    "--max-num-seqs": ("--max-requests", "--requests"),
    "--max-running-requests": ("--max-requests", "--requests"),
    "--max-num-batched-tokens": ("--prefill-tokens",),
    "--chunked-prefill-size": ("--prefill-tokens",),
    "--gpu-memory-utilization": ("--gpu-memory-fraction",),
    "--mem-fraction-static": ("--gpu-memory-fraction",),
    "--kv-cache-dtype": ("--cache-format",),
    "--served-model-name": ("--model-name",),
    "--speculative-config": ("--drafts",),
    "--quantization": ("--weights",),
    "--max-tokens": ("--max-new-tokens",),
}
"""By options of vLLM, SGLang and clients: those of ours, of which a command has one or none."""

_UNKNOWN = "unrecognized arguments: "
_NO_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser that takes whole names of options alone, and raises what it has to say.

    Its help shows the default of every option that has one; the others say what holds if they are
    not given.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `argparse.ArgumentParser`."""
        options = {"allow_abbrev": False, "formatter_class": _ShowingDefaults} | options
        super().__init__(*args, **options)
        self._mixes = False
        self._words: list[str] = []

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As `argparse.ArgumentParser`, but that arguments without a dash may stand anywhere.

        `--name=--` is refused, of which Python 3.12 makes a [].
        """
        words = list(sys.argv[1:] if args is None else args)
        for word in itertools.takewhile(lambda word: word != "--", words):
            name, _, value = word.partition("=")
            if name.startswith("--") and value == "--":
                self.error(f"argument {name}: must be a value, got '--', which ends options")
        # Python's own takes options first and the rest after them, by two calls of this method. It
        # loses a leading "--", after which nothing is an option anyway.
        if self._mixes or self._subparsers is not None or "--" in words:
            return super().parse_known_args(words, namespace)
        self._mixes = True
        try:
            return self.parse_known_intermixed_args(words, namespace)
        finally:
            self._mixes = False

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As `argparse.ArgumentParser`; of an option that there is not, it says which is meant."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_args(self._words, namespace)

    def _hint(self, unknown: str) -> str:
        """What an unknown option may be meant for; "" if nothing is near it."""
        name = unknown.partition("=")[0]
        if not name.startswith("--"):
            return ""
        parser = self
        for word in self._words:
            if parser._subparsers is None:
                break
            commands: Any = parser._subparsers._group_actions[0]
            parser = commands.choices.get(word, parser)
        options = {
            option
            for action in parser._actions
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
        }
        near = [option for option in ELSEWHERE.get(name, ()) if option in options]
        near = near or difflib.get_close_matches(name.replace("_", "-"), sorted(options), n=1)
        return f"{name} may be meant for {near[0]}" if near else ""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends after a help or a version, of which `argparse` forgets whether it was written."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the command and the message."""
        if message.startswith(_UNKNOWN):
            hints = map(self._hint, message.removeprefix(_UNKNOWN).split(" "))
            message = "; ".join([message, *filter(None, hints)])
        if found := _NO_CHOICE.search(message):
            near = difflib.get_close_matches(found[1], re.findall(r"[\w.-]+", found[2]), n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{self.prog}: {message}")


class _ShowingDefaults(argparse.HelpFormatter):
    """Adds its default to the help of an option that takes a value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_switch = isinstance(action, argparse.BooleanOptionalAction)
        if not action.option_strings or default in (None, [], argparse.SUPPRESS):
            return text
        if action.nargs == 0 and not is_switch:
            return text
        if is_switch:
            default = "on" if default else "off"
        elif isinstance(default, list | tuple):
            default = ",".join(map(str, default))
        elif isinstance(default, float):
            default = f"{default:g}"
        return f"{text} (default: {default})".replace("%", "%%")


class UsageError(ValueError):
    """What is wrong with a command line; its message begins with the command."""
