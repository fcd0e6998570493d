"""What sanitizers are given runs: each call here in the interpreter, on a GPU under their eyes."""

import jax
import pytest

from helpers import kernels_alone, slow
from pallas_kernels import gpu_interpreter


@pytest.mark.parametrize("name", slow.all_but(["gather"], list(kernels_alone.CALLS)))
def test_a_call_alone_runs(name):
    with gpu_interpreter():
        assert all(leaf.size for leaf in jax.tree.leaves(kernels_alone.CALLS[name]()))
