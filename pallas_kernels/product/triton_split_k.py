"""Triton kernel that finishes products whose inputs were split: a row of one result per program.

    sum over the splits, rounded     -> the result, or its RMS norm

Bytes: the sums, once. The launch bounds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.gpu import triton
from pallas_kernels.gpu.triton_rope import round_to_dtype

Ref = Any
_NUM_WARPS = 8


def add_splits(
    sums: jax.Array,
    widths: Sequence[int],
    *,
    norms: Sequence[jax.Array | None],
    eps: float,
    dtype: DTypeLike,
) -> list[jax.Array]:
    """Sums over splits, result by result, each normed or as it is.

    Args:
      sums: f32[S, R, N].
      widths: outputs of each result; they add up to N.
      norms: [out] for each, weight of the RMS norm of the result, or None.
      eps: floor of the norms.
      dtype: of the results.

    Returns:
      [R, out] each.
    """
    firsts = [0, *itertools.accumulate(widths)]
    weights = [norm for norm in norms if norm is not None]

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        # Results differ in width and norm, and so in code: a program runs one of them.
        row, given = pl.program_id(0), iter(inputs[1:])
        for number, (first, width, out) in enumerate(zip(firsts, widths, outputs, strict=False)):
            norm = None if norms[number] is None else next(given)

            @pl.when(pl.program_id(1) == number)
            def _(first: int = first, width: int = width, out: Ref = out, norm: Ref = norm) -> None:
                # f32[lanes], rounded to the result's dtype; lanes beyond the width are zeros, and
                # add nothing to the squares.
                values = _load(inputs[0], row, first, width, dtype)
                if norm is not None:
                    mean_square = jnp.sum(values * values) / width
                    scale = jax.lax.rsqrt(mean_square + eps)
                    weight = triton.load_row(norm, (), start=0, count=width, width=values.shape[0])
                    values = round_to_dtype(values * scale * weight.astype(jnp.float32), dtype)
                triton.store_row(out, (row,), values.astype(dtype), first=0, count=width)

    return triton.launch(
        kernel,
        grid=(sums.shape[1], len(widths)),
        inputs=[sums, *weights],
        outputs=[jax.ShapeDtypeStruct((sums.shape[1], width), dtype) for width in widths],
        num_warps=_NUM_WARPS,
        name="add_splits",
    )


def _load(sums: Ref, row: jax.Array, first: int, width: int, dtype: DTypeLike) -> jax.Array:
    """f32, some columns of a row of f32[S, R, N], added over S and rounded; zeros beyond them."""
    lanes = pl.next_power_of_2(width)
    total = jnp.zeros(lanes, jnp.float32)
    # One after the other, so that the bits depend on the order of the splits and on no layout.
    for split in range(sums.shape[0]):
        total += triton.load_row(sums, (split, row), start=first, count=width, width=lanes)
    return round_to_dtype(total, dtype)
