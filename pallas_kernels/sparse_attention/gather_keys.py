"""How keys come through registers into shared memory, for both kinds of GPU.

A key lies in the ring, among the call's own rows or in the pool.
"""

from __future__ import annotations

import dataclasses
import functools
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

    def begin(self, first: jax.Array | int, locate: _Locate) -> _Start:
        """Addresses of a first tile and of those after it."""
        # Addresses run ahead of rows: entries by three tiles, their blocks by two, rows by one.
        entries = [self.load_entries(first + n) for n in range(2)]
        blocks = [self.load_blocks(entry) for entry in entries]
        return _Start(locate(first, entries[0], blocks[0]), entries[1], blocks[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Producer:
    """The warpgroup that brings keys, and what it works with.

    Attributes:
      addresses: where keys lie.
      shapes: sizes of the call.
      num_tiles: i32[], tiles of the split.
      chunks: as of `gather_keys`, and the fields after it.
    """

    addresses: _Addresses
    shapes: Shapes
    num_tiles: jax.Array
    chunks: Sequence[int]
    target_of: Callable[[jax.Array, int], Ref]
    bias_smem: Ref | None
    keys_ready: Sequence[Ref]
    keys_free: Ref
    store_shared: Callable[[Ref, jax.Array, Any], None]

    def fetch(self, form: _Form, place: tuple[jax.Array, jax.Array]) -> _Rows:
        """Loads the rows of a tile into registers."""
        found = [form.rows.fetch_rows(form.sources, *place, chunk) for chunk in self.chunks]
        return _Rows(found, form.rows.fetch_scales(form.sources, *place, self.chunks), place[1])

    def store_tile(
        self, i: jax.Array, form: _Form, rows: _Rows, next_place: tuple[jax.Array, jax.Array]
    ) -> _Rows:
        """Stores tile i, whose rows are in registers, and has those of the next place loaded."""
        stage = lax.rem(i, 2)
        source, next_index = next_place
        # What is loaded last in an iteration is waited for first in the next.
        mosaic_memory.prefetch_rows(list(form.sources.values()), source, next_index)
        next_scales = form.rows.fetch_scales(form.sources, source, next_index, self.chunks)

        @pl.when(i >= 2)
        def _() -> None:
            # Until the products with tile i - 2 are done: the stage is the producer's again.
            plgpu.barrier_wait(self.keys_free.at[stage])

        self._store_bias(stage, rows.number)
        next_chunks = []
        for chunk, stored in zip(self.chunks, rows.chunks, strict=True):
            half, start = divmod(chunk * GROUP, self.shapes.dim // 2)
            target = self.target_of(stage, half).at[:, pl.ds(start, GROUP)]
            # From the layout in which rows are loaded to the swizzle in which products read them.
            self.store_shared(target, form.rows.decode(stored, rows.scales, chunk), mosaic.ROWS)
            # Into the registers that have just become free.
            next_chunks.append(form.rows.fetch_rows(form.sources, source, next_index, chunk))
            self._release(stage, len(next_chunks))
        return _Rows(next_chunks, next_scales, next_index)

    def _store_bias(self, stage: jax.Array, number: jax.Array) -> None:
        """What is added to the logits of a tile's keys, minus infinity where there is none."""
        if self.bias_smem is not None:
            bias = jnp.where(number == -1, -jnp.inf, 0.0).astype(jnp.float32)
            self.store_shared(self.bias_smem.at[stage], bias, mosaic.ROW)

    def _release(self, stage: jax.Array, num_stored: int) -> None:
        """Hands a part of a tile to the consumers once as many chunks as it has are stored."""
        if num_stored % SECTION == 0 or num_stored == len(self.chunks):
            plgpu.commit_smem()  # before tensor cores read what threads have stored
        chunks_per_part = len(self.chunks) // len(self.keys_ready)
        if num_stored % chunks_per_part == 0:
            ready = self.keys_ready[num_stored // chunks_per_part - 1]
            plgpu.barrier_arrive(ready.at[stage])  # this part is the consumers' now

    def store_window(self, i: jax.Array, rows: _Rows, *, form: _Form) -> _Rows:
        """A turn that stores a tile of the window whose next one is of the window too."""
        return self.store_tile(i, form, rows, self.addresses.locate_window(i + 1))

    def store_entries(self, i: jax.Array, ahead: _Ahead, *, form: _Form, locate: _Locate) -> _Ahead:
        """A turn that stores a tile whose next one may be of entries."""
        rows = self.store_tile(i, form, ahead.rows, locate(i + 1, ahead.entry, ahead.block))
        later_block = self.addresses.load_blocks(ahead.later_entry)
        later_entry = self.addresses.load_entries(i + 3)
        return _Ahead(rows, ahead.later_entry, later_block, later_entry)

    def store_last(
        self, first: jax.Array | int, form: _Form, locate: _Locate, started: _Start
    ) -> None:
        """Stores tiles from `first` on, which are the last ones."""
        later_entry = self.addresses.load_entries(first + 2)
        rows = self.fetch(form, started.place)
        ahead = _Ahead(rows, started.entry, started.block, later_entry)
        store_entries = functools.partial(self.store_entries, form=form, locate=locate)
        lax.fori_loop(first, self.num_tiles, store_entries, ahead)

    def await_last(self) -> None:
        """Waits until the last two tiles are multiplied, so that each arrival has its wait."""
        plgpu.barrier_wait(self.keys_free.at[lax.rem(self.num_tiles - 1, 2)])  # the last one's

        @pl.when(self.num_tiles > 1)
        def _() -> None:
            # Of the tile before the last, in the other stage.
            plgpu.barrier_wait(self.keys_free.at[lax.rem(self.num_tiles, 2)])


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
    producer = _Producer(
        addresses=_Addresses.of(inputs, shapes, cta),
        shapes=shapes,
        num_tiles=cta.num_tiles,
        chunks=chunks,
        target_of=target_of,
        bias_smem=bias_smem,
        keys_ready=keys_ready,
        keys_free=keys_free,
        store_shared=store_shared,
    )
    ring, rows, pool = ({name: [ref] for name, ref in p.items()} for p in inputs[-3:])
    if inputs.entry_layer is None:
        sources = {name: ring[name] + rows[name] + pool[name] for name in ring}
        _bring_all(producer, _Form(shapes.window_form, sources))
    else:
        window = _Form(shapes.window_form, {name: ring[name] + rows[name] for name in ring})
        end = shapes.window_tiles_of(cta.split)
        _bring_apart(producer, window, _Form(shapes.entry_form, pool), end)
    producer.await_last()


def _bring_all(producer: _Producer, form: _Form) -> None:
    """Keys of the window and entries in one loop: both are stored in one form."""
    locate = producer.addresses.locate
    producer.store_last(0, form, locate, producer.addresses.begin(0, locate))


def _bring_apart(producer: _Producer, window: _Form, entries: _Form, end: jax.Array | int) -> None:
    """Keys of the window, tiles 0 .. end - 1 of the split, then entries, of another form."""
    addresses = producer.addresses
    first_rows = producer.fetch(window, addresses.locate_window(0))
    # Their registers are the window's until its last tile is stored; they wait in L2.
    started = addresses.begin(end, addresses.locate_entries)
    mosaic_memory.prefetch_rows(list(entries.sources.values()), *started.place)
    store_window = functools.partial(producer.store_window, form=window)
    lax.fori_loop(0, end, store_window, first_rows)
    producer.store_last(end, entries, addresses.locate_entries, started)
