import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.hyper_connections import COMPILED_WRITES
from helpers import slow
from pallas_kernels import write_streams
from pallas_kernels.common.pending import PickedSums, SplitSums, finish
from pallas_kernels.write_streams import triton_many
from pallas_kernels.write_streams.reference import Arguments
from pallas_kernels.write_streams.triton_gpu import MAX_TOKENS

S, ROWS = 4, 24
SIZES = [(1, 256, jnp.bfloat16), (3, 320, jnp.bfloat16), (9, 64, jnp.float32)]
jit_write_streams = jax.jit(write_streams, static_argnames="backend")


def arguments(num_tokens, dim, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(num_tokens, S, dim)) * 3, dtype),
        jnp.asarray(rng.normal(size=(num_tokens, dim)), dtype),
        jnp.asarray(rng.uniform(0, 2, (num_tokens, S)), jnp.float32),
        jnp.asarray(rng.dirichlet(np.ones(S), (num_tokens, S)), jnp.float32),
        jnp.asarray(rng.normal(size=(ROWS, S * dim)) * (S * dim) ** -0.5, jnp.float32),
    )


def oracle(streams, output, post, comb):
    """From the formula of deepseek_v4.md section 1.2, in float64."""
    streams, output, post, comb = (np.asarray(x, np.float64) for x in (streams, output, post, comb))
    return post[..., None] * output[:, None] + np.einsum("tjk,tjd->tkd", comb, streams)


def assert_close(found, given):
    """The streams rounded once; the products of the streams that were found.

    Tensor cores cut off the last bits of long sums, so that of many tokens some are off by more.
    """
    written, products = (np.asarray(x, np.float64) for x in found)
    streams, _, _, _, fn = given
    expected, ulp = oracle(*given[:4]), float(jnp.finfo(streams.dtype).eps)
    assert np.all(np.abs(written - expected) <= ulp * np.abs(expected) + 1e-5)
    wanted = np.einsum("rc,tc->tr", np.asarray(fn, np.float64), written.reshape(len(written), -1))
    np.testing.assert_allclose(products.sum(1), wanted, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
@pytest.mark.parametrize(("num_tokens", "dim", "dtype"), slow.all_but(SIZES[1:2], SIZES))
def test_against_the_formulas_in_float64(lane, backend, num_tokens, dim, dtype):
    given = arguments(num_tokens, dim, dtype)
    assert_close(jit_write_streams(*given, backend=backend), given)


def picked_sums(num_tokens, dim, dtype):
    """Rows of which each token adds three and its own; some picks are nothing, of no row."""
    rng = np.random.default_rng(3)
    row = rng.integers(0, 12, (num_tokens, 3)).astype(np.int32)
    picked = rng.integers(0, 5, (num_tokens, 3)).astype(np.int32)
    picked[0, 1], picked[-1, 0] = -1, 5
    row[0, 1], row[-1, 0] = -(2**30), 2**30
    rows = rng.normal(size=(12 + num_tokens + 2, dim)).astype(np.float32)
    rows[-2:] = np.nan
    lead = (num_tokens,)
    return PickedSums(rows, row, picked, 5, 12, jnp.dtype(dtype), lead)


@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
@pytest.mark.parametrize("num_tokens", slow.all_but([3], [1, 3, MAX_TOKENS + 1]))
def test_an_output_may_be_sums_of_picked_rows(lane, backend, num_tokens):
    streams, _, *rest = given = arguments(num_tokens, 320, jnp.bfloat16)
    output = picked_sums(num_tokens, 320, jnp.bfloat16)
    sums = np.zeros((num_tokens, 320), np.float32)
    for token, (row, picked) in enumerate(zip(output.row, output.picked, strict=True)):
        for one, number in zip(row, picked, strict=True):
            sums[token] += output.rows[one] if 0 <= number < 5 else 0
        sums[token] += output.rows[12 + token]
    given = streams, jnp.asarray(sums, jnp.bfloat16), *rest
    found = jit_write_streams(streams, output, *rest, backend=backend)
    assert_close(found, given)
    expected = jit_write_streams(*given, backend=backend)
    if lane == "gpu" or num_tokens <= MAX_TOKENS:
        for mine, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, wanted)
    else:  # a CPU's compiler joins other products with sums where the output is one
        is_equal = np.asarray(found[0]) == np.asarray(expected[0])
        assert is_equal.mean() > 0.999
    np.testing.assert_array_equal(jax.jit(finish)(output.reshape(1, -1, 320))[0], given[1])


@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
@pytest.mark.parametrize("num_tokens", slow.all_but([MAX_TOKENS + 1], [3, MAX_TOKENS + 1]))
def test_an_output_may_be_parts_that_add_up_to_it(lane, backend, num_tokens):
    """Added in f32, and rounded once: these parts cancel, to a number with the bits of a bf16."""
    streams, output, *rest = given = arguments(num_tokens, 320, jnp.bfloat16)
    large = jnp.float32(np.random.default_rng(5).integers(-8, 9, output.shape) * 64)
    parts = jnp.stack([jnp.float32(output) + large, jnp.full(output.shape, 2.0**-17), -large])
    found = jit_write_streams(
        streams, SplitSums(parts, jnp.dtype(jnp.bfloat16)), *rest, backend=backend
    )
    assert_close(found, given)


def test_a_transposed_comb_would_be_seen():
    """The mistake that deepseek_v4.md appendix C names."""
    streams, output, post, comb, fn = given = arguments(2, 64, jnp.float32)
    found = jit_write_streams(streams, output, post, comb.mT, fn, backend="reference")
    with pytest.raises(AssertionError):
        assert_close(found, given)


@pytest.mark.slow
@pytest.mark.parametrize("by_kernel", slow.all_but([True], [True, False]))
def test_many_tokens_are_multiplied_by_tensor_cores(lane, monkeypatch, by_kernel):
    """Which are as exact as f32: `fn` is cut into three parts."""
    if not by_kernel:
        monkeypatch.setattr(triton_many, "_MOST_OF_KERNEL", 0)
    given = arguments(MAX_TOKENS + 1, 96, jnp.bfloat16)
    write = jax.jit(lambda *all: triton_many.write_streams(Arguments(*all)))
    written, products = found = write(*given)
    assert products.shape[1] == (3 if by_kernel else 16 * 3)
    assert_close(found, given)
    expected, _ = jit_write_streams(*given, backend="reference")
    np.testing.assert_array_equal(written, expected)


@pytest.mark.slow
@pytest.mark.parametrize("multiply", [triton_many.multiply, triton_many._products])
def test_all_bits_of_fn_count(lane, multiply):
    """Of 1 + 2^-9 + 2^-18 each part of eight bits holds one term."""
    streams = arguments(3, 96, jnp.bfloat16)[0]
    streams = jnp.abs(streams) + 1
    fn = jnp.full((ROWS, S * 96), 1 + 2**-9 + 2**-18, jnp.float32)
    swap = multiply is triton_many._products
    products = jax.jit(multiply)(*((fn, streams) if swap else (streams, fn)))
    wanted = (1 + 2**-9 + 2**-18) * np.sum(np.asarray(streams, np.float64), axis=(1, 2))
    found = np.asarray(products, np.float64).sum(1)
    np.testing.assert_allclose(found, wanted[:, None] + np.zeros(ROWS), rtol=1e-6)


@pytest.mark.slow
def test_products_of_a_token_do_not_depend_on_the_others(lane):
    """Nor on how many there are; 2,400 inputs are a run for most parts and none for the last."""
    streams, *_, fn = arguments(MAX_TOKENS + 4, 600, jnp.bfloat16)
    multiply = jax.jit(triton_many.multiply)
    together = multiply(streams, fn)
    assert together.shape[1] == 19
    np.testing.assert_array_equal(multiply(streams[-3:], fn), together[-3:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "dim"),
    [
        (1, 4096),
        (16, 4096),
        (2, 7168),
        (17, 7168),
        (64, 4096),
        (256, 7168),
        (512, 4096),
        (2048, 7168),
    ],
)
def test_kernel_at_real_shapes(num_tokens, dim):
    given = arguments(num_tokens, dim, jnp.bfloat16)
    assert_close(jit_write_streams(*given, backend="triton_gpu"), given)


def test_shapes_are_checked():
    streams, output, post, comb, fn = arguments(2, 64, jnp.float32)
    with pytest.raises(ValueError, match="output"):
        write_streams(streams, output[:, 1:], post, comb, fn)
    with pytest.raises(ValueError, match="fn"):
        write_streams(streams, output, post, comb, fn[:, 1:])


def _aot_case(num_tokens, dim):
    def call(*given):
        return write_streams(*given, backend="triton_gpu")

    shapes = ((num_tokens, S, dim), (num_tokens, dim), (num_tokens, S), (num_tokens, S, S))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32)
    shapes = (*shapes, (ROWS, S * dim))
    specs = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    return (f"{num_tokens}x{dim}", call, specs)


AOT_CASES = [_aot_case(case.tokens, case.dim) for case in COMPILED_WRITES]
