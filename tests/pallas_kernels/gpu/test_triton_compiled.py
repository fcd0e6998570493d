"""What the package `triton` makes of kernels; it is 180 MB, and only the extras of CUDA have it."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile

import pytest

from helpers import slow
from pallas_kernels.gpu import triton_lowering
from tools import aot, aot_figures, lower_all, no_triton_backend

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)
RECORDED = {
    "a": {"kernels": {"flush": {"route": "triton"}}},
    "b": {"kernels": {"multiply": {"route": "mosaic"}}},
    "c": {"kernels": {"flush": {"route": "triton"}, "multiply": {"route": "mosaic"}}},
    "d": {"kernels": {"flush": {"route": "triton"}, "gather": {"route": "triton"}}},
}


def test_cases_of_triton_are_chosen():
    """And those that nothing is known of."""
    cases = ["a", "b", "c", "d", "e"]
    assert lower_all.choose(cases, RECORDED) == ["a", "c", "d", "e"]
    assert lower_all.choose(cases, RECORDED, once=True) == ["a", "d", "e"]


def test_a_name_that_no_case_begins_with_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(aot, "unavailable", lambda: "")
    monkeypatch.setattr(aot, "WITHOUT_A_GPU", {})
    monkeypatch.setattr(sys, "argv", ["lower_all", "sm_90a", "--only", "write_stream/", "typo"])
    with pytest.raises(SystemExit, match="2"):
        lower_all.main()
    assert "argument --only: no case begins with 'write_stream/'" in capsys.readouterr().err


@pytest.mark.parametrize("asked", slow.all_but(["1"], ["1", ""]))
def test_where_the_backend_is_gone_only_its_registration_is_there(asked):
    """What is left of it is nothing of jax's own."""
    script = """
import importlib
from tools import no_triton_backend
no_triton_backend.take_away_if_asked()
from jax._src.pallas.triton import pallas_call_registration as registration
for name in ("jax.experimental.pallas.triton", "jax._src.pallas.triton.lowering", "jaxlib.triton"):
    try:
        importlib.import_module(name)
    except ImportError:
        print("gone")
print(hasattr(registration, "__file__"))
"""
    command = [sys.executable, "-c", script]
    environment = os.environ | {no_triton_backend.VARIABLE: asked}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    expected = "gone\n" * 3 + "False\n" if asked else "True\n"
    assert done.stdout == expected, done.stderr[-2000:]


@pytest.mark.slow
def test_of_the_backend_that_is_gone_jax_triton_has_the_kind_of_a_gpu():
    script = """
from tools import no_triton_backend
no_triton_backend.take_away()
from jax._src.pallas.triton import gpu_info
print(gpu_info.__name__)
from jax._src.pallas.triton import lowering
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{no_triton_backend.BACKEND}.gpu_info\n", done.stderr[-2000:]
    assert "ImportError" in done.stderr


@needs_triton
@pytest.mark.slow
@pytest.mark.compiled
def test_without_the_backend_a_kernel_is_what_is_recorded(monkeypatch):
    """`DSV4_WITHOUT_TRITON_BACKEND=1 pytest -m compiled` says so of all of them."""
    case = "write_streams/16x4096"
    recorded = aot.read_recorded()["sm_90a"][case]
    monkeypatch.setenv(no_triton_backend.VARIABLE, "1")
    monkeypatch.delenv(triton_lowering.LOWERING_VARIABLE, raising=False)
    assert not aot_figures.complaints(aot.figures_of("sm_90a", (case,))[case], recorded)
    monkeypatch.setenv(triton_lowering.LOWERING_VARIABLE, "pallas")
    assert "ModuleNotFoundError" in aot.figures_of("sm_90a", (case,))[case]["error"]


@needs_triton
@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("write_streams/16x4096", "write_streams"),
        ("gather_entries/window", "gather_window"),
        ("pick_experts/1x256", "pick_experts"),
        ("block_linear_kernel/fp8 256x4096x2048", "quantize_rows"),
    ],
)
def test_a_kernel_compiles_without_pallas_s_backend(target, case, name):
    """To no more registers than the assembler gives two programs of eight warps on an SM."""
    command = [sys.executable, "-m", "tools.lower_all", target, "--lowering", "ptx", "--only", case]
    done = subprocess.run(command, env=aot.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for line in done.stdout.splitlines():
        kernel = json.loads(line)["kernels"][name]
        assert kernel["spill_bytes"] == 0
        assert kernel["registers"] <= 128
        assert kernel["shared_bytes"] < 48 << 10


@needs_triton
@pytest.mark.slow
@pytest.mark.compiled
def test_xla_reads_the_triton_ir_of_a_kernel():
    """One whose loads have policies, which the two Tritons write otherwise."""
    case = "flush_kernels/flush_hca fp8_ue8m0 8192 tokens"
    command = [sys.executable, "-m", "tools.lower_all", "sm_90a", "--lowering", "ir"]
    command += ["--only", case]
    done = subprocess.run(command, env=aot.environment(), capture_output=True, text=True)
    assert done.stdout == json.dumps({"case": case}) + "\n", done.stderr[-2000:]


@needs_triton
@pytest.mark.slow
@pytest.mark.compiled
def test_a_kernel_whose_name_was_changed_compiles():
    """One that has the name of a function of its module; and -0.0 stays that."""
    script = """
import os, pathlib, sys
from tools import aot
os.environ.update(aot.WITHOUT_A_GPU)
import jax, jax.numpy as jnp
from pallas_kernels.gpu import triton, triton_lowering
x = jax.ShapeDtypeStruct((128,), jnp.float32)
def kernel(x, o):
    o[...] = jnp.where(x[...] > 0, x[...], -0.0)
def call(x):
    return triton.launch(kernel, grid=(1,), inputs=x, outputs=x, num_warps=1, name="add")
with triton_lowering.use_lowering("ir"):
    lowered = aot.lower_case("sm_90a", call, (x,))
lowered.compile(compiler_options={"xla_dump_to": sys.argv[1], "xla_dump_emitter_re": "ptx"})
print("-2147483648" in "".join(p.read_text() for p in pathlib.Path(sys.argv[1]).glob("*.ptx")))
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", script, folder]
        done = subprocess.run(command, env=aot.environment(), capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr[-2000:]
