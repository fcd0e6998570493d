"""What a CTA of a product has to do: its rows, its tiles of weights, and its stages.

A producer's warpgroup brings in codes and scales of a stage, of weights and of x, in bulk:

    codes_smem     weights as they lie, two tiles of 64 outputs; see `Work.codes_of`
    words_smem     MXFP4's scales, four in a word
    rows_smem      x, each part of it
    scales_smem    scales of x

`mosaic_hopper` and `mosaic_blackwell` multiply.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import INPUTS, ROWS
from pallas_kernels.gpu import left_operand, mosaic, unpack_mxfp4
from pallas_kernels.product.call_shapes import CONSUMERS, Shapes, Tiling, scale_columns
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.round_rows import round_rows
from pallas_kernels.product.tile_scheduler import Tile
from pallas_kernels.product.triton_rows import Rows
from pallas_kernels.product.work_list import Items, PickedItems

plgpu: Any = mosaic_gpu


class Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs in device memory.

    Attributes:
      items: see `Items` and `PickedItems`; None where they follow from their number.
      rows: see `triton_rows.Rows`, or `raw_rows.RawRows`.
      codes: of each weight.
      scales: of each weight; none of dense ones.
      magnitudes: i32[20, 2], the table of `unpack_mxfp4`.
      share: f32[R], factor of each row after SwiGLU, or None; of each item of `PickedItems`.
    """

    items: Items | PickedItems | None
    rows: Rows | RawRows
    codes: Any
    scales: Any
    magnitudes: Any
    share: Any


class Scratch(NamedTuple):
    """Stages in shared memory, their barriers, and what gate and up exchange.

    Rows that are rounded here are all there before the first stage, and `rows_ready` is theirs.
    `up_read` is there where what gate and up exchange takes the same memory more than once. The
    last six are Blackwell's; the first two of those are MXFP4's.
    """

    codes_smem: Any
    words_smem: Any
    rows_smem: Any
    scales_smem: Any
    ready: Any
    free: Any
    up_smem: Any
    up_ready: Any
    rows_ready: Any = None
    up_read: Any = None
    unpacked_smem: Any = None
    factors_smem: Any = None
    unpacked: Any = None
    products_tmem: Any = None
    products_ready: Any = None
    products_read: Any = None


class SwiGLU(NamedTuple):
    """What follows a gate and an up projection.

    Attributes:
      limit: see `expert_mlp`.
      dtype: to which both are rounded before.
    """

    limit: float
    dtype: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One CTA's part of a product, as one of its warpgroups sees it.

    Attributes:
      inputs: arrays in device memory.
      scratch: what the CTA has to itself.
      shapes: sizes of the call.
      tiling: how it is cut.
      group: i32[], the warpgroup.
      most_rows: rows that a tile has at most.
      tile: what it works on.
      turns_before: i32[], stages of the tiles that the CTA has gone through; None where it has one.
    """

    inputs: Operands
    scratch: Scratch
    shapes: Shapes
    tiling: Tiling
    most_rows: int
    group: jax.Array
    tile: Tile
    turns_before: jax.Array | None = None

    @classmethod
    def of(
        cls,
        inputs: Operands,
        scratch: Scratch,
        shapes: Shapes,
        tiling: Tiling,
        most_rows: int,
        tile: Tile,
        turns_before: jax.Array | None = None,
    ) -> Work:
        """That of this warpgroup for a tile."""
        return cls(
            inputs=inputs,
            scratch=scratch,
            shapes=shapes,
            tiling=tiling,
            most_rows=most_rows,
            group=lax.axis_index("warpgroup"),
            tile=tile,
            turns_before=turns_before,
        )

    @property
    def turns(self) -> int:
        """Stages that pass through shared memory."""
        return self.shapes.turns(self.tiling)

    def slot_of(self, turn: jax.Array) -> jax.Array:
        """The stage in shared memory that a turn takes."""
        turn = turn if self.turns_before is None else self.turns_before + turn
        return mosaic.quotient_and_remainder(turn, self.tiling.stages)[1]

    def block_of(self, turn: int | jax.Array, b: int = 0) -> jax.Array:
        """Number of a stage's group of inputs."""
        return self.tile.split * (self.turns * self.tiling.blocks) + turn * self.tiling.blocks + b

    @property
    def last_tile(self) -> int:
        """Number of the last tile of 64 outputs."""
        return self.shapes.num_tiles - 1

    def tile_of(self, consumer: int | jax.Array) -> jax.Array:
        """The 64 outputs of a consumer; the last ones again beyond the last."""
        if self.shapes.is_gated:
            return self.tile.place
        return jnp.minimum(self.tile.place * CONSUMERS + consumer, self.last_tile)

    def tiles_of_weights(self, consumer: int | jax.Array) -> list[tuple[Any, jax.Array]]:
        """For each weight whether it has the consumer's tile, and that tile in it or any other."""
        tile, found, first_tile = self.tile_of(consumer), [], 0
        if self.shapes.is_gated:
            return [(consumer == which, tile) for which in range(len(self.shapes.tiles))]
        for count in self.shapes.tiles:
            inside = tile - first_tile
            owns = (inside >= 0) & (inside < count)
            found.append((owns, jnp.clip(inside, 0, count - 1)))
            first_tile += count
        return found

    def codes_of(self, slot: jax.Array, consumer: int | jax.Array, b: int) -> Any:
        """A consumer's tile in shared memory.

        On Blackwell both consumers' are one operand of 128 rows, where they need no unpacking.
        """
        if self.shapes.joins_tiles:
            return self.scratch.codes_smem.at[slot, b, pl.ds(consumer * ROWS, ROWS)]
        return self.scratch.codes_smem.at[slot, consumer, b]

    def rows_of(self, turn: jax.Array, b: int, part: int) -> Any:
        """A part of x in shared memory, e4m3 or bf16[columns, inputs]."""
        if self.shapes.rounds_rows:
            return self.scratch.rows_smem.at[turn * self.tiling.blocks + b, part]
        return self.scratch.rows_smem.at[self.slot_of(turn), part, b]

    def row_scales(self, turn: jax.Array, b: int, part: int, first: Any, count: int) -> Any:
        """Scales of some rows of a part of x, in shared memory."""
        run = pl.ds(first, count)
        if self.shapes.rounds_rows:
            return self.scratch.scales_smem.at[turn * self.tiling.blocks + b, part, run]
        return self.scratch.scales_smem.at[self.slot_of(turn), part, b, run]

    def await_rows(self) -> None:
        """Rounds the rows of x where the kernel does that, and waits until all are there."""
        if not self.shapes.rounds_rows:
            return
        assert isinstance(self.inputs.rows, RawRows)
        round_rows(self, self.inputs.rows)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch.rows_ready)
        plgpu.barrier_wait(self.scratch.rows_ready)

    def produce(self) -> None:
        """Fills stage after stage."""
        s, tiling, scratch, inputs = self.shapes, self.tiling, self.scratch, self.inputs

        def fetch_weight(which: int, tile: Any, block: Any, slot: Any, consumer: int) -> None:
            codes, ready = inputs.codes[which], scratch.ready.at[slot]
            if s.is_mxfp4:  # a stage lies together: copied as one, not by rows of 64 bytes
                run = self.tile.weight, tile, pl.ds(block, tiling.blocks)
                together = functools.partial(
                    plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                )
                together(codes.at[run], scratch.codes_smem.at[slot, consumer], ready)
                target = scratch.words_smem.at[slot, consumer]
                together(inputs.scales[which].at[run], target, ready)
                return
            for b in range(tiling.blocks):
                inner = pl.ds((block + b) * s.inputs, s.inputs)
                source = codes.at[self.tile.weight, pl.ds(tile * ROWS, ROWS), inner]
                plgpu.copy_gmem_to_smem(source, self.codes_of(slot, consumer, b), ready)

        def fetch(turn: jax.Array, _: None) -> None:
            slot = self.slot_of(turn)
            turns = turn if self.turns_before is None else self.turns_before + turn

            @pl.when(turns >= tiling.stages)
            def _():
                plgpu.barrier_wait(scratch.free.at[slot])

            ready, block = scratch.ready.at[slot], self.block_of(turn)
            for consumer in range(CONSUMERS):
                for which, (owns, tile) in enumerate(self.tiles_of_weights(consumer)):
                    copy = functools.partial(fetch_weight, which, tile, block, slot, consumer)
                    if len(s.tiles) == 1 or owns is True:
                        copy()
                    elif owns is not False:
                        pl.when(owns)(copy)
            if s.rounds_rows:
                return
            assert isinstance(inputs.rows, Rows)
            for part in range(s.num_parts):
                for b in range(tiling.blocks):
                    inner = pl.ds((block + b) * s.inputs, s.inputs)
                    source = inputs.rows.codes.at[
                        part, pl.ds(self.tile.first, tiling.columns), inner
                    ]
                    target = scratch.rows_smem.at[slot, part, b]
                    plgpu.copy_gmem_to_smem(source, target, ready)
                if inputs.rows.scale is None:
                    continue
                width = pl.ds(self.tile.first, scale_columns(tiling.columns))
                source = inputs.rows.scale.at[part, pl.ds(block, tiling.blocks), width]
                plgpu.copy_gmem_to_smem(source, scratch.scales_smem.at[slot, part], ready)

        lax.fori_loop(0, self.turns, fetch, None)
        if self.turns_before is None and interpreting():
            self.await_free(self.turns)

    def await_free(self, turns: int | jax.Array) -> None:
        """Waits, as the producer, until what so many turns brought in was read.

        The interpreter, in jax 0.11, wants every completion of a barrier seen.
        """
        for slot in range(self.tiling.stages):
            wait = functools.partial(plgpu.barrier_wait, self.scratch.free.at[slot])
            if isinstance(turns, int):
                if slot < turns:
                    wait()
            else:
                pl.when(slot < turns)(wait)

    def scale_of_tile(self, consumer: int | jax.Array, block: jax.Array) -> jax.Array:
        """f32[]: block FP8's, of 128 outputs; to be asked for a turn ahead."""
        block = jnp.minimum(block, self.shapes.num_blocks - 1)
        found = jnp.float32(0)
        tiles = self.tiles_of_weights(consumer)
        for scales, (owns, tile) in zip(self.inputs.scales, tiles, strict=True):
            if owns is False:
                continue
            value = scales[self.tile.weight, lax.div(tile, INPUTS // ROWS), block]
            if value.dtype != jnp.float32:
                value = lax.bitcast_convert_type(value.astype(jnp.int32) << 23, jnp.float32)
            found = value if len(tiles) == 1 or owns is True else jnp.where(owns, value, found)
        return found

    def unpack(self, slot: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
        """The warpgroup's tile of MXFP4 as an operand, in `left_operand`'s order.

        Returns:
          e4m3[64, 128] in `WGMMA_8BIT` layout; f32[64] in `WGMMA.reduce(1)`, factor of each row.
        """
        codes = self.codes_of(slot, self.group, b)
        loaded = plgpu.load(codes, layout=mosaic.EVEN_ROWS, optimized=False)
        words = plgpu.load(
            self.scratch.words_smem.at[slot, self.group, b], layout=mosaic.ROW, optimized=False
        )
        largest = unpack_mxfp4.largest_scale_of_pairs(words)
        unpacked = unpack_mxfp4.unpack(loaded, words, self.inputs.magnitudes, largest)
        operand = left_operand.from_rows(unpacked, mosaic.WIDE_ROWS)
        factor = lax.bitcast_convert_type(largest << 23, jnp.float32)
        return operand, left_operand.to_operand(factor * (1 / unpack_mxfp4.HEADROOM))

    def activate(
        self, gate: jax.Array, limit: float, first: Any, layout: Any, *, axis: int = 1
    ) -> jax.Array:
        """What multiplies the up projection: share * silu(gate).

        Args:
          gate: f32[M, N].
          limit: see `expert_mlp`.
          first: row of x that the first one of the axis is.
          layout: that of `gate`.
          axis: along which rows of x lie.
        """
        gate = jnp.minimum(gate, limit)
        gate = gate / (1 + jnp.exp(-gate))
        if self.inputs.share is None:
            return gate
        if isinstance(self.inputs.items, PickedItems):
            return gate * self.inputs.share[self.tile.target_row]
        share = plgpu.load(
            self.inputs.share.at[pl.ds(first, gate.shape[axis])],
            layout=layout.reduce(1 - axis),
            optimized=False,
        )
        share = lax.broadcast_in_dim(share, gate.shape, [axis])
        return gate * plgpu.layout_cast(share, layout)
