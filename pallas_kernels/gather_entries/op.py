"""Reads stored vectors into dense arrays: for notebooks, checking, and where dense is faster.

FP8 entries have a Triton kernel, which is faster than XLA at every shape measured. Plain values and
index keys take XLA by choice: there is nothing to decode, or little to move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import (
    check_call,
    check_float_dtype,
    check_indices,
    check_integer,
    check_rank,
    check_ring,
    check_same_length,
    check_stored,
)
from pallas_kernels.common.codecs import GroupedFP8Codec, Planes, ScaledFP8Codec
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gather_entries import reference, triton_gpu
from pallas_kernels.gpu import triton_entries

_ENTRIES = {
    Backend.REFERENCE: reference.gather_entries,
    Backend.TRITON_GPU: triton_gpu.gather_entries,
}
_WINDOW = {
    Backend.REFERENCE: reference.gather_window,
    Backend.TRITON_GPU: triton_gpu.gather_window,
}


def gather_entries(
    pool: LayerPlanes,
    call: CallIndices,
    index: jax.Array,
    *,
    dim: int,
    dtype: DTypeLike = jnp.float32,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers entries, or index keys, by their logical numbers.

    In plain JAX, for entries that there are:

        block, offset = jnp.divmod(index, EB)                               # i32[T, K] each
        block = call.block_table[call.segment_ids[:, None], block]          # i32[T, K]
        stored = {name: plane[pool.layer, block, offset] for name, plane in pool.planes.items()}
        dense = pool.codec.decode(stored, dim)                              # f32[T, K, dim]

    Args:
      pool: planes [L, NB, EB, ...] of entries or index keys.
      call: where the tokens belong; a token reads the row of `block_table` of its segment, and
        nothing where that is -1.
      index: i32[T, K], logical entry numbers (entries, not tokens); -1 selects nothing.
      dim: C, or IC.
      dtype: dtype of the result.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      dtype[T, K, dim] in the order of `index`, zeros where there is no such entry, and bool[T, K],
      which says where there is.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: original_cache.md, `gather_compressed_kv`.
    """
    check_call(call)
    check_rank(2, index=index)
    check_same_length("T", segment_ids=call.segment_ids, index=index)
    check_indices(index=index)
    dim, dtype = check_integer("dim", dim, 1), check_float_dtype("dtype", dtype)
    check_stored("pool", pool, dim)
    implementation = _resolve("gather_entries", backend, _ENTRIES, pool, index=index)
    return implementation(*jax_arrays(pool, call, index), dim=dim, dtype=dtype)


def gather_window(
    ring: LayerPlanes,
    rows: Planes,
    call: CallIndices,
    *,
    dim: int,
    dtype: DTypeLike = jnp.float32,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers each token's window, from the ring as it was and the call's own rows.

    In plain JAX, for rows that there are:

        row = jnp.arange(W)
        age = (call.positions[:, None] - row) % W                           # i32[T, W]
        in_call = call.positions[:, None] - age >= call.lengths[:, None]    # bool[T, W]
        stored = {n: p[ring.layer, call.slots[:, None], row] for n, p in ring.planes.items()}
        own = {n: p[jnp.arange(T)[:, None] - age] for n, p in rows.items()}
        old, new = (ring.codec.decode(planes, dim) for planes in (stored, own))
        dense = jnp.where(in_call[..., None], new, old)                     # f32[T, W, dim]

    Args:
      ring: planes [L, NS, W, ...], position p in row p % W, before the call's tokens are written.
      rows: planes [T, ...], the call's tokens.
      call: where they belong; a token without a slot reads nothing.
      dim: C.
      dtype: dtype of the result.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      dtype[T, W, dim] in the order of ring rows, zeros where the window has no token yet, and
      bool[T, W], which says where it has one.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: original_cache.md, `gather_swa_kv`; deepseek_v4.md section 1.3.
    """
    dim, dtype = check_integer("dim", dim, 1), check_float_dtype("dtype", dtype)
    check_ring(ring, rows, call, dim)
    implementation = _resolve("gather_window", backend, _WINDOW, ring, slots=call.slots)
    return implementation(*jax_arrays(ring, rows, call), dim=dim, dtype=dtype)


def _resolve[F: Callable](
    op: str,
    backend: Backend | None,
    implementations: Mapping[Backend, F],
    stored: LayerPlanes,
    **index: jax.Array,
) -> F:
    """`resolve` for rows of these planes, which `index`, by name, locates."""
    fp8 = isinstance(stored.codec, GroupedFP8Codec | ScaledFP8Codec)
    return resolve(
        op,
        backend,
        implementations,
        preferred=Backend.TRITON_GPU if fp8 else Backend.REFERENCE,
        obstacle=triton_entries.find_obstacle(stored.codec, stored.planes),
        arguments=index | stored.planes,
    )
