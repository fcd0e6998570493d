"""Keys in the Triton kernels of sparse attention: where a token's lie, and tiles of them.

A token's window comes first, the oldest key first, then what it selected. The window lies in the
ring or among the call's own rows, entries in blocks. Both are of one layer and stored alike, or, of
models whose layers read what another one made, of two layers and stored in two ways.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Codec
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.triton_entries import Columns, Source, find_entries, load_rows
from pallas_kernels.sparse_attention.call_shapes import product_dtype
from pallas_kernels.sparse_attention.reference import Arguments

Ref = Any
KEYS = 32
"""Of a tile."""


class Operands(NamedTuple):
    """Arrays that a kernel reads, and in it their refs; see `op.sparse_attention`.

    Attributes:
      queries: [T, H, C].
      layer: i32[1].
      entry_layer: i32[1] of a pool that is apart, or None.
      slots, positions, lengths, segment_ids: i32[T].
      visible: i32[T], or None.
      selected: i32[T, K], or None for the window alone.
      table: i32[B, LB].
      ring, rows, pool: planes, byte planes as words; the last None for the window alone.
      sink: f32[H], where a kernel divides by the sum of weights itself; else None.
    """

    queries: Any
    layer: Any
    entry_layer: Any
    slots: Any
    positions: Any
    lengths: Any
    segment_ids: Any
    visible: Any
    selected: Any
    table: Any
    ring: Any
    rows: Any
    pool: Any
    sink: Any = None


class Keys(NamedTuple):
    """A tile of keys.

    Attributes:
      columns: [KEYS, ...] each, all of a key's.
      is_key: bool[KEYS], whether there is one.
    """

    columns: list[Columns]
    is_key: jax.Array


class Found(NamedTuple):
    """Where entries lie in the pool.

    Attributes:
      block, row: i32[KEYS].
      present: bool[KEYS], whether there is one.
    """

    block: jax.Array
    row: jax.Array
    present: jax.Array


class Codecs(NamedTuple):
    """How keys are stored, and the dtype of products with them; static."""

    window: Codec
    entry: Codec
    dtype: Any


def operands_of(arguments: Arguments, *, divides: bool = False) -> Operands:
    """The arrays of a call; `divides` is of a kernel that counts the sink."""
    ring, pool, call = arguments.ring, arguments.pool, arguments.call
    _, entry_tiles = count_tiles(arguments)
    pool = pool if entry_tiles else None
    return Operands(
        queries=arguments.queries,
        layer=ring.layer[None],
        entry_layer=pool.layer[None] if pool is not None and arguments.apart else None,
        slots=call.slots,
        positions=call.positions,
        lengths=call.lengths,
        segment_ids=call.segment_ids,
        visible=call.visible if entry_tiles else None,
        selected=arguments.selected if entry_tiles else None,
        table=call.block_table,
        ring=triton.as_words(ring.planes),
        rows=triton.as_words(arguments.rows),
        pool=triton.as_words(pool.planes) if pool is not None else None,
        sink=arguments.sink if divides else None,
    )


def codecs_of(arguments: Arguments) -> Codecs:
    """Of a call."""
    window, pool = arguments.ring.codec, arguments.pool
    entry = window if pool is None else pool.codec
    return Codecs(window, entry, product_dtype(window, entry))


def count_tiles(arguments: Arguments) -> tuple[int, int]:
    """Tiles of a token's window, and of the places of its entries."""
    window = first_plane(arguments.ring.planes).shape[2]
    selected = arguments.selected
    return pl.cdiv(window, KEYS), 0 if selected is None else pl.cdiv(selected.shape[1], KEYS)


def load_window(
    refs: Operands, token: jax.Array, tile: jax.Array, codecs: Codecs, *, dim: int
) -> Keys:
    """A tile of a token's window."""
    return _load(_find_window(refs, token, _places(tile)), codecs.window, codecs.dtype, dim)


def load_selected(
    refs: Operands, token: jax.Array, tile: jax.Array, codecs: Codecs, *, dim: int
) -> Keys:
    """A tile of what a token selected."""
    # Addresses first, loads that depend on each other; then all columns at once.
    found = find_blocks(refs, token, load_selection(refs, token, tile))
    return load_found(refs, found, codecs, dim=dim)


def load_selection(refs: Operands, token: jax.Array, tile: jax.Array) -> jax.Array:
    """i32[KEYS], the entries of a tile of what a token selected; -1 for none."""
    place = _places(tile)
    # Beyond the selection, or what a token sees of it, there is no key, and nothing is loaded.
    wanted = place < refs.selected.shape[1]
    if refs.visible is not None:
        wanted &= place < refs.visible[token]
    return triton.load_where(refs.selected, (token, place), wanted, -1)


def find_blocks(refs: Operands, token: jax.Array, entry: jax.Array) -> Found:
    """Where entries of a token lie in the pool."""
    entries_per_block = first_plane(refs.pool).shape[2]  # EB
    segment = refs.segment_ids[token]  # row of the table; -1 for none
    return Found(*find_entries(entry, refs.table, segment, entries_per_block=entries_per_block))


def load_found(refs: Operands, found: Found, codecs: Codecs, *, dim: int) -> Keys:
    """A tile of entries that were found."""
    layer = refs.layer if refs.entry_layer is None else refs.entry_layer
    source = Source(refs.pool, (layer[0], found.block, found.row), found.present)
    return _load([source], codecs.entry, codecs.dtype, dim)


def _places(tile: jax.Array) -> jax.Array:
    return tile * KEYS + jnp.arange(KEYS, dtype=jnp.int32)


def _load(sources: list[Source], codec: Codec, dtype: Any, dim: int) -> Keys:
    # Of several sources a key is in one at most.
    is_key = functools.reduce(jnp.logical_or, (source.present for source in sources))
    return Keys(load_rows(sources, codec, dim=dim, dtype=dtype), is_key)


def _find_window(refs: Operands, token: jax.Array, place: jax.Array) -> list[Source]:
    """Where keys of a token's window lie, the oldest first: in the ring, or among the call's."""
    window = first_plane(refs.ring).shape[2]
    slot, newest = refs.slots[token], refs.positions[token]
    position = newest - (window - 1) + place  # i32[KEYS], the oldest first
    is_key = (place < window) & (position >= 0) & (slot >= 0)
    # The ring has what came before the call; what is of the call itself lies in its rows.
    in_call = position >= refs.lengths[token]
    # Rows of a ring are congruent to positions.
    row = lax.rem(jnp.maximum(position, 0), window)
    return [
        # Addresses are kept inside the arrays where there is no key: nothing is loaded there.
        Source(refs.ring, (refs.layer[0], jnp.maximum(slot, 0), row), is_key & ~in_call),
        Source(refs.rows, (jnp.maximum(token - (newest - position), 0),), is_key & in_call),
    ]
