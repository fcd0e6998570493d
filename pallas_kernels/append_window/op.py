"""Appends a call's tokens to what a layer keeps per request: rings and running pools."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.append_window import reference, triton_gpu
from pallas_kernels.backend import Backend, resolve
from pallas_kernels.checks import (
    check_indices,
    check_planes,
    check_rank,
    check_same_length,
    check_shape,
    first_plane,
)
from pallas_kernels.formats import Codec, Planes

_ENCODE = {
    Backend.REFERENCE: reference.encode_window,
    Backend.TRITON_GPU: triton_gpu.encode_window,
}
_RING = {Backend.REFERENCE: reference.append_ring}
_RUNNING = {Backend.REFERENCE: reference.append_running}
_TOKENS = {
    Backend.REFERENCE: reference.append_tokens,
    Backend.TRITON_GPU: triton_gpu.append_tokens,
}


def encode_window(
    x: jax.Array, *, codec: Codec, rope_dim: int, backend: Backend | None = None
) -> Planes:
    """Encodes a call's window entries, as the ring will keep them.

    Args:
      x: [T, C], normed and rotated.
      codec: of the cache format.
      rope_dim: R, the last dims of C, which rotate.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      Planes [T, ...] of the codec.

    Raises:
      ValueError: `x` has another rank.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 4.
    """
    check_rank(2, x=x)
    # TODO(#3): prefer the kernel once it has run on a GPU; without it this is four launches.
    return resolve("encode_window", backend, _ENCODE)(x, codec=codec, rope_dim=rope_dim)


def append_ring(
    ring: Planes,
    rows: Planes,
    slots: jax.Array,
    positions: jax.Array,
    *,
    layer: jax.Array,
    backend: Backend | None = None,
) -> Planes:
    """Writes tokens to a ring addressed by position: the window, or a CSA compressor's state.

    Args:
      ring: planes [L, NS, W, ...]; W rows per slot.
      rows: planes [T, ...], one row per token.
      slots: i32[T]; -1 writes nothing. No two tokens may share a slot and a ring row.
      positions: i32[T], position p goes to ring row p % W.
      layer: i32[], index into L.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The ring with the rows written.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 1.7, steps 2 and 4.
    """
    check_planes(ring, rows, stacked_name="ring", rows_name="rows")
    check_same_length("T", slots=slots, positions=positions, rows=first_plane(rows))
    check_indices(slots=slots, positions=positions)
    return resolve("append_ring", backend, _RING)(ring, rows, slots, positions, layer=layer)


def append_running(
    running: jax.Array,
    values: jax.Array,
    scores: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    offsets: jax.Array,
    *,
    layer: jax.Array,
    rate: int,
    max_count: int,
    backend: Backend | None = None,
) -> jax.Array:
    """Folds tokens into the running softmax of each request's open HCA window.

    Args:
      running: f32[L, NS, 3, C]: largest score, sum of exponentials, sum weighted by value.
      values: f32[T, C], a request's tokens next to each other.
      scores: f32[T, C], position bias added.
      slots: i32[B]; -1 writes nothing.
      lengths: i32[B], tokens of each request before the call.
      counts: i32[B], tokens of each request in the call; where 0, nothing is written.
      offsets: i32[B], index in T of each request's first token.
      layer: i32[], index into L.
      rate: tokens per window.
      max_count: the largest count there can be; static.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The pools of the windows that are open after the call.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 2.4, the online form.
    """
    check_rank(4, running=running)
    rows = (check_same_length("T", values=values, scores=scores), running.shape[3])
    check_shape("values", values, rows, "T, C")
    check_shape("scores", scores, rows, "T, C")
    check_same_length("B", slots=slots, lengths=lengths, counts=counts, offsets=offsets)
    check_indices(slots=slots, lengths=lengths, counts=counts, offsets=offsets)
    return resolve("append_running", backend, _RUNNING)(
        running,
        values,
        scores,
        slots,
        lengths,
        counts,
        offsets,
        layer=layer,
        rate=rate,
        max_count=max_count,
    )


def append_tokens(
    rings: Sequence[Planes],
    rows: Sequence[Planes],
    running: jax.Array | None,
    projections: Planes | None,
    slots: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
    offsets: jax.Array,
    *,
    layer: jax.Array,
    rate: int,
    max_count: int,
    backend: Backend | None = None,
) -> tuple[tuple[Planes, ...], jax.Array | None]:
    """Appends a call's tokens to all that a layer keeps per request, in one launch.

    Args:
      rings: planes [L, NS, W, ...] each, the window and on CSA layers the compressors' states;
        W may differ.
      rows: planes [T, ...] for each ring, a request's tokens next to each other. Of tokens that
        share a ring row the last one is written.
      running: f32[L, NS, 3, C], HCA: pools of the open windows; None on other layers.
      projections: `values` and `scores`, f32[T, C], that go into `running`; None without it.
      slots: i32[B]; -1 writes nothing. No slot twice.
      lengths: i32[B], tokens of each request before the call.
      counts: i32[B], tokens of each request in the call; where 0, nothing is written.
      offsets: i32[B], index in T of each request's first token.
      layer: i32[], index into L.
      rate: tokens per window of `running`; not read without it.
      max_count: the largest count there can be; static.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The rings, and `running`, with the tokens in them.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md sections 1.7, steps 2 and 4, and 2.4.
    """
    if len(rings) != len(rows) or not rings:
        raise ValueError(f"rings and rows must be as many, got {len(rings)} and {len(rows)}")
    for ring, new in zip(rings, rows, strict=True):
        check_planes(ring, new, stacked_name="rings", rows_name="rows")
    if (running is None) != (projections is None):
        raise ValueError("running and projections go together")
    arrays = {f"rows[{i}]": first_plane(new) for i, new in enumerate(rows)}
    if running is not None and projections is not None:
        check_rank(4, running=running)
        if projections.keys() != {"values", "scores"}:
            raise ValueError(f"projections must be values and scores, got {sorted(projections)}")
        for name, array in projections.items():
            arrays[name] = array
            check_shape(name, array, (array.shape[0], running.shape[3]), "T, C")
    check_same_length("T", **arrays)
    check_same_length("B", slots=slots, lengths=lengths, counts=counts, offsets=offsets)
    check_indices(slots=slots, lengths=lengths, counts=counts, offsets=offsets)
    return resolve("append_tokens", backend, _TOKENS, preferred=Backend.TRITON_GPU)(
        rings,
        rows,
        running,
        projections,
        slots,
        lengths,
        counts,
        offsets,
        layer=layer,
        rate=rate,
        max_count=max_count,
    )
