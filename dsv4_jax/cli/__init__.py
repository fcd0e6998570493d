"""The command line, `dsv4-jax`: one file a command."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from dsv4_jax.cli import bench, convert, generate, plan, verify
from dsv4_jax.cli.arguments import Parser
from dsv4_jax.cli.ending import run_to_status
from dsv4_jax.runtime import set_xla_flags, use_compilation_cache

_COMMANDS = {
    "generate": generate,
    "plan": plan,
    "bench": bench,
    "verify": verify,
    "convert": convert,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; bad input ends it with one clear message and status 2."""
    return run_to_status("dsv4-jax", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="dsv4-jax", description="DeepSeek-V4 inference in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").split("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(argv)
    use_compilation_cache()
    with contextlib.suppress(RuntimeError):  # JAX runs already, in the process that calls this
        set_xla_flags()
    return run_to_status(f"dsv4-jax {args.command}", lambda: _COMMANDS[args.command].run(args))
