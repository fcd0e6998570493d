"""Runs the notebooks on a CPU and keeps their outputs: `python -m tools.notebooks [names]`.

A name is how a file begins, such as `03`; without any all of them run. With PYTHONPATH=.:tests.
"""

import argparse
import os
import pathlib
import sys

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}


def run(path, *, timeout=900):
    """The notebook with the outputs of this run, in the form in which it is kept."""
    os.environ.update(ENVIRONMENT | {"PYTHONPATH": str(path.parents[1])})
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", record_timing=False)
    client.execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = join_streams(cell.outputs)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def join_streams(outputs):
    """The same outputs, what a stream printed in several pieces joined."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last["text"] += output.text
        else:
            joined.append(output)
    return joined


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="how files begin; if not given, all run")
    names = tuple(parser.parse_args().names)
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.name.startswith(names or ""):
            nbformat.write(run(path), path)
            print(path.name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
