"""`pallas_kernels` alone: every op is exported, and jax and numpy are enough."""

import os
import pathlib
import subprocess
import sys

import pytest

import pallas_kernels as pk

ROOT = pathlib.Path(__file__).parents[2]
ALONE = """
import sys

class OnlyJax:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(name)

sys.meta_path.insert(0, OnlyJax())
import pallas_kernels as pk
print(*pk.get_codec("grouped_fp8").plane_shapes(512, 64))
"""
BLOCKED = {
    "dsv4_jax", "flax", "huggingface_hub", "prometheus_client", "safetensors", "tokenizers", "tqdm",
}  # fmt: skip


@pytest.mark.slow
def test_jax_and_numpy_are_enough():
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(blocked=BLOCKED)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nope rope scale\n"


def test_every_op_that_has_a_page_is_exported():
    pages = {path.stem for path in (ROOT / "docs" / "kernels").glob("*.md")}
    pages -= {"README", "nccl", "triton_lowerings", "whole_steps"}
    assert {"index_scores", "select_top_k"} <= pages
    ops = pages - {"compressor", "peer_collectives"} | {"all_reduce", "all_to_all"}
    assert ops <= set(pk.__all__)
    assert all(callable(getattr(pk, op)) for op in ops)
    assert set(pk.__all__) <= set(vars(pk))


def test_a_codec_is_found_by_its_name():
    """Each is one of a cache format, and all of those have names."""
    used = {
        codec
        for cache in pk.CACHE_FORMATS.values()
        for codec in (cache.entry, cache.ring, cache.index_key)
    }
    assert {pk.get_codec(name) for name in pk.CODECS} == used
    with pytest.raises(ValueError, match=r"codec must be one of .*'mxfp4_key'.*, got 'fp4'"):
        pk.get_codec("fp4")
