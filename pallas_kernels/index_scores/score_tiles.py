"""What a CTA of the index scores does; see `mosaic_gpu`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import left_operand, mosaic, mosaic_bulk, mosaic_memory, unpack_mxfp4
from pallas_kernels.index_scores import quantize_queries
from pallas_kernels.index_scores.tiling import HEADS, Shapes, TensorCore, Tiling

_KEPT_WEIGHTS = 2
"""Tokens whose weights of heads a thread has room for."""


class Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs in device memory.

    Attributes:
      queries: bf16[T, 64, 128].
      weights: f32[T, 64].
      table: i32[B LB, 1].
      segment_ids: i32[T].
      visible: i32[T].
      layer: i32[1].
      codes: [rows, n], codes of keys.
      scales: [rows, n], their scales.
      magnitudes: i32[20, 2], the table of `unpack_mxfp4`.
    """

    queries: Any
    weights: Any
    table: Any
    segment_ids: Any
    visible: Any
    layer: Any
    codes: Any
    scales: Any
    magnitudes: Any


class Scratch(NamedTuple):
    """What a CTA has to itself: its tokens' queries as they come, and quantised; warpgroups' tiles.

    The last three are Blackwell's.
    """

    raw_queries_smem: Any
    raw_weights_smem: Any
    landed: Any
    queries_smem: Any
    weights_smem: Any
    queries_ready: Any
    codes_smem: Any
    words_smem: Any
    barriers_smem: Any
    keys_smem: Any = None
    products_tmem: Any = None
    products_ready: Any = None


def score_tiles(
    inputs: Operands,
    scores_gmem: Any,
    scratch: Scratch,
    *,
    shapes: Shapes,
    tiling: Tiling,
    core: TensorCore,
):
    """Scores a run of the entries that the CTA's tokens see, into f32[T, E]."""
    s, stages, layouts = shapes, tiling.stages, core.layouts
    num_words = s.num_words(core)
    word_layouts = layouts[-num_words:]
    run, group = lax.axis_index("run"), lax.axis_index("warpgroup")
    # Beyond the last token it is that one again, which stores the same scores.
    tokens = [
        jnp.minimum(lax.axis_index("token") * tiling.tokens + i, s.num_tokens - 1)
        for i in range(tiling.tokens)
    ]
    segments = [inputs.segment_ids[token] for token in tokens]

    @pl.when(group == tiling.groups - 1)
    def _load_queries():
        for i, token in enumerate(tokens):
            raw = scratch.raw_queries_smem.at[i], scratch.raw_weights_smem.at[i]
            plgpu.copy_gmem_to_smem(inputs.queries.at[token], raw[0], scratch.landed)
            plgpu.copy_gmem_to_smem(inputs.weights.at[token], raw[1], scratch.landed)

    layer_number = inputs.layer[0]
    first_tile = run * tiling.tiles
    first_of_layer = layer_number * s.num_blocks * s.entries_per_block
    piece = s.rows_of_piece(core)
    offset = piece * plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=mosaic_bulk.LANES)
    barriers = scratch.barriers_smem.at[group]
    fetching = mosaic_bulk.is_fetching(group)

    def tile_of(turn):
        return first_tile + turn * tiling.groups + group

    def find(turn, of):
        """Logical blocks of a tile's pieces, and their first rows in them: i32[32] each.

        Beyond the last visible block, where scores don't matter, the block is that one.
        """
        block, row = mosaic.quotient_and_remainder(
            tile_of(turn) * core.tile + offset, s.entries_per_block
        )
        return jnp.minimum(block, of.last_block), row

    def load_blocks(turn, of):
        """Physical blocks of a tile's pieces; any where none is visible."""
        block, _ = find(turn, of)
        return mosaic_memory.load_indexed_words(
            [inputs.table],
            block * 0,
            of.first_of_table + block,
            word=0,
            layout=mosaic_bulk.LANES,
            all_present=True,
        )

    def fetch_tile(turn, blocks, slot, of):
        """Begins to copy a tile's codes and scales, if there is such a tile."""

        @pl.when(turn < of.num_turns)
        def _():
            first = jnp.maximum(blocks, 0) * s.entries_per_block  # -1, none, is no address
            mosaic_bulk.fetch(
                [scratch.codes_smem.at[group, slot], scratch.words_smem.at[group, slot]],
                [inputs.codes, inputs.scales],
                first_of_layer + first + find(turn, of)[1],
                rows_of_piece=piece,
                barriers=barriers,
                slot=slot,
                last=s.last,
            )

    def prepare(keys):
        """Keys as the left operand of products."""
        if not core.has_memory:
            return left_operand.from_rows(keys, s.key_layout)
        keys_smem = scratch.keys_smem.at[group]
        mosaic_memory.store_shared(keys_smem, keys, s.key_layout)
        plgpu.commit_smem()
        return keys_smem

    def multiply(operand, queries_smem):
        """f32[tile, 64], products of keys and all heads' queries."""
        if not core.has_memory:
            return mosaic.multiply_registers(operand, queries_smem)
        ready = scratch.products_ready.at[group]
        mine = scratch.products_tmem.at[:, pl.ds(group * HEADS, HEADS)]
        plgpu.tcgen05_mma(mine, operand, queries_smem.transpose((1, 0)), ready, accumulate=False)
        plgpu.barrier_wait(ready)
        products = plgpu.async_load_tmem(mine, layout=core.layout)
        plgpu.wait_load_tmem()
        return products

    def load_weights(i):
        weights = plgpu.load(
            scratch.weights_smem.at[i], layout=core.layout.reduce(0), optimized=False
        )
        weights = lax.broadcast_in_dim(weights, (core.tile, HEADS), [1])
        return plgpu.layout_cast(weights, core.layout)

    def add_heads(products, weights, factor):
        twice_relu = products + jnp.abs(products)  # added, for the maximum's unit has more to do
        score = (twice_relu * weights).sum(axis=1)
        if not core.has_memory:
            score = left_operand.to_rows(score)
        return score * lax.bitcast_convert_type(factor, jnp.float32)

    def score_tile(turn, state, of):
        """Scores a tile, and has the one `stages` turns on fetched to where it was."""
        blocks, slot, parity = state
        mosaic_bulk.wait(barriers, slot, parity)
        codes = scratch.codes_smem.at[group, slot]
        rows = plgpu.load(codes, layout=mosaic.EVEN_ROWS, optimized=False)
        words = [
            plgpu.load(scratch.words_smem.at[group, slot], layout=layout, optimized=False)
            for layout in word_layouts
        ]
        if s.mxfp4:
            largest = unpack_mxfp4.largest_scale_of_rows(words[0])
            keys = unpack_mxfp4.unpack(rows, words[0], inputs.magnitudes, largest)
            if num_words > 1:
                largest = unpack_mxfp4.largest_scale(words[-1])
            factor = largest << 23  # UE8M0, an f32's exponent
        else:
            keys, factor = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn), words[-1]
        operand = prepare(keys)
        products = multiply(operand, scratch.queries_smem.at[0])
        mosaic_bulk.all_have_read(fetching, group)

        def fetch_next():
            fetch_tile(turn + stages, blocks, slot, of)
            return load_blocks(turn + stages + 1, of)

        next_blocks = lax.cond(fetching, fetch_next, lambda: blocks)
        start = tile_of(turn) * core.tile
        for i, token in enumerate(tokens):
            if i:
                products = multiply(operand, scratch.queries_smem.at[i])
            weights = kept_weights[i] if kept_weights else load_weights(i)
            score = add_heads(products, weights, factor)
            store = functools.partial(
                mosaic_memory.store_run, scores_gmem.at[token], start, score, layouts[-1]
            )
            if len(tokens) == 1:
                store()
            else:
                pl.when(segments[i] == of.segment)(store)
        is_last = slot == stages - 1
        return next_blocks, jnp.where(is_last, 0, slot + 1), jnp.where(is_last, 1 - parity, parity)

    def quantize_heads(turn):
        """Some heads' queries into codes, whose scales go into weights; none beyond the last."""
        first = (turn * tiling.groups + group) * quantize_queries.ROWS

        @pl.when(first < tiling.tokens * HEADS)
        def _():
            i, head = mosaic.quotient_and_remainder(first, HEADS)
            heads = pl.ds(head, quantize_queries.ROWS)
            raw = scratch.raw_queries_smem.at[i, heads], scratch.raw_weights_smem.at[i, heads]
            query, weight = quantize_queries.quantize(*quantize_queries.load_heads(*raw))
            queries_smem = scratch.queries_smem.at[i, heads]
            if core.has_memory:
                mosaic_memory.store_shared(queries_smem, query, mosaic.LINES)
            else:
                left_operand.store_columns(queries_smem, query, s.key_layout)
            mosaic_memory.store_shared(
                scratch.weights_smem.at[i, heads], weight * s.factor, quantize_queries.BY_ROW
            )

    def fetch_first_tiles(slot, of):
        """Returns the blocks of the tile after them."""
        blocks = [load_blocks(turn, of) for turn in range(stages + 1)]
        for turn in range(stages):
            fetch_tile(turn, blocks[turn], _later(slot, turn, stages), of)
        return blocks[-1]

    def start_of(slot, of):
        return lax.cond(fetching, lambda: fetch_first_tiles(slot, of), lambda: find(0, of)[0])

    def keys_of(number):
        """Of the request of one of the tokens, by its number; none if an earlier one is of it."""
        segment, num_visible, is_first = segments[number], jnp.int32(0), True
        for i, token in enumerate(tokens):
            same = segments[i] == segment
            seen = jnp.where(same, jnp.minimum(inputs.visible[token], s.num_entries), 0)
            num_visible = jnp.maximum(num_visible, seen)
            is_first = is_first & ~same if i < number else is_first
        return _Keys.of(
            jnp.where((segment >= 0) & is_first, num_visible, 0),
            segment,
            first_tile,
            group,
            s,
            tiling,
            core,
        )

    mosaic_bulk.make_barriers(barriers)
    of = keys_of(0)
    blocks = start_of(jnp.int32(0), of)
    plgpu.barrier_wait(scratch.landed)
    for turn in range(-(-tiling.tokens * HEADS // (quantize_queries.ROWS * tiling.groups))):
        quantize_heads(turn)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.queries_ready)
    plgpu.barrier_wait(scratch.queries_ready)
    kept = tiling.tokens <= _KEPT_WEIGHTS
    kept_weights = [load_weights(i) for i in range(tiling.tokens)] if kept else []
    state = blocks, jnp.int32(0), jnp.int32(0)
    state = lax.fori_loop(0, of.num_turns, functools.partial(score_tile, of=of), state)
    for number in range(1, tiling.tokens):
        of = keys_of(number)

        def run_pass(slot, parity, of=of):
            state = start_of(slot, of), slot, parity
            return lax.fori_loop(0, of.num_turns, functools.partial(score_tile, of=of), state)[1:]

        _, slot, parity = state
        # No other request among the tokens, which is what most of a prompt's are: no pass.
        slot, parity = lax.cond(of.num_turns > 0, run_pass, lambda *state: state, slot, parity)
        state = blocks, slot, parity


class _Keys(NamedTuple):
    """The keys that a warpgroup scores in a pass.

    Attributes:
      segment: their request.
      num_turns: tiles.
      last_block: the last logical block that is visible.
      first_of_table: the request's first word of the block table.
    """

    segment: jax.Array
    num_turns: jax.Array
    last_block: jax.Array
    first_of_table: jax.Array

    @classmethod
    def of(
        cls,
        num_visible: jax.Array,
        segment: jax.Array,
        first_tile: jax.Array,
        group: jax.Array,
        shapes: Shapes,
        tiling: Tiling,
        core: TensorCore,
    ) -> _Keys:
        """Those of the first visible entries of a request, from a tile on."""
        last_tile = jnp.minimum(
            first_tile + tiling.tiles, lax.div(num_visible + core.tile - 1, core.tile)
        )
        mine = jnp.maximum(last_tile - first_tile - group, 0)
        last_visible = jnp.maximum(num_visible - 1, 0)
        return cls(
            segment,
            lax.div(mine + tiling.groups - 1, tiling.groups),
            mosaic.quotient_and_remainder(last_visible, shapes.entries_per_block)[0],
            jnp.maximum(segment, 0) * shapes.table_width,
        )


def _later(slot: jax.Array, turns: int, stages: int) -> jax.Array:
    """The slot that so many turns on take."""
    later = slot + turns
    return jnp.where(later >= stages, later - stages, later)
