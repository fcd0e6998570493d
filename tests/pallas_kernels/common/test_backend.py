import jax
import numpy as np
import pytest

import pallas_kernels as pk
from helpers import inputs
from pallas_kernels import Backend
from pallas_kernels.common import backend
from pallas_kernels.common.backend import resolve

OPS = [
    "append_and_flush",
    "append_tokens",
    "encode_tokens",
    "flush_csa",
    "flush_hca",
    "flush_write",
    "gather_entries",
    "gather_window",
    "index_topk",
    "hyper_connections",
    "round_index_queries",
    "sparse_attention",
]
REFERENCE_ONLY = {Backend.REFERENCE: lambda: "the definition"}
each_op = pytest.mark.parametrize("op", OPS)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, "reference"])
def test_a_named_backend_is_the_one_that_runs(backend):
    assert resolve("op", backend, REFERENCE_ONLY)() == "the definition"


def test_none_picks_one_that_runs_here():
    assert resolve("op", None, REFERENCE_ONLY)() == "the definition"


@pytest.mark.parametrize("name", ["mosaic-gpu", "Reference", "", "REFERENCE", "cuda"])
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    with pytest.raises(ValueError, match="backend must be one of") as raised:
        resolve("op", name, REFERENCE_ONLY)
    assert all(repr(known) in str(raised.value) for known in (*(b.value for b in Backend), name))


@pytest.mark.parametrize("backend", [Backend.REFERENCE, "reference"])
def test_a_known_backend_that_the_op_lacks_is_not_replaced_by_another(backend):
    with pytest.raises(NotImplementedError, match=r"gather has no .*reference.* implementation"):
        resolve("gather", backend, {})


@each_op
def test_every_op_obeys_the_backend_it_is_given(op):
    arguments = inputs.valid_arguments(op)
    chosen = getattr(pk, op)(**arguments)
    named = getattr(pk, op)(**arguments, backend="reference")
    jax.tree.map(np.testing.assert_array_equal, chosen, named)
    with pytest.raises(ValueError, match="backend must be one of"):
        getattr(pk, op)(**arguments, backend="mosaic-gpu")


def test_every_op_is_covered():
    ops = {name for name in pk.__all__ if name[0].islower()} - {
        "get_cache_format",
        "gpu_interpreter",
    }
    assert ops == set(OPS)


def test_a_gpu_kernel_without_a_gpu_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: None)
    kernels = {Backend.REFERENCE: lambda: "slow", Backend.MOSAIC_GPU: lambda: "fast"}
    with pytest.raises(NotImplementedError, match=r"need an NVIDIA GPU .*got None; pass backend="):
        resolve("op", "mosaic_gpu", kernels)
    with pk.gpu_interpreter():
        assert resolve("op", "mosaic_gpu", kernels)() == "fast"
        assert resolve("op", None, kernels, preferred=Backend.MOSAIC_GPU)() == "slow"


def test_none_picks_the_preferred_kernel_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: (9, 0))
    kernels = {Backend.REFERENCE: lambda: "slow", Backend.MOSAIC_GPU: lambda: "fast"}
    assert resolve("op", None, kernels, preferred=Backend.MOSAIC_GPU)() == "fast"
    assert resolve("op", None, kernels)() == "slow"
