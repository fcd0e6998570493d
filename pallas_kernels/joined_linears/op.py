"""Multiplies the same rows with several weights in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.backend import Backend, compute_capability, jax_arrays, resolve
from pallas_kernels.common.check_weights import check_weight
from pallas_kernels.common.checks import (
    check_float_dtype,
    check_floats,
    check_indices,
    check_list,
    check_rank,
    check_same_length,
    check_shape,
)
from pallas_kernels.common.weights import Weight, is_quantized
from pallas_kernels.joined_linears import reference, triton_gpu
from pallas_kernels.joined_linears.reference import Arguments

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.joined_linears,
    Backend.TRITON_GPU: triton_gpu.joined_linears,
}


def joined_linears(
    x: jax.Array,
    weights: Sequence[Weight],
    biases: Sequence[jax.Array | None],
    positions: jax.Array,
    *,
    dtypes: Sequence[DTypeLike] | None = None,
    backend: Backend | None = None,
) -> list[jax.Array]:
    """Products of rows with weights, each with a bias that recurs along the sequence.

    In plain JAX, for dense weights, with zeros for a bias that is None:

        products = [jnp.matmul(x, weight.T, preferred_element_type=float32) for weight in weights]
        return [p + bias[positions % len(bias)] for p, bias in zip(products, biases)]

    Args:
      x: [T, in].
      weights: [out, in] each, dense, or block FP8 for one or two rows.
      biases: f32[M, out] each, of which row `position % M` is added; None adds nothing.
      positions: i32[T], position of each row in its sequence.
      dtypes: of each result; None is f32 for all.
      backend: implementation to use; None picks the fastest one that runs here. More than 64 rows,
        and more than 8 that are not in bf16, are XLA's on a GPU too, a product for each weight.

    Returns:
      [T, out] each, accumulated in f32. Only the reference can be differentiated.

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the named backend can't run here, or not with these weights.

    Source: deepseek_v4.md sections 2 and 4.5.
    """
    check_rank(2, x=x)
    check_floats(x=x)
    check_rank(1, positions=positions)
    check_indices(positions=positions)
    check_same_length("T", x=x, positions=positions)
    check_list("weights", weights, of="weights")
    check_list("biases", biases, of="biases")
    dtypes = [jnp.float32] * len(weights) if dtypes is None else dtypes
    check_list("dtypes", dtypes, of="dtypes")
    dtypes = [check_float_dtype(f"dtypes[{n}]", dtype) for n, dtype in enumerate(dtypes)]
    if not len(biases) == len(weights) == len(dtypes):
        raise ValueError(
            "biases and dtypes must be one for each weight, "
            f"got {len(biases)=}, {len(dtypes)=}, {len(weights)=}"
        )
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check_weight(f"weights[{number}]", weight, 2)
        if weight.shape != (weight.shape[0], x.shape[1]):
            raise ValueError(
                f"weights[{number}] must be [out, in], with the inputs of x, {x.shape[1]}, "
                f"got {weight.shape}"
            )
        if bias is not None:
            name = f"biases[{number}]"
            check_rank(2, **{name: bias})
            check_floats(**{name: bias})
            check_shape(name, bias, (max(1, bias.shape[0]), weight.shape[0]), "M, out")
    obstacle = triton_gpu.find_obstacle(x, weights)
    few = obstacle is not None or x.shape[0] <= triton_gpu.max_rows(x, weights)
    best = Backend.TRITON_GPU if few else Backend.REFERENCE
    implementation = resolve(
        "joined_linears",
        backend,
        _IMPLEMENTATIONS,
        preferred=best,
        obstacle=obstacle,
        arguments={"x": x},
    )
    arguments = Arguments(x, list(weights), list(biases), positions, dtypes)
    return implementation(jax_arrays(arguments))


def joins(x: jax.Array, weights: Sequence[Weight]) -> bool:
    """Whether one launch of the kernel for one or two rows serves these quantised weights.

    Elsewhere `block_linear` is what multiplies them.
    """
    capability = compute_capability()
    return (
        capability is not None
        and capability >= (9, 0)
        and x.shape[0] <= triton_gpu.FEW_ROWS
        and all(map(is_quantized, weights))
        and triton_gpu.find_obstacle(x, weights) is None
    )
