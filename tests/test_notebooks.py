"""Every notebook runs to its end, on public names alone, and keeps what it printed and drew.

`python -m tools.notebooks` keeps them. The default run looks at what is kept, and at the cells'
syntax and imports; the slow one runs them again and compares text and pictures loosely.
"""

import ast
import base64
import difflib
import io
import itertools
import pathlib
import re

import nbformat
import numpy as np
import pytest
from matplotlib import image

from tools import notebooks

pytestmark = [pytest.mark.early, pytest.mark.unoptimised]

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MAX_BYTES = 1_500_000
"""Of a notebook with its pictures."""


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def texts(cell):
    """What a cell printed or gave, numbers left out: times and roundings differ by machine."""
    found = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    return re.sub(r"[-+]?\d[\d,.]*(e[-+]?\d+)?%?", "#", re.sub(r"\s+", " ", " ".join(found)))


def pictures(cell):
    """f32[h, w], the grey values of what a cell drew."""
    for output in cell.outputs:
        if encoded := output.get("data", {}).get("image/png"):
            pixels = image.imread(io.BytesIO(base64.b64decode(encoded)), format="png")
            yield pixels[..., :3].mean(axis=-1)


def ink(pixels, size=16):
    """How much is drawn in each cell of a grid: what is left of a picture from far away."""
    rows = np.array_split(1 - pixels, size)
    return np.array([[part.mean() for part in np.array_split(row, size, axis=1)] for row in rows])


def find_difference(kept, made):
    """How the outputs of two runs of a cell differ, or None."""
    one, two = texts(kept), texts(made)
    alike = difflib.SequenceMatcher(None, one, two, autojunk=False).ratio() if one or two else 1
    if alike < 0.7:
        return f"printed {two[:300]!r}, not {one[:300]!r}"
    drawn = [list(pictures(cell)) for cell in (kept, made)]
    if len(drawn[0]) != len(drawn[1]):
        return f"drew {len(drawn[1])} pictures, not {len(drawn[0])}"
    for before, after in zip(*drawn, strict=True):
        if not np.allclose(before.shape, after.shape, rtol=0.1):
            return f"drew {after.shape}, not {before.shape}"
        one, two = ink(before), ink(after)
        if np.abs(one - two).sum() > 0.25 * (one + two).sum():
            return "drew something else"
    return None


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_it_keeps(path, monkeypatch):
    """On a CPU; a figure or a number that raises fails here."""
    for name in notebooks.ENVIRONMENT:
        monkeypatch.setenv(name, "")  # put back afterwards
    monkeypatch.setenv("PYTHONPATH", "")
    made = [cell for cell in notebooks.run(path).cells if cell.cell_type == "code"]
    for number, (kept, new) in enumerate(zip(code_cells(path), made, strict=True)):
        assert not (found := find_difference(kept, new)), f"cell {number} {found}:\n{kept.source}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_its_outputs(path):
    """In order, without errors or warnings, pictures where a cell draws, and not too large."""
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert not cell.metadata
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
        draws = "plt.show()" in cell.source or ".plot(csa_layer)" in cell.source
        assert bool(list(pictures(cell))) == draws, cell.source
        if "print(" in cell.source and "def " not in cell.source:
            assert texts(cell), cell.source
    assert path.stat().st_size < MAX_BYTES


def test_the_comparison_tells_pictures_and_texts_apart():
    """Of the notebooks' own cells: each is like itself, and unlike any other that draws."""
    drawn = [cell for path in NOTEBOOKS for cell in code_cells(path) if list(pictures(cell))]
    assert len(drawn) > 8
    assert find_difference(drawn[0], drawn[0]) is None
    for one, two in itertools.pairwise(drawn):
        assert find_difference(one, two)


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
