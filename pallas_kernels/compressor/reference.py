"""Definition of `flush_write`, `flush_csa` and `flush_hca`: entries into their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.addressing import locate_entries, write_rows
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes
from pallas_kernels.compressor.arrays import Compressor
from pallas_kernels.compressor.pooling import compress_csa, compress_hca


def flush_write(
    pool: Planes,
    rows: Planes,
    block_table: jax.Array,
    segment_ids: jax.Array,
    entries: jax.Array,
    *,
    layer: jax.Array,
) -> Planes:
    """Entry j of a request goes to block `table[j // EB]`, offset `j % EB`."""
    entries_per_block = jax.tree.leaves(pool)[0].shape[2]
    blocks, offsets = locate_entries(block_table, segment_ids, entries, entries_per_block)
    return write_rows(pool, rows, layer, blocks, offsets)


def flush_csa(
    compressors: Sequence[Compressor],
    call: CallIndices,
    frequencies: jax.Array,
    *,
    closing: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
) -> tuple[Planes, ...]:
    """`compress_csa`, the codec and `flush_write`, for each compressor by itself.

    The order of `closing`, i32[n] with -1 for no token, does not matter.
    """
    where = {"closing": closing, "layer": layer, "rate": rate}
    return tuple(
        _encode_and_write(c, compress_csa(c, call, frequencies, **where, eps=eps), call, **where)
        for c in compressors
    )


def flush_hca(
    compressor: Compressor,
    call: CallIndices,
    frequencies: jax.Array,
    *,
    closing: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
) -> Planes:
    """`compress_hca`, the codec and `flush_write`; `closing` as in `flush_csa`."""
    where = {"closing": closing, "layer": layer, "rate": rate}
    entries = compress_hca(compressor, call, frequencies, **where, eps=eps)
    return _encode_and_write(compressor, entries, call, **where)


def _encode_and_write(
    compressor: Compressor,
    entries: jax.Array,
    call: CallIndices,
    *,
    closing: jax.Array,
    layer: jax.Array,
    rate: int,
) -> Planes:
    """The pool with [n, C], the entry of the window that each token of `closing` closes."""
    pool, token = compressor.pool, jnp.maximum(closing, 0)
    segment_ids = jnp.where(closing >= 0, call.segment_ids[token], -1)
    rope_dim = pool["rope"].shape[-1] if "rope" in pool else 0
    encoded, numbers = compressor.codec.encode(entries, rope_dim), call.positions[token] // rate
    return flush_write(pool, encoded, call.block_table, segment_ids, numbers, layer=layer)
