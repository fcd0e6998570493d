"""Multiplies rows with a dense or quantised weight."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels.block_linear import call_shapes, mosaic_gpu, reference
from pallas_kernels.common.backend import Backend, resolve
from pallas_kernels.common.weights import Weight, is_quantized

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.block_linear,
    Backend.MOSAIC_GPU: mosaic_gpu.block_linear,
}


def block_linear(
    x: jax.Array,
    weight: Weight,
    *,
    dtype: DTypeLike | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """Multiplies rows with a weight, accumulated in f32.

    Args:
      x: [T, in], or [G, T, in] for G weights.
      weight: [out, in], or [G, out, in]; dense, block FP8 or MXFP4. A quantised weight says whether
        it takes rows rounded to E4M3 or as they are.
      dtype: of the result; None is that of x.
      backend: implementation to use; None picks the fastest one that runs here. Dense weights are
        XLA's.

    Returns:
      [T, out], or [G, T, out].

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md section 4.5.
    """
    if x.ndim not in (2, 3) or x.ndim != weight.ndim:
        raise ValueError(
            f"x must be [T, in] for a weight [out, in], or [G, T, in] for [G, out, in]; "
            f"got {x.shape=} and {weight.shape=}"
        )
    if x.shape[-1] != weight.shape[-1] or x.shape[:-2] != weight.shape[:-2]:
        raise ValueError(
            f"x and weight must agree on their inputs and groups; got {x.shape=} and "
            f"{weight.shape=}"
        )
    grouped = x.ndim == 3
    if not grouped:
        x, weight = x[None], jax.tree.map(lambda leaf: leaf[None], weight)
    implementation = resolve(
        "block_linear",
        backend,
        _IMPLEMENTATIONS,
        preferred=Backend.MOSAIC_GPU if is_quantized(weight) else Backend.REFERENCE,
        obstacle=call_shapes.find_obstacle(x, weight),
        arguments={"x": x},
    )
    product = implementation(x, weight).astype(dtype or x.dtype)
    return product if grouped else product[0]
