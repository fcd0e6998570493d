import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.hyper_connections import COMPILED_READS
from helpers import slow
from pallas_kernels import hyper_connections
from pallas_kernels.hyper_connections import triton_gpu
from pallas_kernels.hyper_connections.reference import Arguments, sinkhorn

pytestmark = pytest.mark.unoptimised

S = 4
ITERS, EPS, NORM_EPS = 20, 1e-6, 1e-6
WIDTH = (2 + S) * S
NAMES = ("collapsed", "normed", "post", "comb", "pre")
PARTS = 3
SIZES = [(1, 64, jnp.float32), (3, 96, jnp.float32), (5, 64, jnp.bfloat16)]
jit_hyper_connections = jax.jit(
    functools.partial(hyper_connections, iters=ITERS, eps=EPS, norm_eps=NORM_EPS),
    static_argnames="backend",
)


def arguments(num_tokens, dim, dtype, *, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(num_tokens, PARTS, WIDTH)) * spread, jnp.float32),
        jnp.asarray(rng.uniform(0.5, 1.5, 3), jnp.float32),
        jnp.asarray(rng.normal(size=WIDTH) * 0.5, jnp.float32),
        jnp.asarray(rng.normal(size=(num_tokens, S, dim)) * 3, dtype),
        jnp.asarray(rng.normal(size=dim) * 0.2 + 1, dtype),
    )


def oracle(products, scale, base, streams, norm, weights=None):
    """Token by token in float64, from the formulas of deepseek_v4.md section 1.2.

    With weights, as of deepseek_v41.md section 5, what they make of the streams, and pre too.
    """
    results = []
    given = [None] * len(streams) if weights is None else np.asarray(weights, np.float64)
    scale, base, norm = (np.asarray(x, np.float64) for x in (scale, base, norm))
    for product, x, used in zip(
        np.asarray(products, np.float64), np.asarray(streams, np.float64), given, strict=True
    ):
        mix = product.sum(0) / np.sqrt(np.mean(x**2) + NORM_EPS)
        sigmoid = 1 / (1 + np.exp(-(mix[: 2 * S] * scale[:2].repeat(S) + base[: 2 * S])))
        pre, post = sigmoid[:S] + EPS, 2 * sigmoid[S:]
        z = (mix[2 * S :] * scale[2] + base[2 * S :]).reshape(S, S)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True) + EPS
        p = p / (p.sum(0, keepdims=True) + EPS)
        for _ in range(ITERS - 1):
            p = p / (p.sum(1, keepdims=True) + EPS)
            p = p / (p.sum(0, keepdims=True) + EPS)
        u = (pre if used is None else used) @ x
        results.append((u, u / np.sqrt(np.mean(u**2) + NORM_EPS) * norm, post, p, pre))
    return tuple(np.stack(column) for column in zip(*results, strict=True))


def assert_close(actual, expected, dtype):
    """Sums of 4 and of D terms in f32; rows are rounded to their dtype, `normed` twice."""
    ulp = float(jnp.finfo(dtype).eps)
    for name, bound in (("collapsed", 8e-6 + ulp), ("normed", 8e-6 + 2 * ulp)):
        wanted = np.asarray(expected[name], np.float64)
        off = np.abs(np.asarray(getattr(actual, name), np.float64) - wanted)
        assert np.max(off) <= bound * np.max(np.abs(wanted)), name
    found = [name for name in ("post", "comb", "pre") if getattr(actual, name) is not None]
    for name in found:  # within 2; forty divisions, each off by an ulp at most
        np.testing.assert_allclose(getattr(actual, name), expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
@pytest.mark.parametrize(("num_tokens", "dim", "dtype"), slow.all_but(SIZES[-1:], SIZES))
def test_against_the_formulas_in_float64(lane, backend, num_tokens, dim, dtype):
    given = arguments(num_tokens, dim, dtype)
    expected = dict(zip(NAMES, oracle(*given), strict=True))
    found = jit_hyper_connections(*given, backend=backend)
    assert_close(found, expected, dtype)
    assert found.pre is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
@pytest.mark.parametrize(("num_tokens", "dim", "dtype"), slow.all_but(SIZES[-1:], SIZES))
def test_shifted_the_streams_are_summed_with_weights_that_are_given(
    lane, backend, num_tokens, dim, dtype
):
    given = arguments(num_tokens, dim, dtype)
    weights = np.random.default_rng(7).uniform(0, 1, (num_tokens, S)).astype(np.float32)
    expected = dict(zip(NAMES, oracle(*given, weights), strict=True))
    found = jit_hyper_connections(*given, weights=weights, backend=backend)
    assert_close(found, expected, dtype)
    assert found.pre is not None
    with pytest.raises(AssertionError):
        assert_close(found, dict(zip(NAMES, oracle(*given), strict=True)), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("spread", slow.all_but([30.0], [0.0, 1.0, 30.0]))
def test_columns_of_comb_sum_to_one(lane, spread):
    """Columns last: they sum to 1 to rounding, even where logits are far apart."""
    given = arguments(4, 64, jnp.float32, spread=spread)
    for backend in ("reference", "triton_gpu"):
        comb = jit_hyper_connections(*given, backend=backend).comb
        np.testing.assert_allclose(jnp.sum(comb, axis=1), 1, atol=3e-6, rtol=0)
        assert bool(jnp.all(comb >= 0))


def test_a_transposed_comb_would_be_seen():
    """The bound of `assert_close` rejects the mistake that deepseek_v4.md appendix C names."""
    given = arguments(2, 64, jnp.float32)
    actual = jit_hyper_connections(*given, backend="reference")
    expected = dict(zip(NAMES, oracle(*given), strict=True))
    with pytest.raises(AssertionError):
        assert_close(actual._replace(comb=actual.comb.mT), expected, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("shifted", slow.all_but([True], [False, True]))
def test_two_launches_of_many_tokens_do_what_two_programs_do(lane, shifted):
    """On a GPU but for the order in which parts of the products are added."""

    @functools.partial(jax.jit, static_argnames="is_many")
    def run(*given, is_many):
        *given, weights = given
        return triton_gpu.hyper_connections(
            Arguments(*given, ITERS, EPS, NORM_EPS, weights), is_many=is_many
        )

    weights = np.random.default_rng(7).uniform(0, 1, (3, S)).astype(np.float32)
    given = *arguments(3, 64, jnp.bfloat16), weights if shifted else None
    few, many = (run(*given, is_many=is_many)._asdict() for is_many in (False, True))
    assert (few["pre"] is not None) == shifted
    for name, value in many.items():
        if value is None:
            continue
        ulp = float(jnp.finfo(value.dtype).eps)
        found, expected = np.float32(value), np.float32(few[name])
        off = {"rtol": 8 * ulp if lane == "gpu" else 0, "atol": ulp if lane == "gpu" else 0}
        np.testing.assert_allclose(found, expected, **off, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 4096), (64, 4096), (2, 7168), (512, 4096)])
def test_kernel_matches_reference_at_real_shapes(num_tokens, dim):
    given = arguments(num_tokens, dim, jnp.bfloat16)
    expected = jit_hyper_connections(*given, backend="reference")
    assert_close(
        jit_hyper_connections(*given, backend="triton_gpu"), expected._asdict(), jnp.bfloat16
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 512])
def test_shifted_kernel_matches_reference_at_real_shapes(num_tokens):
    given = arguments(num_tokens, 5120, jnp.bfloat16)
    weights = np.random.default_rng(7).uniform(0, 1, (num_tokens, S)).astype(np.float32)
    expected = jit_hyper_connections(*given, weights=weights, backend="reference")
    found = jit_hyper_connections(*given, weights=weights, backend="triton_gpu")
    assert_close(found, expected._asdict(), jnp.bfloat16)


def test_shapes_are_checked():
    products, scale, base, streams, norm = arguments(2, 64, jnp.float32)
    sizes = {"iters": ITERS, "eps": EPS, "norm_eps": NORM_EPS}
    with pytest.raises(ValueError, match="products"):
        hyper_connections(products[:, :, 1:], scale, base, streams, norm, **sizes)
    with pytest.raises(ValueError, match="norm"):
        hyper_connections(products, scale, base, streams, norm[1:], **sizes)
    with pytest.raises(ValueError, match="iters must be at least 1, got 0"):
        hyper_connections(products, scale, base, streams, norm, **sizes | {"iters": 0})


def _aot_case(num_tokens, dim, shifted):
    def call(*given):
        *given, weights = given if shifted else (*given, None)
        sizes = {"iters": ITERS, "eps": EPS, "norm_eps": NORM_EPS}
        return hyper_connections(*given, **sizes, weights=weights, backend="triton_gpu")

    shapes = ((num_tokens, 16, WIDTH), (3,), (WIDTH,), (num_tokens, S, dim), (dim,))
    dtypes = (jnp.float32, jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16)
    specs = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    if shifted:
        specs.append(jax.ShapeDtypeStruct((num_tokens, S), jnp.float32))
    return (f"{num_tokens}x{dim}{' shifted' if shifted else ''}", call, specs)


AOT_CASES = [_aot_case(*case) for case in COMPILED_READS]


@pytest.mark.parametrize("iters", [1, 2, 3])
def test_sinkhorn_takes_as_many_turns_as_it_is_told(iters):
    """Few: after twenty, one more or less hardly shows."""
    eps, logits = 1e-6, np.random.default_rng(0).normal(size=(5, 4, 4)) * 3
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True) + eps
    p /= p.sum(axis=-2, keepdims=True) + eps
    for _ in range(iters - 1):
        p /= p.sum(axis=-1, keepdims=True) + eps
        p /= p.sum(axis=-2, keepdims=True) + eps
    turns = jax.jit(functools.partial(sinkhorn, iters=iters, eps=eps))
    actual = turns(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(actual, p, rtol=1e-5)
