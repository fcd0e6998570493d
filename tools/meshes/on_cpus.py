"""Checks meshes of eight CPU devices against one device, and prints what it found as JSON.

    python -m tools.meshes.on_cpus steps 2x4 1x2               prefill in chunks, then decoding
    python -m tools.meshes.on_cpus steps 2x4 --all             every kind of step
    python -m tools.meshes.on_cpus split 1x8 2x4 --steps 40    blocks dealt over model
    python -m tools.meshes.on_cpus engine 2x2 --events 40 --damage
    python -m tools.meshes.on_cpus engine 4x2 2x1 --seeds 0 1 2 --events 300 --scarce
    python -m tools.meshes.on_cpus grammars 2x2 1x2 2x1
    python -m tools.meshes.on_cpus drafts 2x1 1x2 2x2          DSpark drafts
    python -m tools.meshes.on_cpus rounds 2x1 1x2 2x2          rounds of the benchmark
    python -m tools.meshes.on_cpus mixed                       arguments on different meshes
    python -m tools.meshes.on_cpus peers                       buffers of peers

`run` does so in a process of its own, since the number of devices is set before JAX starts.
"""

import argparse
import json

from tools.meshes import drafts, engine, grammars, mixed, peers, rounds, split, steps
from tools.meshes.harness import run_module

CHECKS = {
    "steps": steps,
    "split": split,
    "engine": engine,
    "grammars": grammars,
    "drafts": drafts,
    "rounds": rounds,
}
WITHOUT_MESHES = {"mixed": mixed, "peers": peers}
"""Checks whose meshes are their own."""


def run(*arguments):
    """What the program prints with these arguments."""
    return run_module("on_cpus", *arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="CHECK")
    for name, check in (CHECKS | WITHOUT_MESHES).items():
        command = commands.add_parser(name, help=" ".join(check.__doc__.split("\n\n")[0].split()))
        command.set_defaults(check=check)
        if name in CHECKS:
            command.add_argument("meshes", nargs="+", metavar="DATAxMODEL")
        if hasattr(check, "add_arguments"):
            check.add_arguments(command)
    arguments = parser.parse_args()
    print(json.dumps(arguments.check.check_all(arguments), default=bool))


if __name__ == "__main__":
    main()
