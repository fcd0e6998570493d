"""A mesh whose devices lie in several processes of one host.

    python -m tools.meshes.processes engine 2 --mesh 2x2                      tokens, as JSON
    python -m tools.meshes.processes engine 2 --mesh 2x2 --lost 1 --how stop  one is lost in between
    python -m tools.meshes.processes engine 2 --mesh 1x4 --gpus               at released shapes
    python -m tools.meshes.processes pages 2 --mesh 1x2 2x1                   arrays of random bytes
    python -m tools.meshes.processes pages 2 --mesh 1x2 --lost                process 1 is killed
    python -m tools.meshes.processes pages 2 --mesh 2x1 --engine              requests of an engine
    python -m tools.meshes.processes pages 1 --mesh 2x1 --engine --plain      without a host cache
    python -m tools.meshes.processes pages 2 --mesh 1x2 2x1 --gpus            on a GPU each
    python -m tools.meshes.processes peers 2                                  buffers of peers

Starts the processes and prints, as JSON, what each of them found.
"""

import argparse
import json

from tools.meshes import engine_of_processes, pages_of_processes, peers_of_processes
from tools.meshes.harness import add_parts

PARTS = {"engine": engine_of_processes, "pages": pages_of_processes, "peers": peers_of_processes}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for command in add_parts(parser, PARTS).values():
        command.add_argument("count", type=int, help="processes")
        command.add_argument("--process", type=int, nargs=3, help="be one: number, how many, port")
    arguments = parser.parse_args()
    if arguments.process:
        arguments.part.be_one(arguments)
    else:
        print(json.dumps(arguments.part.check_all(arguments)))


if __name__ == "__main__":
    main()
