"""Definition of `append_and_flush`: other ops one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.append_and_flush.arrays import Appended, Compressor
from pallas_kernels.append_tokens.reference import append_tokens
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.compressor.reference import flush_csa, flush_hca
from pallas_kernels.encode_tokens.reference import encode_tokens
from pallas_kernels.round_index_queries.reference import round_index_queries


def append_and_flush(
    queries: jax.Array,
    kv: jax.Array,
    norm: jax.Array,
    frequencies: jax.Array,
    ring: Planes,
    compressors: Sequence[Compressor],
    block_table: jax.Array | None,
    *,
    codec: Codec,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    index_queries: jax.Array | None,
    index_codec: Codec | None,
) -> Appended:
    """`encode_tokens`, `flush_csa` or `flush_hca`, `append_tokens`; and `round_index_queries`."""
    encoded = encode_tokens(queries, kv, norm, frequencies, positions, codec=codec, eps=eps)
    # Else XLA may compute a row twice, for the ring and for the call, and round it differently.
    turned, rows = jax.lax.optimization_barrier(encoded)
    token = jnp.arange(slots.shape[0], dtype=jnp.int32)
    closes = (slots >= 0) & ((positions + 1) % rate == 0)
    call = {
        "closing": jnp.where(closes, token, -1),
        "request_ids": request_ids,
        "slots": slots,
        "positions": positions,
        "lengths": positions,
        "layer": layer,
        "rate": rate,
        "eps": eps,
    }
    pools = []
    for state, new, weight, pool, entry_codec in compressors:
        assert block_table is not None
        if isinstance(state, dict):
            (pool,) = flush_csa(
                [pool], [state], [new], [weight], frequencies, block_table,
                codecs=[entry_codec], **call,
            )  # fmt: skip
        else:
            pool = flush_hca(
                pool, state, new, weight, frequencies, block_table,
                codec=entry_codec, max_count=1, **call,
            )  # fmt: skip
        pools.append(pool)
    # States are read before they are written: unordered, XLA would copy them whole.
    states, pools = jax.lax.optimization_barrier(([c.state for c in compressors], pools))
    rings, new_rows, running, projections = [ring], [rows], None, None
    for state, compressor in zip(states, compressors, strict=True):
        if isinstance(state, dict):
            rings.append(state)
            new_rows.append(compressor.rows)
        else:
            running, projections = state, compressor.rows
    (ring, *states), running = append_tokens(
        rings,
        new_rows,
        running,
        projections,
        slots,
        positions,
        (slots >= 0).astype(jnp.int32),
        token,
        layer=layer,
        rate=rate,
        max_count=1,
    )
    kept = tuple(states) if running is None else (running,)
    rounded = None
    if index_queries is not None and index_codec is not None:
        rounded = round_index_queries(index_queries, frequencies, positions, codec=index_codec)
    return Appended(turned, rows, ring, kept, tuple(pools), rounded)
