"""The compilation cache finds programs whose kernels lie in another folder, on other lines."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from dsv4_jax import cache_keys
from helpers import slow
from pallas_kernels.gpu import triton_lowering
from tools import aot

pytestmark = pytest.mark.compiled

ROOT = pathlib.Path(__file__).parents[2]
SOME = (
    "select_top_k/top 512 of 64 x 4096",  # Mosaic
    "joined_linears/64x4096",  # Triton
    "write_streams/64x7168",  # both a Triton kernel and XLA's own
)
CONSTANTS = [
    (SOME[0], "select_top_k.ptx", "BARRIER", "bar.sync 1;"),
    ("joined_linears/1x4096", "joined_linears.triton_gpu", "_OUTPUTS", 4),
]
HEAD = "from __future__ import annotations\n"
CODE = """
import hashlib, json, sys
import dsv4_jax as ds
from dsv4_jax import compat
from tools import aot
folder, names = json.loads(sys.argv[1])
def call_of_a_user(*arrays):
    return function(*arrays)
def hash_of(module):
    return hashlib.sha256(compat.canonicalize(module)).hexdigest()
cases = aot.collect("sm_90a", tuple(names))
keys = {}
for stage in ("jax's own", "ours"):
    for name, (function, *rest) in cases.items():
        if name.startswith(aot.BROKEN):
            continue
        lowered = aot.lower_case("sm_90a", call_of_a_user, *rest)
        keys.setdefault(stage, {})[name] = hash_of(lowered._lowering.stablehlo())
    ds.use_compilation_cache(folder)
print(json.dumps(keys))
"""


def copy_to(folder, *, lines=0):
    """The packages and the cases, with so many comments above all code."""
    for name in ("benchmarks", "dsv4_jax", "pallas_kernels", "tests", "tools"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("data", "__pycache__")
        )
    if lines:
        for path in (*folder.rglob("pallas_kernels/**/*.py"), *folder.rglob("dsv4_jax/**/*.py")):
            text = path.read_text()
            path.write_text(text.replace(HEAD, HEAD + lines * "# A comment.\n", 1))
    return folder


def keys_of(folder, names):
    """{"jax's own" or "ours": {case: its hash}}, by a process that sees this copy alone."""
    (folder / "script.py").write_text(CODE)
    paths = f"{folder}{os.pathsep}{folder / 'tests'}"
    done = subprocess.run(
        [sys.executable, "script.py", json.dumps([str(folder / "cache"), names])],
        env=os.environ | aot.WITHOUT_A_GPU | {"PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_another_folder_and_other_lines_change_no_key(tmp_path):
    first = keys_of(copy_to(tmp_path / "a"), SOME)
    second = keys_of(copy_to(tmp_path / "a longer name", lines=3), SOME)
    assert second["ours"] == first["ours"]
    with_lines = SOME if triton_lowering.lowering() == "pallas" else SOME[:1]
    assert all(second["jax's own"][name] != first["jax's own"][name] for name in with_lines)
    assert len(set(first["ours"].values())) == len(SOME)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "constant", "other"),
    slow.all_but(CONSTANTS[1:], CONSTANTS),
)
def test_another_kernel_has_another_key(name, module, constant, other, monkeypatch):
    """Of either kind, and be it by one character."""
    function, *rest = aot.collect("sm_90a", (name,))[name]
    keys = []
    for changes in (False, False, True):
        if changes:
            monkeypatch.setattr(sys.modules[f"pallas_kernels.{module}"], constant, other)
        jax.clear_caches()
        lowered = aot.lower_case("sm_90a", lambda *arrays: function(*arrays), *rest)
        program = lowered._lowering.stablehlo()
        with program.context:
            cache_keys.strip_kernels(program)
        keys.append(program.operation.get_asm(enable_debug_info=False))
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


@pytest.mark.slow
def test_no_kernel_of_the_library_has_its_place_in_a_key(tmp_path):
    found = []
    for folder in (copy_to(tmp_path / "a"), copy_to(tmp_path / "b" / "c", lines=7)):
        found.append(keys_of(folder, [""]))
    assert len(found[0]["ours"]) > 50
    assert found[0]["ours"] == found[1]["ours"]
    assert found[0]["jax's own"] != found[1]["jax's own"]


@pytest.mark.skipif(
    triton_lowering.lowering() != "pallas", reason="Triton's language keeps no lines of a kernel"
)
def test_what_is_compiled_keeps_its_lines():
    """Errors of a kernel and profiles name them; only the copy that is hashed has none."""
    [case] = aot.collect("sm_90a", (SOME[1],)).values()
    module = aot.lower_case("sm_90a", *case)._lowering.stablehlo()
    before = str(module)
    with module.context:
        copy = module.operation.clone(ip=False)
        cache_keys.strip_kernels(copy)
    assert "joined_linears/triton_gpu.py" in before
    assert "joined_linears/triton_gpu.py" not in str(copy)
    assert str(module) == before


@pytest.mark.parametrize(("location", "is_told"), [("", False), (' loc("kernel.py":7:1)', True)])
def test_text_without_locations_need_not_be_understood(caplog, location, is_told):
    """Triton's dialect goes with Pallas's backend for it."""
    text = f"module {{ no_dialect_of_jax.func @kernel(){location} }}".encode()
    keys = {cache_keys.hash_of_kernel(text + more) for more in (b"", b"", b" ")}
    assert len(keys) == 2
    assert bool(caplog.records) == is_told
