"""Definition of `append_and_flush`: other ops one after the other."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.append_and_flush.arguments import Arguments
from pallas_kernels.append_and_flush.arrays import Appended
from pallas_kernels.append_tokens import reference as tokens
from pallas_kernels.compressor.arguments import Windows
from pallas_kernels.compressor.closing import find_closing
from pallas_kernels.compressor.reference import flush_csa, flush_hca
from pallas_kernels.encode_tokens.reference import encode_tokens
from pallas_kernels.round_index_queries.reference import round_index_queries


def append_and_flush(arguments: Arguments) -> Appended:
    """`encode_tokens`, `flush_csa` or `flush_hca`, `append_tokens`; and `round_index_queries`."""
    queries, kv, ring, compressors, call, norm_rope, rate, index_queries, index_codec = arguments
    call = dataclasses.replace(call, max_row_tokens=1)
    layer, frequencies, eps = ring.layer, norm_rope.frequencies, norm_rope.eps
    encoded = encode_tokens(queries, kv, norm_rope, call.positions, codec=ring.codec)
    # Else XLA may compute a row twice, for the ring and for the call, and round it differently.
    rotated, rows = jax.lax.optimization_barrier(encoded)
    pools = []
    for compressor in compressors:
        windows = Windows(call, frequencies, find_closing(call, rate), layer, rate, eps)
        if isinstance(compressor.state, dict):
            pools += flush_csa([compressor], windows)
        else:
            pools.append(flush_hca(compressor, windows))
    # States are read before they are written: unordered, XLA would copy them whole.
    states, pools = jax.lax.optimization_barrier(([c.state for c in compressors], pools))
    rings, new_rows, running, projections = [ring.planes], [rows], None, None
    for state, compressor in zip(states, compressors, strict=True):
        if isinstance(state, dict):
            rings.append(state)
            new_rows.append(compressor.rows)
        else:
            running, projections = state, compressor.rows
    appended = tokens.Arguments(rings, new_rows, running, projections, call, layer, rate)
    (window, *states), running = tokens.append_tokens(appended)
    kept = tuple(states) if running is None else (running,)
    rounded = None
    if index_queries is not None and index_codec is not None:
        rounded = round_index_queries(index_queries, frequencies, call.positions, codec=index_codec)
    return Appended(rotated, rows, window, kept, tuple(pools), rounded)
