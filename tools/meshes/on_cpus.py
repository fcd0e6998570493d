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
    python -m tools.meshes.on_cpus load FOLDER 4x2             a checkpoint

`run` does so in a process of its own, since the number of devices is set before JAX starts.
"""

import argparse
import json

from tools.meshes import drafts, engine, grammars, load, mixed, peers, rounds, split, steps
from tools.meshes.harness import add_parts, run_module, with_cpu_devices

CHECKS = {
    "steps": steps,
    "split": split,
    "engine": engine,
    "grammars": grammars,
    "drafts": drafts,
    "rounds": rounds,
}
OTHERS = {"mixed": mixed, "peers": peers, "load": load}
"""Checks whose meshes are their own, or stand behind something else."""


def run(*arguments):
    """What the program prints with these arguments."""
    return run_module("on_cpus", *arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = add_parts(parser, CHECKS | OTHERS)
    for name in CHECKS:
        commands[name].add_argument("meshes", nargs="+", metavar="DATAxMODEL")
    arguments = parser.parse_args()
    print(json.dumps(arguments.part.check_all(arguments), default=bool))


if __name__ == "__main__":
    with_cpu_devices("on_cpus")
    main()
