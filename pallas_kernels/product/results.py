"""What a launch leaves, as results of the weights: sums over splits added, slices, norms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.common.pending import ByGroup, ByToken, Pending, SplitSums
from pallas_kernels.common.rounding import round_to
from pallas_kernels.common.weights import INPUTS
from pallas_kernels.product.triton_split_k import add_splits


def take_apart(
    sums: jax.Array,
    x: jax.Array | Pending,
    widths: Sequence[int],
    *,
    norms: Sequence[jax.Array | None],
    eps: float,
    dtype: DTypeLike,
    in_parts: bool,
) -> list[Any]:
    """[S, G * T, sum of widths], sums of each split -> [G, T, width] for each weight.

    Or what a later kernel adds up, where nothing comes between: `ByGroup`, `SplitSums`.
    """
    (num_splits, _, width), (num_weights, num_rows, _) = sums.shape, x.shape
    is_normed = any(norm is not None for norm in norms)
    if is_normed and num_splits > 1:
        # One launch adds, rounds and norms.
        results = add_splits(sums, widths, norms=norms, eps=eps, dtype=dtype)
        return [result.reshape(num_weights, num_rows, -1) for result in results]
    if isinstance(x, ByToken) and width % INPUTS == 0:
        parts = sums.reshape(-1, num_weights, num_rows, width)  # f32[S, G, T, n]
        return [ByGroup(parts, jnp.dtype(dtype), (num_rows,))]
    if in_parts and num_splits > 1 and len(widths) == 1 and not is_normed:
        parts = SplitSums(sums, jnp.dtype(dtype))
        return [parts.reshape(num_weights, num_rows, -1)]
    joined = sums[0] if num_splits == 1 else round_to(jnp.sum(sums, axis=0), dtype)
    joined = joined.reshape(num_weights, num_rows, -1)  # [G, T, sum of widths]
    firsts = [0, *itertools.accumulate(widths)]
    results = [
        joined[..., first : first + width] for first, width in zip(firsts, widths, strict=False)
    ]
    return normed(results, norms, eps)


def normed(
    results: list[jax.Array], norms: Sequence[jax.Array | None], eps: float
) -> list[jax.Array]:
    """Each result after its norm, or as it is; there may be fewer norms than results."""
    return [
        result if norm is None else rms_norm(result, norm, eps=eps)
        for result, norm in itertools.zip_longest(results, norms)
    ]
