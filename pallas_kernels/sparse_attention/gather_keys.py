"""How keys come through registers into shared memory, for both kinds of GPU.

A key lies in the ring, among the call's own rows or in the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic, mosaic_memory
from pallas_kernels.sparse_attention.call_shapes import GROUP, TILE, Shapes
from pallas_kernels.sparse_attention.loads import Operands, Place, Ref

SECTION = 2
"""Chunks whose next rows are fetched together, as soon as they are stored: the barrier after them
keeps the compiler from putting off loads to the end of a tile, where nothing would hide them."""


class _Ahead(NamedTuple):
    """What the producer has of tiles that are not stored yet, when it begins with tile i.

    Attributes:
      rows: of tile i, a chunk of columns each.
      scales: words of scales of tile i, by plane and number.
      row_number: i32[64], of those rows in their sources; -1 for no key.
      entry: i32[64], entries of tile i + 1.
      block: i32[64], their blocks.
      later_entry: i32[64], entries of tile i + 2.
    """

    rows: list[jax.Array]
    scales: Mapping[str, jax.Array]
    row_number: jax.Array
    entry: jax.Array
    block: jax.Array
    later_entry: jax.Array


@dataclasses.dataclass(frozen=True)
class _Addresses:
    """Where the keys of a CTA's tiles lie; i32[64] are in `mosaic.ROW` layout, a value a key.

    Attributes:
      inputs: operands.
      shapes: sizes of the call.
      cta: place of the CTA.
      place: i32[64], of a key in its tile.
      segment, slot, position, length: i32[], the token's, as in `CallIndices`.
      layer: i32[].
    """

    inputs: Operands
    shapes: Shapes
    cta: Place
    place: jax.Array
    segment: jax.Array
    slot: jax.Array
    position: jax.Array
    length: jax.Array
    layer: jax.Array

    @classmethod
    def of(cls, inputs: Operands, shapes: Shapes, cta: Place) -> _Addresses:
        """Those of the CTA's token."""
        tile, token = (TILE, GROUP), cta.token
        return cls(
            inputs,
            shapes,
            cta,
            place=plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=mosaic.ROWS).max(axis=1),
            segment=inputs.segment_ids[token],
            slot=inputs.slots[token],
            position=inputs.positions[token],
            length=inputs.lengths[token],
            layer=inputs.layer[0],
        )

    def load_entries(self, i: jax.Array | int) -> jax.Array:
        """Entry numbers of tile i of this split; arbitrary in a window tile."""
        s, cta = self.shapes, self.cta
        first = (cta.split + i * s.splits - s.window_tiles) * TILE
        # Tiles of the window and those beyond the last one load some entries that there are, and
        # nobody uses them.
        first = jnp.clip(first, 0, max(s.num_entries - TILE, 0))
        selected = self.inputs.selected.at[cta.token, pl.ds(first, TILE)]
        return plgpu.load(selected, layout=mosaic.ROW, optimized=False)

    def load_blocks(self, entry: jax.Array) -> jax.Array:
        """Physical blocks of entries; 0 where there is no table row to look at."""
        s, segment = self.shapes, self.segment
        logical = lax.div(jnp.maximum(entry, 0), s.entries_per_block)
        inside = (entry >= 0) & (logical < s.table_width) & (segment >= 0)
        where = jnp.where(inside, segment * s.table_width + logical, -1)
        return mosaic_memory.load_indexed_words([self.inputs.table], where * 0, where, word=0)

    def locate(
        self, i: jax.Array | int, entry: jax.Array, block: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Source (ring, call, pool) and row of each key of tile i of this split; -1 is none."""
        s, cta = self.shapes, self.cta
        tile = cta.split + i * s.splits
        steps = tile * TILE + self.place
        # Keys of a window tile: the position of each, the oldest first.
        p = self.position - (s.window - 1) + steps
        # Tokens of this call are read from its own rows, since the ring keeps the last of them
        # alone.
        in_call = p >= self.length
        ring_row = (self.layer * s.num_slots + self.slot) * s.window
        ring_row = ring_row + lax.rem(jnp.maximum(p, 0), s.window)
        window_row = jnp.where(in_call, cta.token - (self.position - p), ring_row)
        in_window = (p >= 0) & (steps < s.window) & (self.slot >= 0)
        window_row = jnp.where(in_window, window_row, -1)

        entry_row = (self.layer * s.num_blocks + block) * s.entries_per_block
        entry_row = entry_row + lax.rem(jnp.maximum(entry, 0), s.entries_per_block)
        stored = (entry >= 0) & (entry < s.table_width * s.entries_per_block)
        entry_row = jnp.where(stored & (block >= 0) & (self.segment >= 0), entry_row, -1)

        window_tile = tile < s.window_tiles
        source = jnp.where(window_tile, in_call.astype(jnp.int32), 2)
        index = jnp.where(window_tile, window_row, entry_row)
        # The tile after the last one is asked for as well, and has no keys.
        return source, jnp.where(i < cta.num_tiles, index, -1)


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
    s, num_tiles = shapes, cta.num_tiles
    chunks_per_part = len(chunks) // len(keys_ready)
    addresses = _Addresses.of(inputs, shapes, cta)
    sources = {
        name: [inputs.ring[name], inputs.rows[name], inputs.pool[name]] for name, _ in s.planes
    }

    def store_tile(i: jax.Array, ahead: _Ahead) -> _Ahead:
        """Stores tile i, whose rows are in registers, and has the rows of tile i + 1 loaded."""
        stage = lax.rem(i, 2)
        source, next_index = addresses.locate(i + 1, ahead.entry, ahead.block)
        # What is loaded last in an iteration is waited for first in the next.
        mosaic_memory.prefetch_rows(list(sources.values()), source, next_index)
        next_scales = s.fetch_scales(sources, source, next_index, chunks)

        @pl.when(i >= 2)
        def _() -> None:
            plgpu.barrier_wait(keys_free.at[stage])  # until the products with tile i - 2 are done

        if bias_smem is not None:
            bias = jnp.where(ahead.row_number == -1, -jnp.inf, 0.0).astype(jnp.float32)
            store_shared(bias_smem.at[stage], bias, mosaic.ROW)
        next_rows = []
        for chunk, rows in zip(chunks, ahead.rows, strict=True):
            half, start = divmod(chunk * GROUP, s.dim // 2)
            target = target_of(stage, half).at[:, pl.ds(start, GROUP)]
            # From the layout in which rows are loaded to the swizzle in which products read them.
            store_shared(target, s.decode(rows, ahead.scales, chunk), mosaic.ROWS)
            # Into the registers that have just become free.
            next_rows.append(s.fetch_rows(sources, source, next_index, chunk))
            if len(next_rows) % SECTION == 0 or len(next_rows) == len(chunks):
                plgpu.commit_smem()  # before tensor cores read what threads have stored
            if len(next_rows) % chunks_per_part == 0:
                ready = keys_ready[len(next_rows) // chunks_per_part - 1]
                plgpu.barrier_arrive(ready.at[stage])  # this part is the consumers' now
        later_block = addresses.load_blocks(ahead.later_entry)
        return _Ahead(
            rows=next_rows,
            scales=next_scales,
            row_number=next_index,
            entry=ahead.later_entry,
            block=later_block,
            later_entry=addresses.load_entries(i + 3),
        )

    # Addresses run ahead of rows: entries by three tiles, their blocks by two, rows by one.
    entries = [addresses.load_entries(i) for i in range(3)]
    blocks = [addresses.load_blocks(entry) for entry in entries[:2]]
    source, index = addresses.locate(0, entries[0], blocks[0])
    ahead = _Ahead(
        rows=[s.fetch_rows(sources, source, index, chunk) for chunk in chunks],
        scales=s.fetch_scales(sources, source, index, chunks),
        row_number=index,
        entry=entries[1],
        block=blocks[1],
        later_entry=entries[2],
    )
    lax.fori_loop(0, num_tiles, store_tile, ahead)
    # Each arrival has its wait: those for the last two tiles are here.
    plgpu.barrier_wait(keys_free.at[lax.rem(num_tiles - 1, 2)])

    @pl.when(num_tiles > 1)
    def _():
        plgpu.barrier_wait(keys_free.at[lax.rem(num_tiles, 2)])
