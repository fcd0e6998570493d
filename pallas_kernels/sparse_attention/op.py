"""Attention of each query token to its window and its compressed entries."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax

from pallas_kernels.common.backend import Backend, compute_capability, resolve
from pallas_kernels.common.checks import (
    check_codec,
    check_indices,
    check_planes,
    check_rank,
    check_same_length,
    first_plane,
)
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.sparse_attention import call_shapes, mosaic_blackwell, mosaic_hopper, reference


def choose_kernel() -> ModuleType:
    """The Mosaic GPU kernel for the GPU at hand; Hopper's in the interpreter."""
    capability = compute_capability()
    return mosaic_blackwell if capability is not None and capability[0] == 10 else mosaic_hopper


def _run_kernel(*arguments: Any, **named: Any) -> jax.Array:
    return choose_kernel().sparse_attention(*arguments, **named)


_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.sparse_attention,
    Backend.MOSAIC_GPU: _run_kernel,
}


def sparse_attention(
    queries: jax.Array,
    sink: jax.Array,
    ring: Planes,
    rows: Planes,
    pool: Planes | None,
    block_table: jax.Array,
    selected: jax.Array | None,
    *,
    visible: jax.Array | None = None,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    codec: Codec,
    scale: float,
    frequencies: jax.Array | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """One softmax over window and entries, with a sink; an entry is key and value.

    Args:
      queries: [T, H, C], normed and rotated.
      sink: f32[H], a logit that adds to the denominator only.
      ring: planes [L, NS, W, ...], position p in row p % W, before the call's tokens are written.
      rows: planes [T, ...], the call's own window entries; a request's tokens next to each other.
      pool: planes [L, NB, EB, ...] of entries, or None for the window alone.
      block_table: i32[B, LB], physical block of each logical one; -1 where there is none.
      selected: i32[T, K], entries each query attends to, -1 for none; None for the window alone.
      visible: i32[T], number of entries each query may see, so that after as many places `selected`
        must be -1: a kernel need not look there. None looks at all K.
      request_ids: i32[T], row of the table of each token; -1 is padding.
      slots: i32[T]; -1 is padding, and gives zeros.
      positions: i32[T].
      lengths: i32[T], tokens of each token's request before the call.
      layer: i32[], index into L of ring and pool.
      codec: how the planes store an entry.
      scale: of the logits.
      frequencies: f32[R / 2], radians per position, to turn the output back by each query's
        position; None leaves it as it is.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      [T, H, C] in the dtype of `queries`.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md sections 1.3, step 9, and 1.4.
    """
    check_rank(3, queries=queries)
    check_planes(ring, rows, stacked_name="ring", rows_name="rows")
    check_same_length(
        "T",
        queries=queries,
        request_ids=request_ids,
        slots=slots,
        positions=positions,
        lengths=lengths,
        rows=first_plane(rows),
    )
    if sink.shape != queries.shape[1:2]:
        raise ValueError(f"queries and sink must agree on H, got {queries.shape=}, {sink.shape=}")
    check_codec("ring", ring, codec, queries.shape[-1])
    check_indices(request_ids=request_ids, slots=slots, positions=positions, lengths=lengths)
    if frequencies is not None:
        check_rank(1, frequencies=frequencies)
        if 2 * frequencies.shape[0] > queries.shape[-1]:
            raise ValueError(
                "frequencies must turn at most C dims, two each, got "
                f"{frequencies.shape=} and {queries.shape=}"
            )
    if (pool is None) != (selected is None):
        raise ValueError("pool and selected go together; pass both, or None for both")
    if pool is not None and selected is not None:
        check_rank(2, selected=selected, block_table=block_table)
        check_codec("pool", pool, codec, queries.shape[-1])
        check_same_length("T", queries=queries, selected=selected)
        check_indices(selected=selected, block_table=block_table)
    if visible is not None:
        check_same_length("T", queries=queries, visible=visible)
        check_indices(visible=visible)
    obstacle = call_shapes.find_obstacle(queries, ring, codec)
    if backend == Backend.MOSAIC_GPU and obstacle is not None:
        raise NotImplementedError(
            f"'mosaic_gpu' sparse_attention {obstacle}; pass backend='reference'"
        )
    preferred = Backend.MOSAIC_GPU if obstacle is None else Backend.REFERENCE
    return resolve("sparse_attention", backend, _IMPLEMENTATIONS, preferred=preferred)(
        queries,
        sink,
        ring,
        rows,
        pool,
        block_table,
        selected,
        visible=visible,
        request_ids=request_ids,
        slots=slots,
        positions=positions,
        lengths=lengths,
        layer=layer,
        codec=codec,
        scale=scale,
        frequencies=frequencies,
    )
