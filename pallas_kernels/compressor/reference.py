"""Definition of `flush_write`, `flush_csa` and `flush_hca`: closed windows into their blocks.

`pooling.py` says what the tokens of a window make; here is which tokens they are, and where the
entry goes.

Source: deepseek_v4.md sections 2.2 and 2.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.addressing import locate_entries, write_rows
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Codec, Planes, rope_dim_of
from pallas_kernels.compressor.pooling import empty_pool, finish_entry, fold_tokens, pool_at_once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressor:
    """One compressor of a layer: what it keeps, what the call gives it, where its entries go.

    Attributes:
      state: CSA: `values` and `scores`, f32[L, NS, 2 * M, 2 * C], token p in row p % (2 * M).
        HCA: f32[L, NS, 3, C], the running pool of the open window.
      rows: the call's projections, `values` and `scores`, f32[T, 2 * C] of CSA or f32[T, C] of
        HCA, position bias added; the tokens of a segment lie next to each other.
      norm: [C], norm weight of the entries, in the dtype of activations.
      pool: planes [L, NB, EB, ...] of the codec, where entries are stored.
      codec: how entries are stored; static.
    """

    state: Planes | jax.Array
    rows: Planes
    norm: jax.Array
    pool: Planes
    codec: Codec = dataclasses.field(metadata={"static": True})


class Windows(NamedTuple):
    """The windows that a call closes, as `flush_csa` and `flush_hca` compress them.

    Attributes:
      call: where the call's tokens belong.
      frequencies: f32[R / 2], radians per position.
      closing: i32[n], tokens of the call that close a window, in any order; -1 is none.
      layer: i32[], index into states and pools.
      compression_ratio: M, tokens per window.
      eps: floor of the norms.
    """

    call: CallIndices
    frequencies: jax.Array
    closing: jax.Array
    layer: jax.Array
    compression_ratio: int
    eps: float


class Entries(NamedTuple):
    """The arguments of `op.flush_write`, which describes and checks them."""

    pool: Planes
    rows: Planes
    block_table: jax.Array
    segment_ids: jax.Array
    numbers: jax.Array
    layer: jax.Array


def flush_write(entries: Entries) -> Planes:
    """Entry j of a request goes to block `table[j // EB]`, offset `j % EB`."""
    entries_per_block = first_plane(entries.pool).shape[2]  # EB
    blocks, offsets = locate_entries(  # i32[n] each
        entries.block_table, entries.segment_ids, entries.numbers, entries_per_block
    )
    return write_rows(entries.pool, entries.rows, entries.layer, blocks, offsets)


def flush_csa(compressors: Sequence[Compressor], windows: Windows) -> tuple[Planes, ...]:
    """`compress_csa`, the codec and `flush_write`, for each compressor by itself."""
    return tuple(_encode_and_write(c, compress_csa(c, windows), windows) for c in compressors)


def flush_hca(compressor: Compressor, windows: Windows) -> Planes:
    """`compress_hca`, the codec and `flush_write`."""
    return _encode_and_write(compressor, compress_hca(compressor, windows), windows)


def compress_csa(compressor: Compressor, windows: Windows) -> jax.Array:
    """Entry j pools the b-stream of window j - 1 and the a-stream of window j.

    M = 2, closing token at p = 5:    positions  2  3 | 4  5
                                      streams    b  b | a  a     state row p % 4

    Args:
      compressor: its state as it was before the call; `pool` and `codec` are not read.
      windows: those that the call closes.

    Returns:
      [n, C] in the dtype of the norm's weight; what -1 gives is arbitrary.
    """
    call, compression_ratio, state = windows.call, windows.compression_ratio, compressor.state
    assert isinstance(state, dict)
    token = jnp.maximum(windows.closing, 0)[:, None]  # i32[n, 1]
    back = jnp.arange(2 * compression_ratio - 1, -1, -1, dtype=jnp.int32)[None]  # i32[1, 2 M]
    source = jnp.maximum(token - back, 0)  # i32[n, 2 M], rows of the call
    slot, position = call.slots[token], call.positions[token] - back  # i32[n, 1], i32[n, 2 M]
    row = (jnp.maximum(slot, 0), jnp.maximum(position, 0) % (2 * compression_ratio))  # of the state
    in_call, there = ((position >= n)[..., None] for n in (call.lengths[token], 0))
    channels = compressor.norm.shape[0]  # C

    def own_stream(rows: jax.Array, stored: jax.Array, absent: float) -> jax.Array:
        both = jnp.where(in_call, rows[source], stored[windows.layer, *row])  # f32[n, 2 M, 2 C]
        own = jnp.where(
            (back >= compression_ratio)[..., None], both[..., :channels], both[..., channels:]
        )
        return jnp.where(there, own, absent)

    values = own_stream(compressor.rows["values"], state["values"], 0.0)  # f32[n, 2 M, C]
    scores = own_stream(compressor.rows["scores"], state["scores"], -jnp.inf)  # f32[n, 2 M, C]
    pool = pool_at_once(jnp.unstack(values, axis=1), jnp.unstack(scores, axis=1))  # f32[n, 3, C]
    begin, frequencies = position[:, compression_ratio], windows.frequencies
    return finish_entry(pool, compressor.norm, frequencies, begin, eps=windows.eps)


def compress_hca(compressor: Compressor, windows: Windows) -> jax.Array:
    """Entry j pools window j: what the running softmax holds of it, then this call's tokens.

    Arguments and result as in `compress_csa`.
    """
    call, compression_ratio, running = windows.call, windows.compression_ratio, compressor.state
    assert not isinstance(running, dict)
    token = jnp.maximum(windows.closing, 0)  # i32[n]
    end, length = call.positions[token], call.lengths[token]  # i32[n] each
    begin = end - (compression_ratio - 1)  # i32[n]
    first = jnp.maximum(begin, length)  # i32[n]
    carried = (begin < length)[:, None, None]  # bool[n, 1, 1]
    old = running[windows.layer, jnp.maximum(call.slots[token], 0)]  # f32[n, 3, C]
    pool = fold_tokens(  # f32[n, 3, C]
        jnp.where(carried, old, empty_pool(*old.shape[::2])),
        compressor.rows["values"],
        compressor.rows["scores"],
        start=token - (end - first),
        count=end - first + 1,
        max_count=min(call.max_row_tokens, compression_ratio),
    )
    frequencies = windows.frequencies
    return finish_entry(pool, compressor.norm, frequencies, begin, eps=windows.eps)


def _encode_and_write(compressor: Compressor, entries: jax.Array, windows: Windows) -> Planes:
    """The pool with [n, C], the entry of the window that each token of `closing` closes."""
    call, closing = windows.call, windows.closing
    token = jnp.maximum(closing, 0)  # i32[n]
    return flush_write(
        Entries(
            pool=compressor.pool,
            rows=compressor.codec.encode(entries, rope_dim_of(compressor.pool)),  # [n, ...]
            block_table=call.block_table,
            segment_ids=jnp.where(closing >= 0, call.segment_ids[token], -1),  # i32[n]
            numbers=call.positions[token] // windows.compression_ratio,  # i32[n]
            layer=windows.layer,
        )
    )
