"""What lowering a kernel does on the way to a compiler."""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.gpu import triton


class Finder:
    """Finds no module, and remembers which were looked for."""

    def __init__(self):
        self.names = []

    def find_spec(self, name, path=None, target=None):
        self.names.append(name)


def test_no_module_is_looked_for_once_an_operation(monkeypatch):
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def call(x):
        return triton.launch(double, grid=(1,), inputs=x, outputs=x, num_warps=1, name="double")

    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    card = AbstractDevice("NVIDIA H200", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=card)):
        traced = jax.jit(call).trace(jax.ShapeDtypeStruct((128,), jnp.float32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
    assert [name for name in finder.names if finder.names.count(name) > 1] == []
