"""What lowering a kernel does on the way to a compiler."""

import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gpu import triton, triton_lowering
from tools import aot


class Finder:
    """Finds no module, and remembers which were looked for."""

    def __init__(self):
        self.names = []

    def find_spec(self, name, path=None, target=None):
        self.names.append(name)


@pytest.mark.compiled
def test_no_module_is_looked_for_once_an_operation(monkeypatch):
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def call(x):
        return triton.launch(double, grid=(1,), inputs=x, outputs=x, num_warps=1, name="double")

    triton_lowering.compiler_params(1)  # the choice and its module are once a process
    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    text = aot.lower_case("sm_90a", call, [jax.ShapeDtypeStruct((128,), jnp.float32)]).as_text()
    assert "triton" in text
    assert [name for name in finder.names if finder.names.count(name) > 1] == []
