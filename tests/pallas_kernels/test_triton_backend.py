"""Pallas's Triton backend is deprecated: one module names it, and nothing else needs it."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BACKENDS = (
    "jax.experimental.pallas.triton",
    "jax._src.pallas.triton",
    "jaxlib.triton",
    "jax._src.lib.triton",
)
ONLY = "pallas_kernels/gpu/triton_pallas.py"
FOLDERS = ("pallas_kernels", "dsv4_jax", "tests", "tools", "benchmarks", "examples", "docs")
COMPILES = re.compile(
    r"\b(?:aot\.(?:figures_of|collect|lower_case|compile_case)|at_size\.run)\(|\btools\.step_at_size"
)
"""What a test calls that compiles or lowers for a GPU that is not there."""
WITHOUT_THE_BACKEND = """
import importlib, pkgutil, sys
for name in {backends}:
    sys.modules[name] = None
import pallas_kernels
for module in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels."):
    if module.name != "pallas_kernels.gpu.triton_pallas":
        importlib.import_module(module.name)
try:
    importlib.import_module("pallas_kernels.gpu.triton_pallas")
except ImportError:
    print("as it should be")
"""


def imported(tree):
    """Names of all modules that a source imports, and of what it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(getattr(a, "value", None), str))


def attributes(tree):
    """Names of what is reached through modules, such as `jax.experimental.pallas.triton.load`."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            given = {(a.asname or a.name.split(".")[0]): a for a in node.names}
            modules |= {k: a.name if a.asname else k for k, a in given.items()}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            yield f"{modules.get(first, first)}.{rest}"


def names_the_backend(source):
    if "triton" not in source:
        return False
    tree = ast.parse(source)
    names = {*imported(tree), *attributes(tree)}
    return any(f"{name}.".startswith(f"{b}.") for name in names for b in BACKENDS)


def test_one_module_names_the_backend():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = [p.relative_to(ROOT).as_posix() for p in paths if names_the_backend(p.read_text())]
    assert found == [ONLY]


@pytest.mark.parametrize(
    "line",
    [
        "from jax.experimental.pallas import triton as pltri",
        "import jax.experimental.pallas.triton",
        "from jax._src.pallas.triton.primitives import load",
        "from jaxlib.triton import dialect",
        "from jax._src.lib import triton",
        "importlib.import_module('jax.experimental.pallas.triton')",
        "from jax.experimental import pallas as pl; pl.triton.load(x)",
        "import jax.experimental.pallas as pl; pl.triton.load(x)",
        "import jax; jax.experimental.pallas.triton.load(x)",
    ],
)
def test_each_way_of_naming_it_is_seen(line):
    assert names_the_backend(line)
    assert not names_the_backend("from pallas_kernels.gpu import triton")


@pytest.mark.slow
def test_all_other_modules_are_imported_without_it():
    script = WITHOUT_THE_BACKEND.format(backends=BACKENDS)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "as it should be\n", done.stderr[-2000:]


def test_what_compiles_for_gpus_can_be_run_without_it():
    """`DSV4_WITHOUT_TRITON_BACKEND=1 pytest -m compiled` finds all of it by the marker."""
    tests = [p for p in (ROOT / "tests").rglob("test_*.py") if COMPILES.search(p.read_text())]
    assert len(tests) >= 6
    assert not [path for path in tests if "pytest.mark.compiled" not in path.read_text()]
