"""Definition of `flush_write`, `flush_csa` and `flush_hca`: entries into their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.addressing import locate_entries, write_rows
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.compressor.pooling import compress_csa, compress_hca


def flush_write(
    pool: Planes,
    rows: Planes,
    block_table: jax.Array,
    request_ids: jax.Array,
    entries: jax.Array,
    *,
    layer: jax.Array,
) -> Planes:
    """Entry j of a request goes to block `table[j // EB]`, offset `j % EB`."""
    entries_per_block = jax.tree.leaves(pool)[0].shape[2]
    blocks, offsets = locate_entries(block_table, request_ids, entries, entries_per_block)
    return write_rows(pool, rows, layer, blocks, offsets)


def flush_csa(
    pools: Sequence[Planes],
    states: Sequence[Planes],
    rows: Sequence[Planes],
    norms: Sequence[jax.Array],
    frequencies: jax.Array,
    block_table: jax.Array,
    *,
    codecs: Sequence[Codec],
    closing: jax.Array,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
) -> tuple[Planes, ...]:
    """`compress_csa`, the codec and `flush_write`, for each compressor by itself."""
    written = []
    for pool, state, new, norm, codec in zip(pools, states, rows, norms, codecs, strict=True):
        entries = compress_csa(
            state,
            new["values"],
            new["scores"],
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
        place = _place(closing, request_ids, positions, rate)
        written.append(_encode_and_write(pool, entries, codec, block_table, place, layer))
    return tuple(written)


def flush_hca(
    pool: Planes,
    running: jax.Array,
    rows: Planes,
    norm: jax.Array,
    frequencies: jax.Array,
    block_table: jax.Array,
    *,
    codec: Codec,
    closing: jax.Array,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    max_count: int,
) -> Planes:
    """`compress_hca`, the codec and `flush_write`."""
    entries = compress_hca(
        running,
        rows["values"],
        rows["scores"],
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
    place = _place(closing, request_ids, positions, rate)
    return _encode_and_write(pool, entries, codec, block_table, place, layer)


def _place(
    closing: jax.Array, request_ids: jax.Array, positions: jax.Array, rate: int
) -> tuple[jax.Array, jax.Array]:
    """Each closing token's row of the table, -1 for none, and its entry's number."""
    token = jnp.maximum(closing, 0)
    return jnp.where(closing >= 0, request_ids[token], -1), positions[token] // rate


def _encode_and_write(
    pool: Planes,
    entries: jax.Array,
    codec: Codec,
    block_table: jax.Array,
    place: tuple[jax.Array, jax.Array],
    layer: jax.Array,
) -> Planes:
    rope_dim = pool["rope"].shape[-1] if "rope" in pool else 0
    return flush_write(pool, codec.encode(entries, rope_dim), block_table, *place, layer=layer)
