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
from pallas_kernels.sparse_attention.stored_rows import StoredRows

_Locate = Callable[..., tuple[jax.Array, jax.Array]]
SECTION = 2
"""Chunks whose next rows are fetched together, as soon as they are stored: the barrier after them
keeps the compiler from putting off loads to the end of a tile, where nothing would hide them."""


class _Form(NamedTuple):
    """Where some rows lie, and how.

    Attributes:
      rows: how they are stored.
      sources: the refs of each plane, by its name.
    """

    rows: StoredRows
    sources: Mapping[str, list[Ref]]


class _Start(NamedTuple):
    """Where the first tile of a loop lies, and what is known of those after it.

    Attributes:
      place: source and row of each of its keys.
      entry, block: as in `_Ahead`.
    """

    place: tuple[jax.Array, jax.Array]
    entry: jax.Array
    block: jax.Array


class _Rows(NamedTuple):
    """Rows of a tile that is not stored yet.

    Attributes:
      chunks: a chunk of columns each.
      scales: words of scales, by plane and number.
      number: i32[64], of those rows in their sources; -1 for no key.
    """

    chunks: list[jax.Array]
    scales: Mapping[str, jax.Array]
    number: jax.Array


class _Ahead(NamedTuple):
    """What the producer has of tiles that are not stored yet, when it begins with tile i.

    Attributes:
      rows: of tile i.
      entry: i32[64], entries of tile i + 1.
      block: i32[64], their blocks.
      later_entry: i32[64], entries of tile i + 2.
    """

    rows: _Rows
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
      layer, entry_layer: i32[], of ring and pool.
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
    entry_layer: jax.Array

    @classmethod
    def of(cls, inputs: Operands, shapes: Shapes, cta: Place) -> _Addresses:
        """Those of the CTA's token."""
        tile, token = (TILE, GROUP), cta.token
        layer = inputs.layer[0]
        return cls(
            inputs,
            shapes,
            cta,
            place=plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=mosaic.ROWS).max(axis=1),
            segment=inputs.segment_ids[token],
            slot=inputs.slots[token],
            position=inputs.positions[token],
            length=inputs.lengths[token],
            layer=layer,
            entry_layer=layer if inputs.entry_layer is None else inputs.entry_layer[0],
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
        in_call, window_row = self.locate_window(i)
        window_tile = self.cta.split + i * self.shapes.splits < self.shapes.window_tiles
        source = jnp.where(window_tile, in_call, 2)
        index = jnp.where(window_tile, window_row, self._row_of(entry, block))
        # The tile after the last one is asked for as well, and has no keys.
        return source, jnp.where(i < self.cta.num_tiles, index, -1)

    def locate_window(self, i: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Source (ring, call) and row of each key of tile i, and -1 beyond the window."""
        s, cta = self.shapes, self.cta
        steps = (cta.split + i * s.splits) * TILE + self.place
        # Keys of a window tile: the position of each, the oldest first.
        p = self.position - (s.window - 1) + steps
        # Tokens of this call are read from its own rows, since the ring keeps the last of them
        # alone.
        in_call = p >= self.length
        ring_row = (self.layer * s.num_slots + self.slot) * s.window
        ring_row = ring_row + lax.rem(jnp.maximum(p, 0), s.window)
        window_row = jnp.where(in_call, cta.token - (self.position - p), ring_row)
        in_window = (p >= 0) & (steps < s.window) & (self.slot >= 0)
        return in_call.astype(jnp.int32), jnp.where(in_window, window_row, -1)

    def locate_entries(
        self, i: jax.Array | int, entry: jax.Array, block: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Source, the pool alone, and row of each key of tile i, one of entries."""
        row = self._row_of(entry, block)
        return row * 0, jnp.where(i < self.cta.num_tiles, row, -1)

    def _row_of(self, entry: jax.Array, block: jax.Array) -> jax.Array:
        """Row of each entry in the pool; -1 is none."""
        s = self.shapes
        entry_row = (self.entry_layer * s.num_blocks + block) * s.entries_per_block
        entry_row = entry_row + lax.rem(jnp.maximum(entry, 0), s.entries_per_block)
        stored = (entry >= 0) & (entry < s.table_width * s.entries_per_block)
        return jnp.where(stored & (block >= 0) & (self.segment >= 0), entry_row, -1)


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
    num_tiles = cta.num_tiles
    chunks_per_part = len(chunks) // len(keys_ready)
    addresses = _Addresses.of(inputs, shapes, cta)

    def fetch(form: _Form, place: tuple[jax.Array, jax.Array]) -> _Rows:
        found = [form.rows.fetch_rows(form.sources, *place, chunk) for chunk in chunks]
        return _Rows(found, form.rows.fetch_scales(form.sources, *place, chunks), place[1])

    def store_tile(
        i: jax.Array, form: _Form, rows: _Rows, next_place: tuple[jax.Array, jax.Array]
    ) -> _Rows:
        """Stores tile i, whose rows are in registers, and has those of the next place loaded."""
        stage = lax.rem(i, 2)
        source, next_index = next_place
        # What is loaded last in an iteration is waited for first in the next.
        mosaic_memory.prefetch_rows(list(form.sources.values()), source, next_index)
        next_scales = form.rows.fetch_scales(form.sources, source, next_index, chunks)

        @pl.when(i >= 2)
        def _() -> None:
            plgpu.barrier_wait(keys_free.at[stage])  # until the products with tile i - 2 are done

        if bias_smem is not None:
            bias = jnp.where(rows.number == -1, -jnp.inf, 0.0).astype(jnp.float32)
            store_shared(bias_smem.at[stage], bias, mosaic.ROW)
        next_chunks = []
        for chunk, stored in zip(chunks, rows.chunks, strict=True):
            half, start = divmod(chunk * GROUP, shapes.dim // 2)
            target = target_of(stage, half).at[:, pl.ds(start, GROUP)]
            # From the layout in which rows are loaded to the swizzle in which products read them.
            store_shared(target, form.rows.decode(stored, rows.scales, chunk), mosaic.ROWS)
            # Into the registers that have just become free.
            next_chunks.append(form.rows.fetch_rows(form.sources, source, next_index, chunk))
            if len(next_chunks) % SECTION == 0 or len(next_chunks) == len(chunks):
                plgpu.commit_smem()  # before tensor cores read what threads have stored
            if len(next_chunks) % chunks_per_part == 0:
                ready = keys_ready[len(next_chunks) // chunks_per_part - 1]
                plgpu.barrier_arrive(ready.at[stage])  # this part is the consumers' now
        return _Rows(next_chunks, next_scales, next_index)

    def store_entries(form: _Form, locate: _Locate) -> Callable[[jax.Array, _Ahead], _Ahead]:
        """A turn that stores a tile whose next one may be of entries."""

        def turn(i: jax.Array, ahead: _Ahead) -> _Ahead:
            rows = store_tile(i, form, ahead.rows, locate(i + 1, ahead.entry, ahead.block))
            later_block = addresses.load_blocks(ahead.later_entry)
            later_entry = addresses.load_entries(i + 3)
            return _Ahead(rows, ahead.later_entry, later_block, later_entry)

        return turn

    def start(first: jax.Array | int, locate: _Locate) -> _Start:
        """Addresses of a first tile and of those after it."""
        # Addresses run ahead of rows: entries by three tiles, their blocks by two, rows by one.
        entries = [addresses.load_entries(first + n) for n in range(2)]
        blocks = [addresses.load_blocks(entry) for entry in entries]
        return _Start(locate(first, entries[0], blocks[0]), entries[1], blocks[1])

    def store_last(first: jax.Array | int, form: _Form, locate: _Locate, started: _Start) -> None:
        """Stores tiles from `first` on, which are the last ones."""
        later_entry = addresses.load_entries(first + 2)
        rows = fetch(form, started.place)
        ahead = _Ahead(rows, started.entry, started.block, later_entry)
        lax.fori_loop(first, num_tiles, store_entries(form, locate), ahead)

    ring, rows, pool = ({name: [ref] for name, ref in p.items()} for p in inputs[-3:])
    if inputs.entry_layer is None:
        sources = {name: ring[name] + rows[name] + pool[name] for name in ring}
        form, locate = _Form(shapes.window_form, sources), addresses.locate
        store_last(0, form, locate, start(0, locate))
    else:
        window = _Form(shapes.window_form, {name: ring[name] + rows[name] for name in ring})
        entries = _Form(shapes.entry_form, pool)

        def store_window(i: jax.Array, rows: _Rows) -> _Rows:
            return store_tile(i, window, rows, addresses.locate_window(i + 1))

        end = shapes.window_tiles_of(cta.split)
        first_rows = fetch(window, addresses.locate_window(0))
        # Their registers are the window's until its last tile is stored; they wait in L2.
        started = start(end, addresses.locate_entries)
        mosaic_memory.prefetch_rows(list(pool.values()), *started.place)
        lax.fori_loop(0, end, store_window, first_rows)
        store_last(end, entries, addresses.locate_entries, started)
    # Each arrival has its wait: those for the last two tiles are here.
    plgpu.barrier_wait(keys_free.at[lax.rem(num_tiles - 1, 2)])

    @pl.when(num_tiles > 1)
    def _():
        # Of the tile before the last, in the other stage.
        plgpu.barrier_wait(keys_free.at[lax.rem(num_tiles, 2)])
