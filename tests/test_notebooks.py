"""Every notebook runs from top to bottom, within minutes, on public names alone.

Of two the default run takes the cells' syntax and imports alone: they compile the shipped model
several times.
"""

import ast
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

from helpers import slow

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", slow.all_but([], NOTEBOOKS), ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch):
    """On a CPU; a figure or a number that raises fails here."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    NotebookClient(read(path), timeout=300, kernel_name="python3").execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path):
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_imports_public_names_only(path):
    ours = ("dsv4_jax", "pallas_kernels")
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            inner = [name for name in names if name.split(".")[0] in ours and "." in name]
            assert not inner, f"{inner} is not public"
