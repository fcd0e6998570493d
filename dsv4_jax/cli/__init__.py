"""The command line, `dsv4-jax`: one file a command.

JAX is imported with a command, not before: its versions and the list of commands need none of it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import pathlib
import platform
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import dsv4_jax
from dsv4_jax.cli.ending import run_to_status
from dsv4_jax.cli.old_names import settle_first
from dsv4_jax.cli.parser import Parser
from dsv4_jax.signals import end_at_once
from dsv4_jax.sources import imports_before, sources_at_start
from dsv4_jax.standard_streams import takes_answers

_COMMANDS = {
    "generate": "Completes prompts, from a small checkpoint or from one that is named.",
    "serve": "Answers HTTP clients of OpenAI's and Anthropic's protocols.",
    "batch": "Answers a file of requests in OpenAI's batch format; resumable.",
    "plan": "Prints what a cache and the weights take, and what fits one GPU or several.",
    "bench": "Times decode steps, prefill and single ops at a model's real shapes.",
    "verify": "Checks a checkpoint, and every row of a live cache that serves it.",
    "evaluate": "Measures held-out loss, and what an idea changes of it.",
    "sweep": "Measures ideas by contexts: loss, decode steps and memory.",
    "convert": "Converts a checkpoint to the release's FP8 and FP4, or to BF16.",
}
"""Summaries by name, which is a module's too; docstrings are gone under `python -OO`."""

_ANSWER_ELSEWHERE = {"serve", "batch"}
"""Commands that write nothing on standard output."""

_HAVE_ENGINES = {"generate", "serve", "batch"}
_AT_START = frozenset(
    {
        "dsv4_jax",
        "dsv4_jax.__main__",
        "dsv4_jax.cli",
        "dsv4_jax.cli.ending",
        "dsv4_jax.cli.old_names",
        "dsv4_jax.cli.parser",
        "dsv4_jax.signals",
        "dsv4_jax.sources",
        "dsv4_jax.standard_streams",
    }
)
"""Modules that a command has imported when it asks what the others hold."""
_is_alone: list[bool] = []
"""Whether nobody but a command has imported the package, and all its files are seen."""
"""Commands that answer by an engine."""

_COMPILES_QUICKLY = {"generate", "serve", "batch", "verify", "evaluate"}
"""Commands that compile a small model quickly on a CPU; others time what they compile."""

_WITHOUT_JAX = {("plan", None), ("bench", "serve")}
"""Commands, and what of them is chosen, that compute nothing with JAX."""

_PYTHONS_FORM = warnings.formatwarning


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; bad input ends it with one clear message and status 2."""
    return run_to_status("dsv4-jax", lambda: _run(argv))


def import_command(argv: Sequence[str]) -> None:
    """Imports the command of these words, and JAX with it; nothing if there is none."""
    if (name := _command_of(argv)) is not None:
        if name in _HAVE_ENGINES and not imports_before(_AT_START):
            _is_alone.append(sources_at_start().digest is not None)
        _module_of(name)


def make_parser(only: str | None = None) -> Parser:
    """The parser of all commands.

    Args:
      only: the command whose arguments are added, so that modules of others are not imported; None
        adds those of all.
    """
    parser = Parser(prog="dsv4-jax", description="DeepSeek-V4 inference in JAX.")
    versions = f"jax {importlib.metadata.version('jax')}, Python {platform.python_version()}"
    parser.add_argument(
        "--version",
        action="version",
        version=f"dsv4-jax {dsv4_jax.__version__} ({versions})",
        help="show the versions of this program, of jax and of Python",
    )
    commands = parser.add_subparsers(dest="command")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if only in (None, name):
            _module_of(name).add_arguments(command)
    return parser


def use_compilation_cache() -> None:
    """`runtime.use_compilation_cache`, unless there is no home for it."""
    from dsv4_jax import runtime

    with contextlib.suppress(ValueError):
        runtime.use_compilation_cache()


def use_stored_programs() -> None:
    """`stored_programs.use_stored_programs`, beside what jax keeps, if it does."""
    import jax

    from dsv4_jax import stored_programs

    settings: Any = jax.config
    folder = settings.jax_compilation_cache_dir
    if settings.jax_enable_compilation_cache and folder and "://" not in folder:
        stored_programs.use_stored_programs(pathlib.Path(folder) / "programs")


def prepare_jax(**flags: str) -> None:
    """`environment.prepare_jax`."""
    from dsv4_jax.cli import environment

    environment.prepare_jax(**flags)


def _command_of(words: Sequence[str]) -> str | None:
    return next((word for word in words if word in _COMMANDS), None)


def _module_of(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    with end_at_once("dsv4-jax"):  # imports of a command take seconds
        parser = make_parser(_command_of(words) or "")
        args: Any = parser.parse_args(words)
        if args.command is None or (args.command == "bench" and args.what is None):
            parser.parse_args([*filter(None, [args.command]), "--help"])
        warnings.formatwarning = _format_warning
        use_compilation_cache()
        command = _module_of(str(args.command))

    def run() -> int:
        with end_at_once(f"dsv4-jax {args.command}"):
            settle_first(args)
            if args.command not in _ANSWER_ELSEWHERE and not takes_answers():
                raise ValueError(
                    "standard output must be open for writing, since answers go there; add > FILE, "
                    "or > /dev/null"
                )
            if (args.command, getattr(args, "what", None)) not in _WITHOUT_JAX:
                prepare_jax(**_flags_of(args))
                if argv is None and any(_is_alone):
                    use_stored_programs()
        return command.run(args)

    return run_to_status(f"dsv4-jax {args.command}", run)


def _flags_of(args: Any) -> dict[str, str]:
    """Flags of XLA by which a command's programs are compiled."""
    if args.command not in _COMPILES_QUICKLY:
        return {}
    quick_start = _module_of("quick_start")
    return quick_start.FLAGS if quick_start.starts_quickly(args.checkpoint) else {}


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning of ours is for who runs the command: one line, without a place in the code."""
    if category.__module__.startswith(("dsv4_jax.", "pallas_kernels.")):
        return f"[{message}]\n"
    return _PYTHONS_FORM(message, category, filename, lineno, line)
