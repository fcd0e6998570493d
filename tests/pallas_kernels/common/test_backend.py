import dataclasses
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from helpers import inputs
from helpers.arrays import zeros
from pallas_kernels import Backend
from pallas_kernels.common import backend
from pallas_kernels.common.backend import resolve

pytestmark = pytest.mark.unoptimised

NO_OPS = ("forbid_fallbacks", "get_cache_format", "get_codec", "gpu_interpreter")
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")  # they need an axis
OPS = [name for name in pk.__all__ if name[0].islower() and name not in NO_OPS + COLLECTIVES]
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

    def program(**options):
        return str(jax.make_jaxpr(lambda: getattr(pk, op)(**arguments, **options))())

    assert program() == program(backend="reference")
    with pytest.raises(ValueError, match="backend must be one of"):
        getattr(pk, op)(**arguments, backend="mosaic-gpu")


def test_a_gpu_kernel_without_a_gpu_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: None)
    kernels = {Backend.REFERENCE: lambda: "slow", Backend.MOSAIC_GPU: lambda: "fast"}
    with pytest.raises(NotImplementedError, match=r"need an NVIDIA GPU .*got None; pass backend="):
        resolve("op", "mosaic_gpu", kernels)
    with pk.gpu_interpreter():
        assert resolve("op", "mosaic_gpu", kernels)() == "fast"
        assert resolve("op", None, kernels)() == "slow"


def test_none_picks_the_preferred_kernel_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: (9, 0))
    kernels = {Backend.REFERENCE: lambda: "slow", Backend.MOSAIC_GPU: lambda: "fast"}
    assert resolve("op", None, kernels)() == "fast"
    assert resolve("op", None, kernels, preferred=Backend.MOSAIC_GPU)() == "fast"
    assert resolve("op", None, kernels, preferred=Backend.REFERENCE)() == "slow"
    assert resolve("op", None, REFERENCE_ONLY)() == "the definition"


KERNELS = {Backend.REFERENCE: lambda: "slow", Backend.MOSAIC_GPU: lambda: "fast"}
ARRAYS = {"queries": zeros((2, 3)), "index": zeros(4, jnp.int32)}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(backend, "_SAID", set())


def fall_back(op="gather", obstacle="takes bf16 queries", arguments=ARRAYS, **options):
    return resolve(op, None, KERNELS, obstacle=obstacle, arguments=arguments, **options)()


@pytest.mark.usefixtures("hopper")
def test_a_fallback_on_a_gpu_is_said_once_with_op_shapes_and_reason():
    with pytest.warns(pk.FallbackWarning, match="gather of queries") as said:
        assert fall_back() == fall_back() == "slow"
    (warning,) = said
    assert "'mosaic_gpu' gather takes bf16 queries" in str(warning.message)
    assert "queries float32[2, 3], index int32[4]" in str(warning.message)
    assert warning.filename == __file__, "the caller's line is shown, not one of the package"
    others = [
        {"op": "scatter"},
        {"obstacle": "needs R"},
        {"arguments": {"queries": jnp.zeros((2, 4))}},
    ]
    for other in others:
        with pytest.warns(pk.FallbackWarning) as said:
            fall_back(**other)
        assert len(said) == 1


def test_a_gpu_that_is_too_old_is_a_reason(monkeypatch, hopper):
    monkeypatch.setattr(backend, "compute_capability", lambda: (8, 0))
    with pytest.warns(pk.FallbackWarning, match=r"needs compute capability 9.0 .*got \(8, 0\)"):
        assert fall_back(obstacle=None) == "slow"


@pytest.mark.usefixtures("hopper")
def test_a_filter_makes_every_fallback_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error", pk.FallbackWarning)
        for _ in range(2):
            with pytest.raises(pk.FallbackWarning, match="takes bf16 queries"):
                fall_back()


@pytest.mark.usefixtures("hopper")
def test_fallbacks_can_be_forbidden():
    with pytest.warns(pk.FallbackWarning):
        fall_back()
    with pk.forbid_fallbacks(), pytest.raises(NotImplementedError, match="fallbacks are forbidden"):
        fall_back()  # also one that has been said
    assert fall_back() == "slow"


@pytest.mark.usefixtures("hopper")
def test_a_reference_that_is_preferred_or_named_is_no_fallback():
    with pk.forbid_fallbacks():
        assert fall_back(preferred=Backend.REFERENCE) == "slow"
        assert resolve("gather", "reference", KERNELS, obstacle="is slow")() == "slow"


def test_without_a_gpu_nothing_is_said(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: None)
    with pk.forbid_fallbacks():
        assert fall_back() == "slow"


@pytest.mark.usefixtures("hopper")
def test_a_named_kernel_raises_with_the_same_reason():
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' op needs R; pass backend="):
        resolve("op", "mosaic_gpu", KERNELS, obstacle="needs R")


REFUSED = {
    "sparse_attention": "takes bf16 queries",
    "index_topk": "takes MXFP4 and FP8 keys",
    "expert_mlp": "takes dense weights and rows in bfloat16",
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("op", REFUSED)
def test_ops_say_why_their_kernel_is_not_taken(op):
    with pytest.warns(pk.FallbackWarning, match=rf"{op} of .*{REFUSED[op]}"):
        jax.eval_shape(lambda: getattr(pk, op)(**inputs.valid_arguments(op)))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("op", ["gather_entries", "gather_window"])
def test_gathers_of_plain_values_take_xla_by_choice(op):
    with pk.forbid_fallbacks():
        jax.eval_shape(lambda: getattr(pk, op)(**inputs.valid_arguments(op)))


@pytest.mark.slow
def test_a_variable_forbids_fallbacks_of_a_process():
    code = "from pallas_kernels.common import backend; print(backend._FORBIDDING.get())"
    environment = os.environ | {backend.FORBID_VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode().strip() == "True"


def test_an_interpreter_that_is_too_old_is_refused(monkeypatch):
    """That of jax 0.11.1 knows no PTX in kernels."""

    @dataclasses.dataclass
    class Old:
        detect_races: bool = False

    monkeypatch.setattr(backend.plgpu, "InterpretGPUParams", Old)
    with (
        pytest.raises(RuntimeError, match=r"gpu_interpreter needs jax 0\.11\.2 or newer, got"),
        pk.gpu_interpreter(),
    ):
        pass
