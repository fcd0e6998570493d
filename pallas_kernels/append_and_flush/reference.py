"""Definition of `append_and_flush`: other ops one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from pallas_kernels.append_tokens import reference as tokens
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.common.norm_rope import NormRope
from pallas_kernels.compressor.closing import find_closing
from pallas_kernels.compressor.reference import Compressor, Windows, flush_csa, flush_hca
from pallas_kernels.encode_tokens.reference import encode_tokens
from pallas_kernels.round_index_queries.reference import round_index_queries


class Arguments(NamedTuple):
    """The arguments of `op.append_and_flush`, which describes and checks them."""

    queries: jax.Array
    kv: jax.Array
    ring: LayerPlanes
    compressors: Sequence[Compressor]
    call: CallIndices
    norm_rope: NormRope
    compression_ratio: int
    index_queries: jax.Array | None
    index_codec: Codec | None


class Appended(NamedTuple):
    """What `append_and_flush` has made and updated.

    Attributes:
      queries: [T, H, C], normed and rotated.
      rows: planes [T, ...], the tokens' window entries, which are in the ring too.
      ring: the planes of the window, updated.
      states: the state of each compressor, updated.
      pools: the pool of each compressor, updated.
      index_queries: [T, IH, IC], rotated and rounded; None where there were none.
    """

    queries: jax.Array
    rows: Planes
    ring: Planes
    states: tuple[Planes | jax.Array, ...]
    pools: tuple[Planes, ...]
    index_queries: jax.Array | None


def append_and_flush(arguments: Arguments) -> Appended:
    """`encode_tokens`, `flush_csa` or `flush_hca`, `append_tokens`; and `round_index_queries`."""
    ring, compressors, norm_rope = arguments.ring, arguments.compressors, arguments.norm_rope
    # Each request has one token in the call.
    call = dataclasses.replace(arguments.call, max_row_tokens=1)
    layer, frequencies, compression_ratio = (
        ring.layer,
        norm_rope.frequencies,
        arguments.compression_ratio,
    )
    encoded = encode_tokens(  # [T, H, C] and planes [T, ...]
        arguments.queries, arguments.kv, norm_rope, call.positions, codec=ring.codec
    )
    # Else XLA may compute a row twice, for the ring and for the call, and round it differently.
    rotated, rows = jax.lax.optimization_barrier(encoded)
    pools = []
    for compressor in compressors:
        closing = find_closing(call, compression_ratio)  # i32[T]
        windows = Windows(call, frequencies, closing, layer, compression_ratio, norm_rope.eps)
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
    (window, *states), running = tokens.append_tokens(
        tokens.Arguments(rings, new_rows, running, projections, call, layer, compression_ratio)
    )
    index_queries, index_codec = arguments.index_queries, arguments.index_codec
    rounded = None
    if index_queries is not None and index_codec is not None:
        rounded = round_index_queries(index_queries, frequencies, call.positions, codec=index_codec)
    return Appended(
        queries=rotated,
        rows=rows,
        ring=window,
        states=tuple(states) if running is None else (running,),
        pools=tuple(pools),
        index_queries=rounded,
    )
