"""A CTA's part of a product, as one of its warpgroups sees it: what is where.

Here are addresses alone, which stage a k_iter takes and which tile of which weight a consumer has;
`producer` fills stages, and `mosaic_hopper`, `mosaic_hopper_rows` and `mosaic_blackwell` multiply.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.gpu import left_operand, mosaic, unpack_mxfp4
from pallas_kernels.product.call_shapes import Shapes
from pallas_kernels.product.operands import Operands
from pallas_kernels.product.scratch import Scratch
from pallas_kernels.product.tile_scheduler import Tile
from pallas_kernels.product.tiling import CONSUMERS, GROUP_K, WARPGROUP_N, Tiling
from pallas_kernels.product.work_list import PickedItems

plgpu: Any = mosaic_gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One CTA's part of a product, as one of its warpgroups sees it.

    Attributes:
      inputs: arrays in device memory.
      scratch: what the CTA has to itself.
      shapes: sizes of the call.
      tiling: how it is cut.
      most_rows: rows that a tile has at most.
      warpgroup: i32[]; 0 and 1 are consumers, 2 is the producer.
      tile: what it works on.
      k_iters_before: i32[], k_iters of the tiles that the CTA has gone through; None where it has
        one.
    """

    inputs: Operands
    scratch: Scratch
    shapes: Shapes
    tiling: Tiling
    most_rows: int
    warpgroup: jax.Array
    tile: Tile
    k_iters_before: jax.Array | None = None

    @classmethod
    def of(
        cls,
        inputs: Operands,
        scratch: Scratch,
        shapes: Shapes,
        tiling: Tiling,
        most_rows: int,
        tile: Tile,
        k_iters_before: jax.Array | None = None,
    ) -> Work:
        """That of this warpgroup for a tile."""
        return cls(
            inputs=inputs,
            scratch=scratch,
            shapes=shapes,
            tiling=tiling,
            most_rows=most_rows,
            warpgroup=lax.axis_index("warpgroup"),
            tile=tile,
            k_iters_before=k_iters_before,
        )

    @property
    def k_iters(self) -> int:
        """Stages that pass through shared memory for the tile."""
        return self.shapes.k_iters(self.tiling)

    @property
    def groups_of_stage(self) -> int:
        """Groups of inputs of a stage."""
        return self.shapes.groups_of_stage(self.tiling)

    def since_launch(self, k_iter: jax.Array) -> jax.Array:
        """A k_iter of the tile, counted from the CTA's first one on."""
        return k_iter if self.k_iters_before is None else self.k_iters_before + k_iter

    def stage_of(self, k_iter: jax.Array) -> jax.Array:
        """The stage in shared memory that a k_iter takes."""
        return mosaic.quotient_and_remainder(self.since_launch(k_iter), self.tiling.stages)[1]

    def group_of(self, k_iter: int | jax.Array, g: int = 0) -> jax.Array:
        """Number of a group of inputs, the g-th of a k_iter."""
        groups = self.groups_of_stage
        return self.tile.split * (self.k_iters * groups) + k_iter * groups + g

    @property
    def last_warpgroup_tile(self) -> int:
        """Number of the last tile of `WARPGROUP_N` outputs."""
        return self.shapes.num_warpgroup_tiles - 1

    def warpgroup_tile(self, consumer: int | jax.Array) -> jax.Array:
        """The outputs of a consumer, in units of `WARPGROUP_N`; the last ones again beyond them.

        Of gate and up both consumers have the same ones.
        """
        if self.shapes.is_gated:
            return self.tile.n_index
        return jnp.minimum(self.tile.n_index * CONSUMERS + consumer, self.last_warpgroup_tile)

    def tiles_of_weights(self, consumer: int | jax.Array) -> list[tuple[Any, jax.Array]]:
        """For each weight whether it has the consumer's tile, and that tile in it or any other."""
        tile, tiles, first_tile = self.warpgroup_tile(consumer), [], 0
        if self.shapes.is_gated:
            return [(consumer == which, tile) for which in range(len(self.shapes.warpgroup_tiles))]
        for count in self.shapes.warpgroup_tiles:
            inside = tile - first_tile
            # A tile that another weight has is clipped to one that this weight has, so that its
            # address is valid whether or not it is read.
            owns = (inside >= 0) & (inside < count)
            tiles.append((owns, jnp.clip(inside, 0, count - 1)))
            first_tile += count
        return tiles

    def codes_of(self, stage: jax.Array, consumer: int | jax.Array, g: int) -> Any:
        """A consumer's tile of the weights in shared memory, [64, group_k].

        On Blackwell both consumers' are one operand of 128 rows, where they need no unpacking.
        """
        # Rows 0 .. 63 and 64 .. 127 of one operand.
        if self.shapes.joins_tiles:
            rows = pl.ds(consumer * WARPGROUP_N, WARPGROUP_N)
            return self.scratch.codes_smem.at[stage, g, rows]
        return self.scratch.codes_smem.at[stage, consumer, g]

    def rows_of(self, k_iter: jax.Array, g: int, term: int) -> Any:
        """A term of x in shared memory, e4m3 or bf16[tile_m, group_k]."""
        if self.shapes.rounds_rows:  # all groups are there at once, outside the stages
            return self.scratch.rows_smem.at[k_iter * self.groups_of_stage + g, term]
        return self.scratch.rows_smem.at[self.stage_of(k_iter), term, g]

    def row_scales(self, k_iter: jax.Array, g: int, term: int, first: Any, count: int) -> Any:
        """Scales of some rows of a term of x, f32[count] in shared memory."""
        run = pl.ds(first, count)
        if self.shapes.rounds_rows:
            return self.scratch.scales_smem.at[k_iter * self.groups_of_stage + g, term, run]
        return self.scratch.scales_smem.at[self.stage_of(k_iter), term, g, run]

    def scale_of_tile(self, consumer: int | jax.Array, group: jax.Array) -> jax.Array:
        """f32[]: block FP8's, of 128 outputs; to be asked for a k_iter ahead."""
        # It is asked for a k_iter ahead: behind the last group it is that one's again, and not
        # used.
        group = jnp.minimum(group, self.shapes.k_groups - 1)
        scale = jnp.float32(0)
        tiles = self.tiles_of_weights(consumer)
        for scales, (owns, tile) in zip(self.inputs.scales, tiles, strict=True):
            if owns is False:
                continue
            value = scales[self.tile.weight, lax.div(tile, GROUP_K // WARPGROUP_N), group]
            if value.dtype != jnp.float32:  # UE8M0: the exponent's bits
                value = lax.bitcast_convert_type(value.astype(jnp.int32) << 23, jnp.float32)
            scale = value if len(tiles) == 1 or owns is True else jnp.where(owns, value, scale)
        return scale

    def unpack(self, stage: jax.Array, g: int) -> tuple[jax.Array, jax.Array]:
        """The warpgroup's tile of MXFP4 as an operand, in `left_operand`'s order.

        Returns:
          e4m3[64, 128] in `WGMMA_8BIT` layout; f32[64] in `WGMMA.reduce(1)`, factor of each row.
        """
        codes = self.codes_of(stage, self.warpgroup, g)
        loaded = plgpu.load(codes, layout=mosaic.EVEN_ROWS, optimized=False)  # u8[64, 64]
        words = plgpu.load(  # i32[64]
            self.scratch.words_smem.at[stage, self.warpgroup, g],
            layout=mosaic.ROW,
            optimized=False,
        )
        largest = unpack_mxfp4.largest_scale_of_pairs(words)
        unpacked = unpack_mxfp4.unpack(loaded, words, self.inputs.magnitudes, largest)
        # EVEN_ROWS loads neighbouring bytes in neighbouring lanes; the operand takes the same bytes
        # under other row and column numbers, so that nothing moves between threads.
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
        # A thread has loaded the shares of the rows of x that it has of `gate`: nothing moves.
        return gate * plgpu.layout_cast(share, layout)
