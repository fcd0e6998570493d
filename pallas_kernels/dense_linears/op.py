"""Multiplies the same rows with several dense weights in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.common.backend import Backend, resolve
from pallas_kernels.common.checks import check_indices, check_rank, check_same_length, check_shape
from pallas_kernels.dense_linears import reference, triton_gpu
from pallas_kernels.dense_linears.arguments import Arguments

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.dense_linears,
    Backend.TRITON_GPU: triton_gpu.dense_linears,
}


def dense_linears(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    positions: jax.Array,
    *,
    backend: Backend | None = None,
) -> list[jax.Array]:
    """Products of rows with dense weights, each with a bias that recurs along the sequence.

    Args:
      x: [T, in].
      weights: [out, in] each.
      biases: f32[M, out] each, of which row `position % M` is added; None adds nothing.
      positions: i32[T], position of each row in its sequence.
      backend: implementation to use; None picks the fastest one that runs here. More than 8 rows
        are XLA's on a GPU too, a product of matrices for each weight.

    Returns:
      f32[T, out] each, accumulated in f32. Only the reference can be differentiated.

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 2.
    """
    check_rank(2, x=x)
    check_indices(positions=positions)
    check_same_length("T", x=x, positions=positions)
    if len(biases) != len(weights):
        raise ValueError(f"biases must be one for each weight, got {len(biases)=}, {len(weights)=}")
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check_shape(f"weights[{number}]", weight, (weight.shape[0], x.shape[1]), "out, in")
        if bias is not None:
            shape = bias.shape[0], weight.shape[0]
            check_shape(f"biases[{number}]", bias, shape, "M, out")
    few = x.shape[0] <= triton_gpu.MAX_ROWS
    implementation = resolve(
        "dense_linears",
        backend,
        _IMPLEMENTATIONS,
        preferred=Backend.TRITON_GPU if few else Backend.REFERENCE,
        arguments={"x": x},
    )
    return implementation(Arguments(x, list(weights), list(biases), positions))
