"""Reads stored vectors into dense arrays: for notebooks, checking, and where dense is faster.

For FP8 entries there is a Triton kernel, which takes 0.4 to 0.75 of XLA's time on an H200 at every
shape measured, from one entry a request (2.1 us, 2.8) to 8,192 (244 us, 397; 64 requests, to bf16).
Plain values and index keys take XLA, which has nothing to decode or little to move.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.backend import Backend, resolve
from pallas_kernels.common.checks import (
    check_codec,
    check_indices,
    check_planes,
    check_rank,
    check_same_length,
    first_plane,
)
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.gather_entries import reference, triton_gpu

_ENTRIES = {
    Backend.REFERENCE: reference.gather_entries,
    Backend.TRITON_GPU: triton_gpu.gather_entries,
}
_WINDOW = {
    Backend.REFERENCE: reference.gather_window,
    Backend.TRITON_GPU: triton_gpu.gather_window,
}


def gather_entries(
    pool: Planes,
    block_table: jax.Array,
    request_ids: jax.Array,
    index: jax.Array,
    *,
    layer: jax.Array,
    codec: Codec,
    dim: int,
    dtype: DTypeLike = jnp.float32,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers entries, or index keys, by their logical numbers.

    Args:
      pool: planes [L, NB, EB, ...].
      block_table: i32[B, LB], physical block of each logical one; -1 where there is none.
      request_ids: i32[T], row of the table each query reads; -1 reads nothing.
      index: i32[T, K], logical entry numbers (entries, not tokens); -1 selects nothing.
      layer: i32[], index into L.
      codec: how the planes store a vector.
      dim: C, or IC.
      dtype: of the result.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      dtype[T, K, dim] in the order of `index`, zeros where there is no such entry, and bool[T, K],
      which says where there is.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: original_cache.md, `gather_compressed_kv`.
    """
    check_rank(2, block_table=block_table, index=index)
    check_same_length("T", request_ids=request_ids, index=index)
    check_indices(block_table=block_table, request_ids=request_ids, index=index)
    check_codec("pool", pool, codec, dim)
    preferred = _preferred(codec, pool)
    return resolve("gather_entries", backend, _ENTRIES, preferred=preferred)(
        pool, block_table, request_ids, index, layer=layer, codec=codec, dim=dim, dtype=dtype
    )


def gather_window(
    ring: Planes,
    rows: Planes,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    layer: jax.Array,
    codec: Codec,
    dim: int,
    dtype: DTypeLike = jnp.float32,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers each token's window, from the ring as it was and the call's own rows.

    Args:
      ring: planes [L, NS, W, ...], position p in row p % W, before the call's tokens are written.
      rows: planes [T, ...], the call's tokens; a request's next to each other, in order.
      slots: i32[T]; -1 reads nothing.
      positions: i32[T].
      lengths: i32[T], tokens of each token's request before the call.
      layer: i32[], index into L.
      codec: how the planes store a vector.
      dim: C.
      dtype: of the result.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      dtype[T, W, dim] in the order of ring rows, zeros where the window has no token yet, and
      bool[T, W], which says where it has one.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: original_cache.md, `gather_swa_kv`; deepseek_v4.md section 1.3.
    """
    check_planes(ring, rows, stacked_name="ring", rows_name="rows")
    check_same_length(
        "T", slots=slots, positions=positions, lengths=lengths, rows=first_plane(rows)
    )
    check_codec("ring", ring, codec, dim)
    check_indices(slots=slots, positions=positions, lengths=lengths)
    preferred = _preferred(codec, ring)
    return resolve("gather_window", backend, _WINDOW, preferred=preferred)(
        ring, rows, slots, positions, lengths, layer=layer, codec=codec, dim=dim, dtype=dtype
    )


def _preferred(codec: Codec, planes: Planes) -> Backend:
    return Backend.TRITON_GPU if triton_gpu.supports(codec, planes) else Backend.REFERENCE
