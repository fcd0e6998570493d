"""The command line, `dsv4-jax`: one file a command."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from dsv4_jax.cli import bench, convert, generate, plan, verify
from dsv4_jax.runtime import set_xla_flags, use_compilation_cache

_COMMANDS = {
    "generate": generate,
    "plan": plan,
    "bench": bench,
    "verify": verify,
    "convert": convert,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; bad input ends it with one clear line and status 2."""
    parser = argparse.ArgumentParser(prog="dsv4-jax", description="DeepSeek-V4 inference in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").split("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(argv)
    use_compilation_cache()
    with contextlib.suppress(RuntimeError):  # JAX runs already, in the process that calls this
        set_xla_flags()
    try:
        return _COMMANDS[args.command].run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"dsv4-jax {args.command}: {error}", file=sys.stderr)
        return 2
