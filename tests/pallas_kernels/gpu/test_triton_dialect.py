"""Triton's IR, as the package `triton` writes it, is read by the Triton that is in XLA."""

import re

import jax
import numpy as np
import pytest
from jaxlib.mlir import ir

from pallas_kernels.gpu import triton, triton_lowering
from pallas_kernels.gpu.triton_language import lowering

POLICIES = [
    ("", []),
    (" evictionPolicy = evict_first", ["evict_first"]),
    (" cacheModifier = cg", ["cg"]),
    (" cacheModifier = cg evictionPolicy = evict_last", ["cg", "evict_last"]),
    (" evictionPolicy = evict_last {isVolatile = true}", ["evict_last", "isVolatile"]),
]
WORDS = {"cg", "evict_first", "evict_last", "isVolatile"}


def module(load, store):
    """As `str` of a module of Triton 3.6 and 3.8 has it."""
    return f"""module {{
  tt.func public @kernel(%p: !tt.ptr<f32>, %mask: i1, %other: f32) {{
    %0 = tt.load %p, %mask, %other{load} : !tt.ptr<f32>
    tt.store %p, %0, %mask{store} : !tt.ptr<f32>
    tt.return
  }}
}}"""


@pytest.fixture
def dialect():
    """jax's own copy of the dialect, which is that of its XLA."""
    backend = pytest.importorskip("pallas_kernels.gpu.triton_pallas")
    with ir.Context() as context:
        backend.dialect.register_dialect(context)
        context.load_all_available_dialects()
        yield


@pytest.mark.parametrize(("policy", "words"), POLICIES)
def test_policies_of_loads_and_stores_are_read(dialect, policy, words):
    written = module(policy, policy.partition(" {")[0])
    read = str(ir.Module.parse(lowering.in_xla_s_dialect(written)))
    assert set(words) == WORDS & set(re.findall(r"\w+", read))


def test_xla_is_told_the_name_that_the_module_has(monkeypatch):
    """Of a kernel that is called like a function of its module."""

    class Told(Exception):
        pass

    def custom_call(**arguments):
        raise Told(arguments["backend_config"]["name"].value)

    monkeypatch.setattr(lowering, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(lowering, "triton_ir", lambda source, *_: source.name)
    monkeypatch.setattr(lowering.mlir, "custom_call", custom_call)
    x = jax.ShapeDtypeStruct((128,), np.float32)

    def kernel(x, output):
        output[...] = x[...] * 2

    def call(x):
        return triton.launch(kernel, grid=(1,), inputs=x, outputs=x, num_warps=1, name="add")

    with triton_lowering.use_lowering("ir"), pytest.raises(Told, match=r"^add_$"):
        jax.jit(call).trace(x).lower(lowering_platforms=("cuda",))
