"""How tiles of keys come into shared memory, stages ahead of the products that take them.

One warp of each warpgroup finds and fetches that warpgroup's tiles, by the engine that copies in
bulk (`mosaic_bulk`). A tile's keys lie in pieces, one for each block that it has a part of, and a
lane of the warp sees to each. The blocks of a tile are looked up in the table a turn before its
fetch begins, since a fetch would else wait for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic, mosaic_bulk, mosaic_memory
from pallas_kernels.index_scores.operands import Cta


class Keys(NamedTuple):
    """The keys that a warpgroup scores in a pass, those of one request.

    Attributes:
      segment: their request.
      num_turns: tiles of this warpgroup.
      last_block: the last logical block that is visible.
      first_of_table: the request's first word of the block table.
    """

    segment: jax.Array
    num_turns: jax.Array
    last_block: jax.Array
    first_of_table: jax.Array


@dataclasses.dataclass(frozen=True)
class KeyPipeline:
    """The stages of one warpgroup.

    Attributes:
      cta: the CTA.
      first_tile: i32[], of its run.
      first_of_layer: i32[], row of the layer's first key in device memory.
      offset: i32[32] in `mosaic_bulk.LANES`, first row of each piece of a tile.
      barriers: the warpgroup's own, one a stage.
      fetching: bool[], true in the warp that fetches.
    """

    cta: Cta
    first_tile: jax.Array
    first_of_layer: jax.Array
    offset: jax.Array
    barriers: Any
    fetching: jax.Array

    @classmethod
    def of(cls, cta: Cta) -> KeyPipeline:
        """That of this warpgroup; `start` it before it is waited for."""
        shapes = cta.shapes
        layer = cta.inputs.layer[0]
        lane = plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=mosaic_bulk.LANES)
        return cls(
            cta,
            first_tile=cta.run * cta.tiling.tiles,
            first_of_layer=layer * shapes.num_blocks * shapes.entries_per_block,
            offset=shapes.rows_of_piece * lane,
            barriers=cta.scratch.barriers_smem.at[cta.warpgroup],
            fetching=mosaic_bulk.is_fetching(cta.warpgroup),
        )

    def find_keys(self, number: int) -> Keys:
        """Those of the request of one of the CTA's tokens; none if an earlier token is of it."""
        cta, shapes, tile_m = self.cta, self.cta.shapes, self.cta.shapes.tile_m
        segment, num_visible, is_first = cta.segments[number], jnp.int32(0), True
        for i, token in enumerate(cta.tokens):
            # Of the CTA's tokens of one request the one that sees most decides how many tiles there
            # are; the first of them takes the pass.
            same = cta.segments[i] == segment
            seen = jnp.where(same, jnp.minimum(cta.inputs.visible[token], shapes.num_entries), 0)
            num_visible = jnp.maximum(num_visible, seen)
            is_first = is_first & ~same if i < number else is_first
        num_visible = jnp.where((segment >= 0) & is_first, num_visible, 0)
        # The run of this CTA, cut off behind the last visible entry.
        end = jnp.minimum(
            self.first_tile + cta.tiling.tiles, lax.div(num_visible + tile_m - 1, tile_m)
        )
        warpgroups = cta.tiling.warpgroups
        mine = jnp.maximum(end - self.first_tile - cta.warpgroup, 0)
        last_visible = jnp.maximum(num_visible - 1, 0)
        return Keys(
            segment=segment,
            num_turns=lax.div(mine + warpgroups - 1, warpgroups),
            last_block=mosaic.quotient_and_remainder(last_visible, shapes.entries_per_block)[0],
            first_of_table=jnp.maximum(segment, 0) * shapes.table_width,
        )

    def tile(self, turn: jax.Array | int) -> jax.Array:
        """i32[], the tile that this warpgroup has in a turn; they take them one after another."""
        return self.first_tile + turn * self.cta.tiling.warpgroups + self.cta.warpgroup

    def start(self, keys: Keys, stage: jax.Array) -> jax.Array:
        """Has a pass's first tiles fetched, from a stage on; returns the blocks of the next."""

        def fetch_first() -> jax.Array:
            # These stages are empty: a pass before this one has released all of its own.
            stages = self.cta.tiling.stages
            # All lookups are on their way before the first fetch waits for one.
            blocks = [self._load_blocks(keys, turn) for turn in range(stages + 1)]
            for turn in range(stages):
                self._fetch(keys, turn, blocks[turn], _after(stage, turn, stages))
            return blocks[-1]

        return lax.cond(self.fetching, fetch_first, lambda: self._find(keys, 0)[0])

    def wait(self, stage: jax.Array, parity: jax.Array) -> None:
        """Until the tile of a stage is there; then it is the warpgroup's, to read."""
        mosaic_bulk.wait(self.barriers, stage, parity)

    def release(
        self, keys: Keys, turn: jax.Array, blocks: jax.Array, stage: jax.Array
    ) -> jax.Array:
        """Gives a turn's stage back and has a later tile fetched to it; the blocks of the next.

        Called by a warpgroup when it has read the stage into registers. `blocks` are those of the
        tile that goes there, `stages` turns on.
        """
        # Its three other warps go on at once; the one that fetches waits for them here.
        mosaic_bulk.all_have_read(self.fetching, self.cta.warpgroup)
        later = turn + self.cta.tiling.stages

        def fetch_next() -> jax.Array:
            # The engine owns the stage from here until `wait`.
            self._fetch(keys, later, blocks, stage)
            return self._load_blocks(keys, later + 1)

        return lax.cond(self.fetching, fetch_next, lambda: blocks)

    def _find(self, keys: Keys, turn: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Logical blocks of a tile's pieces, and their first rows in them: i32[32] each.

        Beyond the last visible block, where scores don't matter, the block is that one.
        """
        first = self.tile(turn) * self.cta.shapes.tile_m
        block, row = mosaic.quotient_and_remainder(
            first + self.offset, self.cta.shapes.entries_per_block
        )
        return jnp.minimum(block, keys.last_block), row  # i32[32], a lane a piece

    def _load_blocks(self, keys: Keys, turn: jax.Array | int) -> jax.Array:
        """Physical blocks of a tile's pieces; any where none is visible."""
        block, _ = self._find(keys, turn)
        return mosaic_memory.load_indexed_words(
            [self.cta.inputs.table],
            block * 0,
            keys.first_of_table + block,
            word=0,
            layout=mosaic_bulk.LANES,
            all_present=True,
        )

    def _fetch(
        self, keys: Keys, turn: jax.Array | int, blocks: jax.Array, stage: jax.Array
    ) -> None:
        """Begins to copy a tile's codes and scales, if there is such a tile."""
        cta, shapes = self.cta, self.cta.shapes

        @pl.when(turn < keys.num_turns)
        def _() -> None:
            first = jnp.maximum(blocks, 0) * shapes.entries_per_block  # -1, none, is no address
            mosaic_bulk.fetch(
                [
                    cta.scratch.codes_smem.at[cta.warpgroup, stage],
                    cta.scratch.words_smem.at[cta.warpgroup, stage],
                ],
                [cta.inputs.codes, cta.inputs.scales],
                self.first_of_layer + first + self._find(keys, turn)[1],
                rows_of_piece=shapes.rows_of_piece,
                barriers=self.barriers,
                stage=stage,
                last=shapes.last,
            )


def _after(stage: jax.Array, turns: int, stages: int) -> jax.Array:
    """The stage that so many turns on take."""
    # `turns` is less than `stages`: a subtraction in place of a remainder.
    after = stage + turns
    return jnp.where(after >= stages, after - stages, after)
