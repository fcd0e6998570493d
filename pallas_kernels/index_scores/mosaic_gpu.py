"""Index scores through Mosaic GPU, for Hopper and Blackwell.

One CTA: one query token and a run of its request's entries; its warpgroups take tiles, 64 keys or
on Blackwell 128, in turn, each its own producer and consumer:

    queries, in bulk, to E4M3            -> queries_smem
    codes and scales of a tile, a block's at once, tiles ahead     -> codes_smem, words_smem
    MXFP4 unpacked to E4M3             in registers, on Blackwell -> keys_smem[warpgroup]
    [64 keys, 64 heads] = keys Q^T     FP8 tensor cores, on Blackwell into tensor memory
    score = key scale * sum over heads of weight * relu

Keys are the rows of the product, so that heads add up along a row of registers.

Bytes: 68 per visible key (MXFP4) or 132 (FP8), and 4 per score written. They bound FP8 keys in
large calls; MXFP4 keys keep ALU, tensor cores and issue slots busy together. Sums of the FP8 tensor
core keep some 14 bits below their largest term. It has not run on a Blackwell card. Measurements
and roads not taken: docs/kernels/index_scores.md. Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gpu import left_operand, mosaic, mosaic_bulk, mosaic_memory, unpack_mxfp4
from pallas_kernels.index_scores import quantize_queries
from pallas_kernels.index_scores.tiling import (
    DIM,
    HEADS,
    Shapes,
    TensorCore,
    Tiling,
    choose_core,
    choose_tiling,
    is_mxfp4,
    read_once,
)


class Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs in device memory.

    Attributes:
      queries: f32[T, 64, 128].
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
    """What a CTA has to itself: queries as they come, and quantised; tiles of each warpgroup.

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


def _score_kernel(
    inputs: Operands,
    scores_gmem: Any,
    scratch: Scratch,
    *,
    shapes: Shapes,
    tiling: Tiling,
    core: TensorCore,
):
    s, stages, layouts = shapes, tiling.stages, core.layouts
    num_words = s.num_words(core)
    word_layouts = layouts[-num_words:]
    token, run = lax.axis_index("token"), lax.axis_index("run")
    group = lax.axis_index("warpgroup")

    @pl.when(group == tiling.groups - 1)
    def _load_queries():
        landed = scratch.landed
        plgpu.copy_gmem_to_smem(inputs.queries.at[token], scratch.raw_queries_smem, landed)
        plgpu.copy_gmem_to_smem(inputs.weights.at[token], scratch.raw_weights_smem, landed)

    segment = inputs.segment_ids[token]
    num_visible = jnp.where(segment >= 0, jnp.minimum(inputs.visible[token], s.num_entries), 0)
    layer_number = inputs.layer[0]
    first_tile = run * tiling.tiles
    last_tile = jnp.minimum(
        first_tile + tiling.tiles, lax.div(num_visible + core.tile - 1, core.tile)
    )
    num_turns = lax.div(
        jnp.maximum(last_tile - first_tile - group, 0) + tiling.groups - 1, tiling.groups
    )
    last_visible = jnp.maximum(num_visible - 1, 0)
    last_block = mosaic.quotient_and_remainder(last_visible, s.entries_per_block)[0]
    first_of_table = jnp.maximum(segment, 0) * s.table_width
    first_of_layer = layer_number * s.num_blocks * s.entries_per_block
    piece = s.rows_of_piece(core)
    offset = piece * plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=mosaic_bulk.LANES)
    barriers = scratch.barriers_smem.at[group]
    fetching = mosaic_bulk.is_fetching(group)

    def tile_of(turn):
        return first_tile + turn * tiling.groups + group

    def find(turn):
        """Logical blocks of a tile's pieces, and their first rows in them: i32[32] each.

        Beyond the last visible block, where scores don't matter, the block is that one.
        """
        block, row = mosaic.quotient_and_remainder(
            tile_of(turn) * core.tile + offset, s.entries_per_block
        )
        return jnp.minimum(block, last_block), row

    def load_blocks(turn):
        """Physical blocks of a tile's pieces; any where none is visible."""
        block, _ = find(turn)
        return mosaic_memory.load_indexed_words(
            [inputs.table],
            block * 0,
            first_of_table + block,
            word=0,
            layout=mosaic_bulk.LANES,
            all_present=True,
        )

    def fetch_tile(turn, blocks, slot):
        """Begins to copy a tile's codes and scales, if there is such a tile."""

        @pl.when(turn < num_turns)
        def _():
            first = jnp.maximum(blocks, 0) * s.entries_per_block  # -1, none, is no address
            mosaic_bulk.fetch(
                [scratch.codes_smem.at[group, slot], scratch.words_smem.at[group, slot]],
                [inputs.codes, inputs.scales],
                first_of_layer + first + find(turn)[1],
                rows_of_piece=piece,
                barriers=barriers,
                slot=slot,
                last=s.last,
            )

    def multiply(keys):
        """f32[tile, 64], products of keys and all heads' queries."""
        if not core.has_memory:
            operand = left_operand.from_rows(keys, s.key_layout)
            return mosaic.multiply_registers(operand, scratch.queries_smem)
        keys_smem, ready = scratch.keys_smem.at[group], scratch.products_ready.at[group]
        mosaic_memory.store_shared(keys_smem, keys, s.key_layout)
        plgpu.commit_smem()
        mine = scratch.products_tmem.at[:, pl.ds(group * HEADS, HEADS)]
        plgpu.tcgen05_mma(
            mine,
            keys_smem,
            scratch.queries_smem.transpose((1, 0)),
            ready,
            accumulate=False,
        )
        plgpu.barrier_wait(ready)
        products = plgpu.async_load_tmem(mine, layout=core.layout)
        plgpu.wait_load_tmem()
        return products

    def score_tile(turn, state):
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
            keys = unpack_mxfp4.unpack(rows, words[0], inputs.magnitudes)
            factor = unpack_mxfp4.largest_scale(words[-1]) << 23  # UE8M0, an f32's exponent
        else:
            keys, factor = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn), words[-1]
        products = multiply(keys)
        mosaic_bulk.all_have_read(fetching, group)

        def fetch_next():
            fetch_tile(turn + stages, blocks, slot)
            return load_blocks(turn + stages + 1)

        next_blocks = lax.cond(fetching, fetch_next, lambda: blocks)
        twice_relu = products + jnp.abs(products)  # added, for the maximum's unit has more to do
        score = (twice_relu * head_weights).sum(axis=1)
        if not core.has_memory:
            score = left_operand.to_rows(score)
        score = score * lax.bitcast_convert_type(factor, jnp.float32)
        start = tile_of(turn) * core.tile
        mosaic_memory.store_run(scores_gmem.at[token], start, score, layouts[-1])
        is_last = slot == stages - 1
        return next_blocks, jnp.where(is_last, 0, slot + 1), jnp.where(is_last, 1 - parity, parity)

    def quantize_heads(turn):
        """Some heads' queries into codes, whose scales go into weights; none beyond the last."""
        first = (turn * tiling.groups + group) * quantize_queries.ROWS

        @pl.when(first < HEADS)
        def _():
            heads = pl.ds(first, quantize_queries.ROWS)
            raw = scratch.raw_queries_smem.at[heads], scratch.raw_weights_smem.at[heads]
            query, weight = quantize_queries.quantize(*quantize_queries.load_heads(*raw))
            queries_smem, weights_smem = scratch.queries_smem.at[heads], scratch.weights_smem
            if core.has_memory:
                mosaic_memory.store_shared(queries_smem, query, mosaic.LINES)
            else:
                left_operand.store_columns(queries_smem, query, s.key_layout)
            mosaic_memory.store_shared(
                weights_smem.at[heads], weight * s.factor, quantize_queries.BY_ROW
            )

    def fetch_first_tiles():
        """Returns the blocks of the tile after them."""
        blocks = [load_blocks(turn) for turn in range(stages + 1)]
        for turn in range(stages):
            fetch_tile(turn, blocks[turn], jnp.int32(turn))
        return blocks[-1]

    mosaic_bulk.make_barriers(barriers)
    blocks = lax.cond(fetching, fetch_first_tiles, lambda: find(0)[0])
    plgpu.barrier_wait(scratch.landed)
    for turn in range(-(-HEADS // (quantize_queries.ROWS * tiling.groups))):
        quantize_heads(turn)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.queries_ready)
    plgpu.barrier_wait(scratch.queries_ready)
    head_weights = plgpu.load(scratch.weights_smem, layout=core.layout.reduce(0), optimized=False)
    head_weights = lax.broadcast_in_dim(head_weights, (core.tile, HEADS), [1])
    head_weights = plgpu.layout_cast(head_weights, core.layout)
    start = (blocks, jnp.int32(0), jnp.int32(0))
    lax.fori_loop(0, num_turns, score_tile, start)


def index_scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: LayerPlanes,
    call: CallIndices,
    *,
    tiling: Tiling | None = None,
    core: TensorCore | None = None,
) -> jax.Array:
    """Scores of each token's visible entries.

    Args:
      queries: f32[T, 64, 128], rounded as keys are.
      weights: f32[T, 64].
      pool: planes of MXFP4 or FP8 keys; see `op.index_topk`.
      call: where the queries belong, with `visible`; see `op.index_topk`.
      tiling: how entries are cut; None asks `choose_tiling`.
      core: the tensor core; None asks `choose_core`.

    Returns:
      f32[T, E], E the entries of a table row and those that fill the last tile; arbitrary where not
      visible.
    """
    num_tokens = queries.shape[0]
    codes, scales = pool.planes["codes"], pool.planes["scale"]
    _, num_blocks, entries_per_block = codes.shape[:3]
    num_requests, table_width = call.block_table.shape
    bytes_of_block = sum(math.prod(p.shape[2:]) * p.dtype.itemsize for p in (codes, scales))
    shapes = Shapes(
        entries_per_block=entries_per_block,
        num_blocks=num_blocks,
        table_width=table_width,
        mxfp4=is_mxfp4(pool.codec),
        last=read_once(num_tokens, num_requests, table_width * bytes_of_block),
    )
    core = core or choose_core()
    num_tiles = -(-shapes.num_entries // core.tile)
    tiling = tiling or choose_tiling(num_tokens, num_tiles, shapes.mxfp4, core)
    swizzled = functools.partial(
        plgpu.SMEM, dtype=jnp.float8_e4m3fn, transforms=mosaic.SWIZZLED_BYTES
    )
    per_group = tiling.groups, tiling.stages
    scratch = Scratch(
        raw_queries_smem=plgpu.SMEM((HEADS, DIM), jnp.float32),
        raw_weights_smem=plgpu.SMEM((HEADS,), jnp.float32),
        landed=plgpu.Barrier(num_arrivals=2),
        queries_smem=swizzled((HEADS, DIM)),
        weights_smem=plgpu.SMEM((HEADS,), jnp.float32),
        queries_ready=plgpu.Barrier(num_arrivals=tiling.groups),
        codes_smem=plgpu.SMEM((*per_group, core.tile, shapes.width), jnp.uint8),
        words_smem=plgpu.SMEM((*per_group, core.tile), jnp.int32),
        barriers_smem=plgpu.SMEM(
            (tiling.groups, mosaic_bulk.WORDS_OF_BARRIER * tiling.stages), jnp.int32
        ),
    )
    if core.has_memory:
        scratch = scratch._replace(
            keys_smem=swizzled((tiling.groups, core.tile, DIM)),
            products_tmem=plgpu.TMEM((core.tile, tiling.groups * HEADS), jnp.float32),
            products_ready=plgpu.Barrier(num_barriers=tiling.groups, orders_tensor_core=True),
        )

    def score_kernel(inputs: Operands, scores_gmem: Any, scratch: Scratch) -> None:
        _score_kernel(inputs, scores_gmem, scratch, shapes=shapes, tiling=tiling, core=core)

    return plgpu.kernel(
        score_kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens, num_tiles * core.tile), jnp.float32),
        grid=(num_tokens, -(-num_tiles // tiling.tiles)),
        grid_names=("token", "run"),
        num_threads=tiling.groups,
        thread_name="warpgroup",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        Operands(
            queries=queries,
            weights=weights,
            table=call.block_table.reshape(-1, 1),
            segment_ids=call.segment_ids,
            visible=call.visible,
            layer=pool.layer[None],
            codes=codes.reshape(-1, codes.shape[-1]),
            scales=scales.reshape(math.prod(scales.shape[:3]), -1),
            magnitudes=jnp.asarray(unpack_mxfp4.magnitude_bytes()),
        )
    )
