"""Products with FP8 scales of 32 x 32: kernel against reference, and what rung 3 compiles."""

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
from pallas_kernels.block_linear import block_linear_by_token, block_linears, reference
from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.common.pending import SplitSums, Unnormed, finish
from pallas_kernels.common.rows import round_rows
from pallas_kernels.common.weights import FP8_BLOCK
from pallas_kernels.product import can_join, round_groups, triton_blocks

pytestmark = pytest.mark.unoptimised


@pytest.mark.parametrize("activations", ["fp8", "bfloat16"])
@pytest.mark.parametrize("num_rows", slow.all_but([1], [1, 5, 16, 17, 64, 70]))
def test_products_are_the_reference_s(lane, num_rows, activations):
    """Rows that each program rounds and rows rounded before; two tiles of rows."""
    weight, x = make((192, 384), activations), normal(num_rows, 384)
    found = multiply(x, weight, dtype=jnp.float32, backend="triton_gpu")
    close(found, multiply(x, weight, dtype=jnp.float32, backend="reference"))
    wrong = dataclasses.replace(weight, scale=jnp.roll(weight.scale, 1, axis=-1))
    with pytest.raises(AssertionError):
        close(found, multiply(x, wrong, dtype=jnp.float32, backend="reference"))


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "splits"), slow.all_but([(2, 3)], [(2, 3), (20, 1)]))
def test_inputs_may_end_within_a_run(lane, monkeypatch, num_rows, splits):
    """As a device's part of a shared expert does: 2,304 of four devices are 4.5 runs each.

    Codes and rows beyond the last input, those of the next row, are others.
    """
    monkeypatch.setattr(triton_blocks, "choose_splits", lambda *_, **__: splits)
    weight, x = make((128, 576)), normal(num_rows, 576)
    product = jax.jit(functools.partial(block_linear, dtype=jnp.float32, backend="triton_gpu"))
    close(product(x, weight), multiply(x, weight, dtype=jnp.float32, backend="reference"))


@pytest.mark.slow
@pytest.mark.parametrize("splits", slow.all_but([3], [1, 2, 3, 5]))
def test_splits_are_added_up(lane, monkeypatch, splits):
    """Five runs of inputs: of three splits the last one has a run only."""
    monkeypatch.setattr(triton_blocks, "choose_splits", lambda *_, **__: splits)
    weight, x = make((64, 640)), normal(3, 640)
    product = jax.jit(functools.partial(block_linear, dtype=jnp.float32, backend="triton_gpu"))
    expected = multiply(x, weight, dtype=jnp.float32, backend="reference")
    close(product(x, weight), expected)
    [parts] = jax.jit(
        functools.partial(
            block_linears, dtype=jnp.float32, backend="triton_gpu", may_stay_in_parts=True
        )
    )(x, [weight])
    assert isinstance(parts, SplitSums) == (splits > 1)
    close(finish(parts), expected)


@pytest.mark.slow
def test_several_weights_and_norms_are_one_launch(lane):
    weights, x = [make((128, 256)), make((64, 256), seed=3)], normal(4, 256)
    norms = [jnp.float32(np.linspace(0.5, 2, 128)), None]
    run = jax.jit(
        lambda x, backend: block_linears(x, weights, norms=norms, eps=1e-20, backend=backend),
        static_argnames="backend",
    )
    found, expected = run(x, "triton_gpu"), run(x, "reference")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.float32(one), np.float32(other), rtol=2**-7, atol=2**-8 * np.abs(other).max()
        )


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [3, 20])
def test_groups_whose_rows_lie_token_by_token(lane, num_rows):
    weight, x = make((2, 128, 256), "bfloat16"), normal(num_rows, 2, 256)
    run = jax.jit(block_linear_by_token, static_argnames=("dtype", "backend"))
    found = finish(run(x, weight, dtype=jnp.float32, backend="triton_gpu"))
    close(found, finish(run(x, weight, dtype=jnp.float32, backend="reference")))


@pytest.mark.slow
def test_rows_before_their_norm(lane):
    weight, rows = make((64, 256)), normal(2, 256)
    norm = jnp.bfloat16(np.linspace(0.5, 2, 256))
    found = multiply(Unnormed(rows, norm, 1e-6), weight, dtype=jnp.float32, backend="triton_gpu")
    normed = rms_norm(rows, norm, eps=1e-6)
    close(found, multiply(normed, weight, dtype=jnp.float32, backend="reference"))


@pytest.mark.slow
def test_many_rows_are_multiplied_by_xla(lane):
    weight, x = make((64, 256)), normal(triton_blocks._DECODED_ROWS, 256)
    product = functools.partial(block_linear, dtype=jnp.float32, backend="triton_gpu")
    assert "dot_general" in jax.jit(product).lower(x, weight).as_text()
    close(jax.jit(product)(x, weight), reference.block_linear(x[None], _stack(weight))[0])


def _stack(weight):
    return jax.tree.map(lambda leaf: leaf[None], weight)


@pytest.mark.slow
def test_gate_and_up(lane):
    gate, up, x = make((64, 256)), make((64, 256), seed=5), normal(2, 256)
    run = jax.jit(functools.partial(swiglu_linear, limit=1.5), static_argnames="backend")
    found, expected = run(x, gate, up, backend="triton_gpu"), run(x, gate, up, backend="reference")
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=2**-6, atol=2**-6)


@pytest.mark.slow
@pytest.mark.parametrize("group", [32])
def test_rows_are_rounded_as_the_definition_has_it(lane, group):
    """Zeros, values that saturate, ties, infinities and NaN among them."""
    x = np.array(normal(3, 1184))
    x[0, :64] = 0
    x[1, 5], x[1, 40], x[2, 70] = np.inf, -np.inf, np.nan
    x[2, 32:64] = np.linspace(1, 2, 32)
    found = jax.jit(functools.partial(round_groups, group=group))(x)
    expected = jax.jit(functools.partial(round_rows, group=group))(x)
    np.testing.assert_array_equal(np.float32(found), np.float32(expected))
    assert np.any(np.float32(found) != np.float32(round_rows(x, FP8_BLOCK)))


def test_what_the_kernel_cannot_serve_is_refused_by_name():
    x = normal(2, 256)

    def refused(weight, x=x, backend="triton_gpu"):
        with pytest.raises(NotImplementedError) as raised:
            block_linear(x, weight, backend=backend)
        return str(raised.value)

    weight = make((64, 256))
    of_any_scale = dataclasses.replace(weight, scale=np.ones(weight.scale.shape, np.float32))
    assert "scales that are powers of two" in refused(of_any_scale)
    assert "multiples of 64 x 32" in refused(make((96, 256)))
    assert "rows in bfloat16" in refused(weight, x.astype(jnp.float32))
    assert "scales of 32 x 32 alone" in refused(make((128, 256), block=FP8_BLOCK))
    many = normal(65, 256)
    assert "smaller ones for at most 64 rows" in refused(weight, many, backend="mosaic_gpu")
    assert "smaller ones that are powers of two" in refused(of_any_scale, backend="mosaic_gpu")
    assert not can_join([weight, make((128, 256), block=FP8_BLOCK)])


@pytest.mark.gpu
def test_a_gpu_takes_this_kernel_by_itself():
    """Of more rows than the other kernel has."""
    weight, x = make((192, 384)), normal(80, 384)
    found = multiply(x, weight, dtype=jnp.float32)
    np.testing.assert_array_equal(
        found, multiply(x, weight, dtype=jnp.float32, backend="triton_gpu")
    )


@pytest.mark.parametrize(
    ("num_rows", "widths", "into", "splits"),
    [(1, (1280, 512), 5120, 14), (64, (1280, 512), 5120, 5), (1, (32768,), 1280, 1)],
)
def test_inputs_are_split_to_keep_the_card_busy(num_rows, widths, into, splits):
    weights = [specs((1, width, into)) for width in widths]
    assert triton_blocks.choose_splits(weights, num_rows, num_sms=132) == splits


def _product(x, weights):
    return block_linears(x, weights, backend=Backend.TRITON_GPU)


AOT_CASES = [
    (
        f"{name} {rows} rows",
        _product,
        [
            jax.ShapeDtypeStruct((rows, cases.V41_PARTS[name][0][-1]), jnp.bfloat16),
            [specs(shape) for shape in cases.V41_PARTS[name]],
        ],
    )
    for name, rows in cases.COMPILED_BLOCKS_OF_32
]
