import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from pallas_kernels import dense_linears

jit_dense_linears = jax.jit(dense_linears, static_argnames="backend")


def arguments(num_rows, dim, widths, dtype):
    """Positions that a table of three rows and one of five see in different rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_rows, dim)), dtype)
    weights = [jnp.asarray(rng.normal(size=(w, dim)) * dim**-0.5, dtype) for w in widths]
    biases = [jnp.asarray(rng.normal(size=(3 + 2 * i, w)), jnp.float32)
              for i, w in enumerate(widths)]  # fmt: skip
    return x, weights, [*biases[:-1], None], jnp.asarray(rng.integers(0, 99, num_rows), jnp.int32)


def oracle(x, weights, biases, positions):
    """In float64, row by row."""
    x, positions = np.asarray(x, np.float64), np.asarray(positions)
    for weight, bias in zip(weights, biases, strict=True):
        product = x @ np.asarray(weight, np.float64).T
        if bias is not None:
            product += np.asarray(bias, np.float64)[[p % len(bias) for p in positions]]
        yield product


def assert_close(found, given):
    for mine, wanted in zip(found, oracle(*given), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    slow.all_but([(3, jnp.bfloat16)], [(1, jnp.bfloat16), (3, jnp.bfloat16), (8, jnp.float32)]),
)
def test_against_float64(lane, backend, num_rows, dtype):
    """Widths that are no multiple of a program's, and inputs that are no multiple of a run."""
    given = arguments(num_rows, 600, (20, 8, 9), dtype)
    assert_close(jit_dense_linears(*given, backend=backend), given)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("dim", [4096, 7168])
def test_kernel_at_real_shapes(num_rows, dim):
    given = arguments(num_rows, dim, (1024, 1024, 256, 256, 64), jnp.bfloat16)
    assert_close(jit_dense_linears(*given, backend="triton_gpu"), given)


def test_arguments_are_checked():
    x, weights, biases, positions = arguments(2, 64, (8, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"weights\[1\]"):
        dense_linears(x, [weights[0], weights[1][:, 1:]], biases, positions)
    with pytest.raises(ValueError, match=r"biases\[0\]"):
        dense_linears(x, weights, [biases[0][:, 1:], None], positions)
    with pytest.raises(ValueError, match="one for each weight"):
        dense_linears(x, weights, biases[:1], positions)


def _aot_case(num_rows, dim):
    def call(x, weights, biases, positions):
        return dense_linears(x, weights, biases, positions, backend="triton_gpu")

    widths = (1024, 1024, 256, 256, 64)
    weights = [jax.ShapeDtypeStruct((w, dim), jnp.bfloat16) for w in widths]
    biases = [jax.ShapeDtypeStruct((4, w), jnp.float32) for w in widths]
    x = jax.ShapeDtypeStruct((num_rows, dim), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    return (f"{num_rows}x{dim}", call, [x, weights, [*biases[:-1], None], positions])


AOT_CASES = [_aot_case(1, 4096), _aot_case(8, 7168)]
