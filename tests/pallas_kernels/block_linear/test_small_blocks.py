"""Few rows times FP8 with scales of 32 x 32, through Mosaic: kernel against reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import product as cases
from helpers import slow
from helpers.blocks_of_32 import close, make, multiply, normal, specs
from pallas_kernels import Backend, block_linear, swiglu_linear
from pallas_kernels.block_linear import block_linear_by_token, block_linears, op
from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.common.pending import Unnormed, finish
from pallas_kernels.product import BLACKWELL, HOPPER, Tiling, call_shapes, plan, swiglu_rows

pytestmark = pytest.mark.unoptimised


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "activations"),
    slow.all_but(
        [(3, "bfloat16")],
        [(n, a) for n in (1, 3, 8, 16, 20, 40, 64) for a in ("fp8", "bfloat16")],
    ),
)
def test_products_are_the_reference_s(lane, num_rows, activations):
    """Rows that CTAs round and rows rounded before, in one term and two; an odd tile of outputs."""
    weight, x = make((192, 384), activations), normal(num_rows, 384)
    found = multiply(x, weight, dtype=jnp.float32, backend="mosaic_gpu")
    close(found, multiply(x, weight, dtype=jnp.float32, backend="reference"))
    for axis in (-1, -2):
        wrong = dataclasses.replace(weight, scale=jnp.roll(weight.scale, 1, axis=axis))
        with pytest.raises(AssertionError):
            close(found, multiply(x, wrong, dtype=jnp.float32, backend="reference"))


@pytest.mark.slow
def test_several_weights_and_norms_are_one_launch(lane):
    """Each takes its own scales, whichever tile a consumer has."""
    weights, x = (
        [make((64, 256)), make((128, 256), seed=3), make((64, 256), seed=4)],
        normal(4, 256),
    )
    norms = [None, jnp.float32(np.linspace(0.5, 2, 128)), None]
    run = jax.jit(
        lambda x, backend: block_linears(x, weights, norms=norms, eps=1e-20, backend=backend),
        static_argnames="backend",
    )
    for one, other in zip(run(x, "mosaic_gpu"), run(x, "reference"), strict=True):
        np.testing.assert_allclose(
            np.float32(one), np.float32(other), rtol=2**-7, atol=2**-8 * np.abs(other).max()
        )


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [3, 20])
def test_groups_whose_rows_lie_token_by_token(lane, num_rows):
    """Splits of inputs too: a split's first group is not the weight's."""
    weight, x = make((2, 128, 2048), "bfloat16"), normal(num_rows, 2, 2048)
    run = jax.jit(block_linear_by_token, static_argnames=("dtype", "backend"))
    found = finish(run(x, weight, dtype=jnp.float32, backend="mosaic_gpu"))
    close(found, finish(run(x, weight, dtype=jnp.float32, backend="reference")))


@pytest.mark.slow
def test_rows_before_their_norm(lane):
    weight, rows = make((64, 256)), normal(2, 256)
    norm = jnp.bfloat16(np.linspace(0.5, 2, 256))
    found = multiply(Unnormed(rows, norm, 1e-6), weight, dtype=jnp.float32, backend="mosaic_gpu")
    normed = rms_norm(rows, norm, eps=1e-6)
    close(found, multiply(normed, weight, dtype=jnp.float32, backend="reference"))


@pytest.mark.slow
@pytest.mark.parametrize("tiling", [None, Tiling(tile_m=16, tile_k=256, stages=2)])
def test_gate_and_up(lane, tiling):
    """Of a tiling SwiGLU is part of the product: consumers have one tile of a weight each."""
    gate, up, x = make((128, 512)), make((128, 512), seed=5), normal(11, 512)
    found = jax.jit(functools.partial(swiglu_rows, limit=1.5, tiling=tiling))(x, gate, up)
    run = jax.jit(functools.partial(swiglu_linear, limit=1.5, backend="reference"))
    expected = np.float32(run(x, gate, up))
    np.testing.assert_allclose(np.float32(found), expected, rtol=2**-6, atol=2**-6)


def test_few_rows_are_this_kernel_s_on_hopper(monkeypatch):
    weight, few, many = specs((192, 384)), normal(64, 384), normal(65, 384)
    assert op._preferred(few, [weight]) == Backend.MOSAIC_GPU
    assert op._preferred(many, [weight]) == Backend.TRITON_GPU
    monkeypatch.setattr(call_shapes, "MOST_ROWS_OF_SMALL_BLOCKS", 0)
    assert op._preferred(few, [weight]) == Backend.TRITON_GPU
    monkeypatch.undo()
    monkeypatch.setattr(call_shapes, "choose_core", lambda: BLACKWELL)
    assert op._preferred(few, [weight]) == Backend.TRITON_GPU
    with pytest.raises(NotImplementedError, match="smaller ones on Hopper alone"):
        block_linear(few, make((192, 384)), backend="mosaic_gpu")


@pytest.mark.parametrize(("num_rows", "ctas_of_sm"), [(1, 2), (8, 2), (16, 2), (32, 2), (64, 1)])
def test_stages_leave_room_for_as_many_ctas_as_registers_do(num_rows, ctas_of_sm):
    """Threads of wider tiles hold so many sums that an SM has one CTA, which gets its memory."""
    _, tiling = plan(
        [specs((1, 5120, 8192))],
        jnp.bfloat16,
        num_rows=num_rows,
        num_weights=1,
        may_split=True,
        core=HOPPER,
    )
    assert tiling.persistent == (ctas_of_sm == 1)


def _product(x, weights):
    return block_linears(x, weights, backend=Backend.MOSAIC_GPU)


def _by_token(x, weight):
    return block_linear_by_token(x, weight, backend=Backend.MOSAIC_GPU)


def _swiglu(x, gate, up):
    return swiglu_linear(x, gate, up, limit=10.0, backend=Backend.MOSAIC_GPU)


AOT_CASES = [
    *[
        (
            f"{name} {rows} rows@sm_90a",
            _product,
            [
                jax.ShapeDtypeStruct((rows, cases.V41_PARTS[name][0][-1]), jnp.bfloat16),
                [specs(shape) for shape in cases.V41_PARTS[name]],
            ],
        )
        for name, rows in cases.COMPILED_OF_V41
    ],
    *[
        (
            f"groups {rows} rows@sm_90a",
            _by_token,
            [
                jax.ShapeDtypeStruct((rows, groups, into), jnp.bfloat16),
                specs((groups, out, into), activations),
            ],
        )
        for groups, out, into, activations in [cases.V41_GROUPS]
        for rows in cases.COMPILED_ROWS_OF_V41
    ],
    *[
        (
            f"gate and up {rows} rows@sm_90a",
            _swiglu,
            [jax.ShapeDtypeStruct((rows, gate[-1]), jnp.bfloat16), specs(gate), specs(up)],
        )
        for gate, up in [cases.V41_PARTS["gate and up"]]
        for rows in cases.COMPILED_ROWS_OF_V41
    ],
]
