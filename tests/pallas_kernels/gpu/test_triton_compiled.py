"""What the package `triton` makes of kernels; it is 180 MB, and only the extras of CUDA have it."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tools import aot, lower_all

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or aot.unavailable() is not None,
    reason="needs the packages triton and nvidia-cuda-nvcc",
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


@pytest.mark.slow
def test_where_the_backend_is_gone_only_its_registration_is_there():
    script = """
from tools import lower_all
lower_all.without_backend()
from jax._src.pallas.triton import pallas_call_registration
for name in ("jax.experimental.pallas.triton", "jax._src.pallas.triton.lowering", "jaxlib.triton"):
    try:
        __import__(name)
    except ImportError:
        print("gone")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "gone\n" * 3, done.stderr[-2000:]


@needs_triton
@pytest.mark.slow
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
