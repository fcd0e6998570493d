"""A prompt's rows, which are rounded once for all experts that read them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from helpers.quantised import quantize
from pallas_kernels.common import weights
from pallas_kernels.expert_mlp import mosaic_gpu
from pallas_kernels.expert_mlp.reference import Arguments
from pallas_kernels.product import MAX_MMA_ROWS

EXPERTS, PICKS, DIM, WIDTH, TOKENS, LIMIT = 4, 4, 128, 128, 65, 2.0
SHAPES = (WIDTH, DIM), (WIDTH, DIM), (DIM, WIDTH)


@functools.cache
def make(kind):
    """Experts, and a shared one in block FP8."""
    rng = np.random.default_rng(0)

    def draw(kind, *shape):
        values = rng.normal(size=shape) * 3 * shape[-1] ** -0.5
        return quantize(kind, values.astype(np.float32))

    stacks = [draw(kind, EXPERTS, *shape) for shape in SHAPES]
    return stacks, tuple(draw("fp8", *shape) for shape in SHAPES)


def call_of(kind, picked_among=None):
    """All but a few tokens picked none."""
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(EXPERTS)[:PICKS] for _ in range(TOKENS)])
    x = jnp.asarray(rng.normal(size=(TOKENS, DIM)), jnp.bfloat16)
    share = jnp.asarray(rng.uniform(0.2, 1, ids.shape), jnp.float32)
    stacks, shared = make(kind)
    ids[9:] = -1
    ids = jnp.asarray(ids, jnp.int32)
    return Arguments(x, ids, share, *stacks, LIMIT, shared, picked_among)


def run(call):
    """Traced anew, with the thresholds of the moment."""
    static = {"limit": call.limit, "picked_among": call.picked_among}
    arrays = call._replace(**dict.fromkeys(static))
    return jax.jit(lambda arrays: mosaic_gpu.expert_mlp(arrays._replace(**static)))(arrays)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow.all_but(["fp8"], ["fp8", "mxfp4"]))
def test_no_number_differs(lane, kind, monkeypatch):
    """FP8 experts share the rows with the shared one; MXFP4 takes inputs in another order."""
    del lane
    made, make_rows = [], mosaic_gpu.make_rows

    def see(x, weight, **options):
        made.append((x.shape, "token" in options))
        return make_rows(x, weight, **options)

    monkeypatch.setattr(mosaic_gpu, "make_rows", see)
    monkeypatch.setattr(mosaic_gpu, "_MANY_PAIRS", TOKENS * PICKS)
    monkeypatch.setattr(mosaic_gpu, "UNPACKED_ROWS", 10**6)
    once = run(call_of(kind))
    assert made[0] == ((TOKENS, DIM), False)
    made.clear()
    monkeypatch.setattr(mosaic_gpu, "_round_once", lambda arguments: False)
    anew = run(call_of(kind))
    assert made[0] == ((TOKENS, DIM), True)
    for found, expected in zip(once, anew, strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))
    assert np.float32(once[0])[:9].any()


def test_rows_that_few_experts_read_are_rounded_as_they_are_picked(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_MANY_PAIRS", 1)
    assert mosaic_gpu._round_once(call_of("fp8"))
    assert mosaic_gpu._round_once(call_of("fp8", picked_among=5))
    assert not mosaic_gpu._round_once(call_of("fp8", picked_among=6))
    dense = jax.ShapeDtypeStruct((EXPERTS, WIDTH, DIM), jnp.bfloat16)
    assert not mosaic_gpu._round_once(call_of("fp8")._replace(w1=dense))


def test_the_shared_expert_takes_rows_as_its_kernel_has_them():
    """MXFP4 experts take inputs in another order, and of odd sizes the reference is the kernel."""
    fp8, mxfp4 = call_of("fp8"), call_of("mxfp4")
    assert mosaic_gpu._shares_rows(fp8.x, fp8.shared, fp8.w1)
    assert not mosaic_gpu._shares_rows(fp8.x, fp8.shared, mxfp4.w1)
    odd = quantize("fp8", np.zeros((WIDTH - 32, DIM), np.float32))
    assert not mosaic_gpu._shares_rows(fp8.x, (odd, odd, fp8.shared[2]), fp8.w1)
    exact = weights.with_activations(fp8.shared[0], "bfloat16")
    assert not mosaic_gpu._shares_rows(fp8.x, (exact, exact, fp8.shared[2]), fp8.w1)


def test_the_shared_expert_has_as_many_rows_to_spare_as_its_tiles(monkeypatch):
    """Which may be more than tiles of the other experts have."""
    given = []

    def see(x, gate, up, *, rows, **options):
        given.append(rows.codes.shape[1])
        return jnp.zeros((x.shape[0], gate.shape[0]), x.dtype)

    monkeypatch.setattr(mosaic_gpu, "swiglu_rows", see)
    monkeypatch.setattr(mosaic_gpu, "expected_rows", lambda *sizes: 16)
    monkeypatch.setattr(mosaic_gpu, "_MANY_PAIRS", 1)
    call = call_of("fp8")
    jax.eval_shape(lambda x: mosaic_gpu.expert_mlp(call._replace(x=x)), call.x)
    assert given[0] >= TOKENS + MAX_MMA_ROWS
