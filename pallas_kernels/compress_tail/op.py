"""Compresses every window that closes in a call into one entry each."""

from __future__ import annotations

import jax

from pallas_kernels.backend import Backend, resolve
from pallas_kernels.checks import check_indices, check_rank, check_same_length, check_shape
from pallas_kernels.compress_tail import reference
from pallas_kernels.formats import Planes

_CSA = {Backend.REFERENCE: reference.compress_csa}
_HCA = {Backend.REFERENCE: reference.compress_hca}


def compress_csa(
    state: Planes,
    values: jax.Array,
    scores: jax.Array,
    norm: jax.Array,
    frequencies: jax.Array,
    *,
    closing: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    backend: Backend | None = None,
) -> jax.Array:
    """Pools overlapping windows: the b-stream of the previous one, the a-stream of the own one.

    Args:
      state: `values` and `scores`, f32[L, NS, 2 * M, 2 * C], token p in row p % (2 * M), as they
        were before the call.
      values: f32[T, 2 * C], b-stream then a-stream; a request's tokens next to each other.
      scores: f32[T, 2 * C], position bias added.
      norm: [C], norm weight of the compressor, in the dtype of activations.
      frequencies: f32[R / 2], of the compress table.
      closing: i32[n], tokens of the call that close a window; -1 gives an arbitrary entry.
      slots: i32[T].
      positions: i32[T].
      lengths: i32[T], tokens of each token's request before the call.
      layer: i32[], index into L.
      rate: M, tokens per window.
      eps: floor of the norm.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      [n, C] in the dtype of `norm`: pooled, normed, rotated to the window's first position.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 2.2.
    """
    _check(values, scores, closing, slots, positions, lengths)
    width = 2 * norm.shape[-1]
    shapes = {name: plane.shape[2:] for name, plane in state.items()}
    if shapes != dict.fromkeys(("values", "scores"), (2 * rate, width)):
        raise ValueError(
            f"state must keep 2 * rate rows of 2 * C values and scores, got {shapes} for {rate=} "
            f"and {norm.shape=}"
        )
    _check_width(values, scores, width)
    return resolve("compress_csa", backend, _CSA)(
        state,
        values,
        scores,
        norm,
        frequencies,
        closing=closing,
        slots=slots,
        positions=positions,
        lengths=lengths,
        layer=layer,
        rate=rate,
        eps=eps,
    )


def compress_hca(
    running: jax.Array,
    values: jax.Array,
    scores: jax.Array,
    norm: jax.Array,
    frequencies: jax.Array,
    *,
    closing: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    max_count: int,
    backend: Backend | None = None,
) -> jax.Array:
    """Pools windows that do not overlap.

    Args:
      running: f32[L, NS, 3, C], pools of the open windows as they were before the call.
      values: f32[T, C], a request's tokens next to each other.
      scores: f32[T, C], position bias added.
      norm: as in `compress_csa`, and so are all arguments not named here.
      frequencies: f32[R / 2].
      closing: i32[n].
      slots: i32[T].
      positions: i32[T].
      lengths: i32[T].
      layer: i32[].
      rate: M, tokens per window.
      eps: floor of the norm.
      max_count: the most tokens of one request there can be in the call; static.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      [n, C] in the dtype of `norm`.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 2.2.
    """
    _check(values, scores, closing, slots, positions, lengths)
    check_rank(4, running=running)
    if running.shape[2:] != (3, *norm.shape):
        raise ValueError(
            f"running must keep 3 rows of C values, norm C, got {running.shape=} and {norm.shape=}"
        )
    _check_width(values, scores, norm.shape[0])
    return resolve("compress_hca", backend, _HCA)(
        running,
        values,
        scores,
        norm,
        frequencies,
        closing=closing,
        slots=slots,
        positions=positions,
        lengths=lengths,
        layer=layer,
        rate=rate,
        eps=eps,
        max_count=max_count,
    )


def _check(
    values: jax.Array,
    scores: jax.Array,
    closing: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
) -> None:
    check_same_length(
        "T", values=values, scores=scores, slots=slots, positions=positions, lengths=lengths
    )
    check_indices(closing=closing, slots=slots, positions=positions, lengths=lengths)


def _check_width(values: jax.Array, scores: jax.Array, width: int) -> None:
    for name, array in (("values", values), ("scores", scores)):
        check_shape(name, array, (values.shape[0], width), "T, width")
