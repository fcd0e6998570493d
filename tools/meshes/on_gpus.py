"""Meshes of all GPUs that are there: against one of them, what collectives cost, and their kernels.

    python -m tools.meshes.on_gpus                            `places`: all GPUs, released shapes
    XLA_FLAGS=--xla_force_host_platform_device_count=2 \\
        python -m tools.meshes.on_gpus --tiny --jobs 1        CPU devices, a small model
    python -m tools.meshes.on_gpus --config v41               layers of V4.1-Flash instead of V4's
    python -m tools.meshes.on_gpus graphs --layers 8 --points 1@4096 8@4096
    python -m tools.meshes.on_gpus peers [--calls 40] [--processes 4]

Parts print JSON lines as they come, and the exit status says whether all is as promised.
"""

import argparse
import sys

from tools.meshes import graphs, peers_on_gpus, places
from tools.meshes.harness import add_parts

PARTS = {"places": places, "graphs": graphs, "peers": peers_on_gpus}
DEFAULT = "places"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_parts(parser, PARTS)
    given = sys.argv[1:]
    if given[:1] not in [[name] for name in (*PARTS, "-h", "--help")]:
        given = [DEFAULT, *given]
    arguments = parser.parse_args(given)
    return arguments.part.check_all(arguments)


if __name__ == "__main__":
    sys.exit(main())
