"""Definition of `flush_write`, `flush_csa` and `flush_hca`: entries into their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.addressing import locate_entries, write_rows
from pallas_kernels.common.codecs import Planes
from pallas_kernels.compressor.arguments import Entries, Windows
from pallas_kernels.compressor.arrays import Compressor
from pallas_kernels.compressor.pooling import compress_csa, compress_hca


def flush_write(entries: Entries) -> Planes:
    """Entry j of a request goes to block `table[j // EB]`, offset `j % EB`."""
    pool, rows, block_table, segment_ids, numbers, layer = entries
    entries_per_block = jax.tree.leaves(pool)[0].shape[2]
    blocks, offsets = locate_entries(block_table, segment_ids, numbers, entries_per_block)
    return write_rows(pool, rows, layer, blocks, offsets)


def flush_csa(compressors: Sequence[Compressor], windows: Windows) -> tuple[Planes, ...]:
    """`compress_csa`, the codec and `flush_write`, for each compressor by itself."""
    return tuple(_encode_and_write(c, compress_csa(c, windows), windows) for c in compressors)


def flush_hca(compressor: Compressor, windows: Windows) -> Planes:
    """`compress_hca`, the codec and `flush_write`."""
    return _encode_and_write(compressor, compress_hca(compressor, windows), windows)


def _encode_and_write(compressor: Compressor, entries: jax.Array, windows: Windows) -> Planes:
    """The pool with [n, C], the entry of the window that each token of `closing` closes."""
    call, closing = windows.call, windows.closing
    pool, token = compressor.pool, jnp.maximum(closing, 0)
    segment_ids = jnp.where(closing >= 0, call.segment_ids[token], -1)
    rope_dim = pool["rope"].shape[-1] if "rope" in pool else 0
    encoded = compressor.codec.encode(entries, rope_dim)
    numbers = call.positions[token] // windows.rate
    return flush_write(
        Entries(pool, encoded, call.block_table, segment_ids, numbers, windows.layer)
    )
