"""How queries and keys come through registers into shared memory, for both kinds of GPU.

A key lies in the ring, among the call's own rows or in the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic, mosaic_memory
from pallas_kernels.sparse_attention.call_shapes import GROUP, HEADS, TILE, Shapes
from pallas_kernels.sparse_attention.rope import rotate

Ref = Any

SECTION = 2
"""Chunks whose next rows are fetched together, as soon as they are stored: the barrier after them
keeps the compiler from putting off loads to the end of a tile, where nothing would hide them."""


class Operands(NamedTuple):
    """Arrays that a kernel reads, and in it their refs in device memory; see `op.sparse_attention`.

    Attributes:
      queries: [T H, C], bits of bf16 in the dtype of products.
      sink: f32[H].
      selected: i32[T, K], padded to whole tiles.
      table: i32[B LB, 1].
      visible, segment_ids, slots, positions, lengths: i32[T], as in `CallIndices`.
      layer: i32[1].
      angles: f32[T, 2, rotated], see `rope.angles_of`; None where nothing is rotated.
      ring, rows, pool: planes as [rows, n].
    """

    queries: Any
    sink: Any
    selected: Any
    table: Any
    visible: Any
    segment_ids: Any
    slots: Any
    positions: Any
    lengths: Any
    layer: Any
    angles: Any
    ring: Mapping[str, Any]
    rows: Mapping[str, Any]
    pool: Mapping[str, Any]


class Outputs(NamedTuple):
    """Arrays that a kernel writes, and in it their refs.

    Attributes:
      sums: [T, H, C], the output in the dtype of products; with splits f32[S, T, H, C], of 64
        heads where there are fewer.
      statistics: f32[S, T, 2, H] likewise, largest logit and sum of weights of each split; None
        without splits.
    """

    sums: Any
    statistics: Any = None


class Place(NamedTuple):
    """What one CTA attends with, and to what.

    Attributes:
      token: its token.
      split: its split of the keys.
      heads: its 64 heads.
      own_heads: those of them that there are.
      first_query: row of the first head's query.
      num_tiles: tiles of keys that it looks at; at least 1.
    """

    token: jax.Array
    split: jax.Array
    heads: pl.Slice
    own_heads: pl.Slice
    first_query: jax.Array
    num_tiles: jax.Array


def find_place(inputs: Operands, shapes: Shapes) -> Place:
    """That of the CTA which asks."""
    token, head, split = (lax.axis_index(name) for name in ("token", "head", "split"))
    return Place(
        token=token,
        split=split,
        heads=pl.ds(head * HEADS, HEADS),
        own_heads=pl.ds(head * HEADS, shapes.heads_of_cta),
        first_query=token * shapes.num_heads + head * HEADS,
        num_tiles=shapes.tiles_to_look_at(split, inputs.visible[token]),
    )


def load_queries(
    inputs: Operands,
    shapes: Shapes,
    cta: Place,
    halves: Sequence[tuple[int | jax.Array, Ref, Ref]],
    *,
    store_shared: Callable[[Ref, jax.Array, Any], None],
    add_squares: Callable[[jax.Array], jax.Array] = lambda squares: squares,
) -> None:
    """One warpgroup brings halves of the columns of 64 heads' queries, in the dtype of products.

    Rows of heads that are not there become zeros. In bulk, and turned into that dtype where they
    lie: as loads of a row's 64 bytes each they would keep those of the first keys waiting. Queries
    as projected are normed and rotated there too.

    Args:
      inputs: operands.
      shapes: sizes of the call.
      cta: place of this CTA.
      halves: for each its number, its place in shared memory, [64, C / 2], and a barrier of one
        arrival.
      store_shared: stores to shared memory; see `gather_keys`.
      add_squares: adds the sums of squares, f32[64] in `mosaic.ROW` layout, of columns that another
        warpgroup brings.
    """
    width, num_heads = shapes.dim // 2, shapes.heads_of_cta
    is_full = num_heads == HEADS
    for half, target, landed in halves:
        columns = pl.ds(half * width, width)
        rows = inputs.queries.at[pl.ds(cta.first_query, num_heads), columns]
        plgpu.copy_gmem_to_smem(rows, target if is_full else target.at[pl.ds(0, num_heads)], landed)
    for _, _, landed in halves:
        plgpu.barrier_wait(landed)
    if shapes.dtype == jnp.bfloat16 and is_full and shapes.query_eps is None:
        return
    groups = [
        (half, start, target.at[:, pl.ds(start, GROUP)])
        for half, target, _ in halves
        for start in range(0, width, GROUP)
    ]
    factor = None
    if shapes.query_eps is not None:
        squares = functools.reduce(jnp.add, (jnp.square(_load_wide(p)) for _, _, p in groups))
        mean = add_squares(squares.sum(axis=1)) * (1 / shapes.dim)
        factor = lax.rsqrt(mean + shapes.query_eps)
    for half, start, place in groups:
        if factor is None:
            rows = _load_bf16(place)
        else:
            values = _load_wide(place)
            values = values * plgpu.layout_cast(
                lax.broadcast_in_dim(factor, values.shape, [0]), mosaic.ROWS
            )
            rows = _rotate(values.astype(jnp.bfloat16), half, start, inputs, shapes, cta)
        if not is_full:
            head = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=mosaic.ROWS)
            rows = jnp.where(head < num_heads, rows, jnp.zeros_like(rows))
        store_shared(place, rows.astype(shapes.dtype), mosaic.ROWS)
    plgpu.commit_smem()


def _load_bf16(place: Ref) -> jax.Array:
    bits = plgpu.load(place, layout=mosaic.ROWS, optimized=False)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _load_wide(place: Ref) -> jax.Array:
    return _load_bf16(place).astype(jnp.float32)


def _rotate(
    rows: jax.Array,
    half: int | jax.Array,
    start: int,
    inputs: Operands,
    shapes: Shapes,
    cta: Place,
) -> jax.Array:
    """RoPE of 64 columns of queries from `start` of a half on, if they are among those rotated."""
    for column in range(0, shapes.rotated, GROUP):
        owner, first = divmod(shapes.dim - shapes.rotated + column, shapes.dim // 2)
        if first != start:
            continue
        angles = inputs.angles.at[cta.token, :, pl.ds(column, GROUP)]

        def turn(rows: jax.Array, angles: Ref = angles) -> jax.Array:
            return rotate(rows.astype(jnp.float32), angles).astype(jnp.bfloat16)

        if isinstance(half, int):
            rows = turn(rows) if half == owner else rows
        else:
            rows = lax.cond(half == owner, turn, lambda rows: rows, rows)
    return rows


def gather_keys(
    inputs: Operands,
    shapes: Shapes,
    cta: Place,
    chunks: Sequence[int],
    *,
    target_of: Callable[[jax.Array, int], Ref],
    bias_smem: Ref | None,
    keys_ready: Sequence[Ref],
    keys_free: Ref,
    store_shared: Callable[[Ref, jax.Array, Any], None],
) -> None:
    """One warpgroup brings chunks of 64 columns of all keys of a split, one tile ahead.

    Args:
      inputs: operands.
      shapes: sizes of the call.
      cta: place of this CTA.
      chunks: the columns, in 64s.
      target_of: where half a tile comes to lie, [64, C / 2]; takes 0 or 1, of tiles in turn, and
        the half.
      bias_smem: f32[2, 64], to be filled with 0 for a key and minus infinity for none; or None.
      keys_ready: for each of equal parts of the chunks 2 barriers, arrived at once a tile's part is
        there.
      keys_free: 2 barriers, waited for before a place is filled again.
      store_shared: takes the target, values and their layout.
    """
    s, token, split, num_tiles = shapes, cta.token, cta.split, cta.num_tiles
    chunks_per_part = len(chunks) // len(keys_ready)
    place = plgpu.broadcasted_iota(jnp.int32, (TILE, GROUP), 0, layout=mosaic.ROWS).max(axis=1)
    segment, slot_of_token = inputs.segment_ids[token], inputs.slots[token]
    position, length = inputs.positions[token], inputs.lengths[token]
    layer_number = inputs.layer[0]
    sources = {
        name: [inputs.ring[name], inputs.rows[name], inputs.pool[name]] for name, _ in s.planes
    }

    def load_entries(i):
        """Entry numbers of tile i of this split; arbitrary in a window tile."""
        first = (split + i * s.splits - s.window_tiles) * TILE
        first = jnp.clip(first, 0, max(s.num_entries - TILE, 0))
        return plgpu.load(
            inputs.selected.at[token, pl.ds(first, TILE)], layout=mosaic.ROW, optimized=False
        )

    def load_blocks(entry):
        """Physical blocks of entries; 0 where there is no table row to look at."""
        logical = lax.div(jnp.maximum(entry, 0), s.entries_per_block)
        inside = (entry >= 0) & (logical < s.table_width) & (segment >= 0)
        where = jnp.where(inside, segment * s.table_width + logical, -1)
        return mosaic_memory.load_indexed_words([inputs.table], where * 0, where, word=0)

    def locate(i, entry, block):
        """Source (ring, call, pool) and row of each key of tile i of this split; -1 is none."""
        tile = split + i * s.splits
        steps = tile * TILE + place
        p = position - (s.window - 1) + steps
        in_call = p >= length
        ring_row = (layer_number * s.num_slots + slot_of_token) * s.window
        ring_row = ring_row + lax.rem(jnp.maximum(p, 0), s.window)
        window_row = jnp.where(in_call, token - (position - p), ring_row)
        in_window = (p >= 0) & (steps < s.window) & (slot_of_token >= 0)
        window_row = jnp.where(in_window, window_row, -1)

        entry_row = (layer_number * s.num_blocks + block) * s.entries_per_block
        entry_row = entry_row + lax.rem(jnp.maximum(entry, 0), s.entries_per_block)
        stored = (entry >= 0) & (entry < s.table_width * s.entries_per_block)
        entry_row = jnp.where(stored & (block >= 0) & (segment >= 0), entry_row, -1)

        window_tile = tile < s.window_tiles
        source = jnp.where(window_tile, in_call.astype(jnp.int32), 2)
        index = jnp.where(window_tile, window_row, entry_row)
        return source, jnp.where(i < num_tiles, index, -1)

    def store_tile(i, carry):
        """Stores tile i, whose rows are in registers, and has the rows of tile i + 1 loaded."""
        (rows, scales), index, entry, block, later_entry = carry
        stage = lax.rem(i, 2)
        source, next_index = locate(i + 1, entry, block)
        # What is loaded last in an iteration is waited for first in the next.
        mosaic_memory.prefetch_rows(list(sources.values()), source, next_index)
        next_scales = s.fetch_scales(sources, source, next_index, chunks)

        @pl.when(i >= 2)
        def _():
            plgpu.barrier_wait(keys_free.at[stage])  # until the products with tile i - 2 are done

        if bias_smem is not None:
            bias = jnp.where(index == -1, -jnp.inf, 0.0).astype(jnp.float32)
            store_shared(bias_smem.at[stage], bias, mosaic.ROW)
        next_rows = []
        for chunk, stored in zip(chunks, rows, strict=True):
            half, start = divmod(chunk * GROUP, s.dim // 2)
            target = target_of(stage, half).at[:, pl.ds(start, GROUP)]
            store_shared(target, s.decode(stored, scales, chunk), mosaic.ROWS)
            # Into the registers that have just become free.
            next_rows.append(s.fetch_rows(sources, source, next_index, chunk))
            if len(next_rows) % SECTION == 0 or len(next_rows) == len(chunks):
                plgpu.commit_smem()  # before tensor cores read what threads have stored
            if len(next_rows) % chunks_per_part == 0:
                ready = keys_ready[len(next_rows) // chunks_per_part - 1]
                plgpu.barrier_arrive(ready.at[stage])  # this part is the consumers' now
        later_block = load_blocks(later_entry)
        return (next_rows, next_scales), next_index, later_entry, later_block, load_entries(i + 3)

    # Addresses run ahead of rows: entries by three tiles, their blocks by two, rows by one.
    entries = [load_entries(i) for i in range(3)]
    blocks = [load_blocks(entry) for entry in entries[:2]]
    source, index = locate(0, entries[0], blocks[0])
    stored = (
        [s.fetch_rows(sources, source, index, chunk) for chunk in chunks],
        s.fetch_scales(sources, source, index, chunks),
    )
    carry = stored, index, entries[1], blocks[1], entries[2]
    lax.fori_loop(0, num_tiles, store_tile, carry)
    # Each arrival has its wait: those for the last two tiles are here.
    plgpu.barrier_wait(keys_free.at[lax.rem(num_tiles - 1, 2)])

    @pl.when(num_tiles > 1)
    def _():
        plgpu.barrier_wait(keys_free.at[lax.rem(num_tiles, 2)])
