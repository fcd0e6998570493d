"""Index scores through Mosaic GPU, for Hopper and Blackwell.

One program: one query token and a run of its request's entries; its warpgroups take tiles, 64 keys
or on Blackwell 128, in turn, each by itself:

    queries, in bulk, to E4M3            -> queries_smem
    codes and scales of a tile, a block's at once, tiles ahead     -> codes_smem, words_smem
    MXFP4 unpacked to E4M3             in registers, on Blackwell -> keys_smem[warpgroup]
    [64 keys, 64 heads] = keys Q^T     FP8 tensor cores, on Blackwell into tensor memory
    score = key scale * sum over heads of weight * relu

Keys are the rows of the product, so that heads add up along a row of registers.

Bytes: 68 per visible key (MXFP4) or 132 (FP8), and 4 per score written. FP8 keys in large calls are
bound by them. MXFP4 keys take 410 cycles a tile, and no unit is busy for as much as half of them:
of an H200's cycles the ALU works in 45 %, the tensor core in 30 %, and 56 % issue an instruction
(ncu). A warp spends 30 % of its time at the tensor core: 18 % before it may multiply, 12 % until it
has; one product more of a tile costs all the cycles it multiplies. The card draws 690 W and is down
to 1.65 GHz; keys of zeros take 7 % less. Sums of the FP8 tensor core keep some 14 bits below their
largest term. Has not run on a Blackwell card.

64 requests of 65,536 MXFP4 keys took 121 to 131 us in five runs. In one, without unpacking they
would take 107; of a quarter of the keys, 34, 30, and adding up heads then costs nothing. Beside it
in one run each: unpacking the next tile while this one is multiplied, with five warpgroups, 125 to
131; two tiles a product 134; weights of heads read for each tile to make room for seven warpgroups
or eight, 133 and 170. 124 on another card where each thread copied its own part of a tile
(cp.async); 115 where relus were rounded to f16 and `mma` added up heads, 4 %, and nothing in calls
of up to 2^19 keys, for scores that are less exact. Blocks of 64 entries take up to 3 % less than of
32, the cache's. Five warpgroups take 34.6 where six take 33.8 (64 x 16,384). A tile asked for while
this one is multiplied: 17.5 where it takes 17.2 (8 x 65,536), 33.9 where 34.1 (64 x 16,384). A
group's magnitudes by arithmetic in place of a table: 17.6 where 17.0 (8 x 65,536), 11.0 where 10.6
(64 x 4,096).

A line of memory serves one reader after the other. When each warp loaded its heads' weights, 64
loads of a program, 1 x 262,144 keys took 12.9 us (FP8 12.3): 128 programs want the same line. In
bulk, one request of a program, they take 10.3 (9.6). Without queries and weights it would be 10.2
(9.3); queries of a quarter of the bytes gained nothing. That call, and 64 x 4,096 too, would take
3.5 to 4.1 if nothing were scored, and 1.5 to 1.8 if its programs did nothing: small calls as well
are bound by the tiles, 32 of each program. Four warpgroups, which share 32 evenly, take 0 to 4 %
more, and with three or four tiles of each up to 7 %; three take 15 to 19 %. FP8 rows are 128 bytes,
of which four lanes load 64, so that neighbouring rows want the same banks. With half a row between
the halves of a tile they don't: 9.5 where it takes 9.7 (64 x 4,096), 42.6 where 42.3, 151.6 where
150.6 (64 x 16,384 and 65,536).

FP8 keys of 64 x 65,536 take 149 to 156 us: their bytes alone take 0.85 to 0.9 of it. In one run
each: blocks in order 151 where 154, and if all scales came from one place, 147; blocks of 64
entries 155; of 128, with scales of one place, 153. Programs of a half, a quarter, an eighth of the
tiles 155, 154, 158 where 156; 8 x 262,144 keys then take 79, 81, 84 where 78. Two or three programs
of a core, with three warpgroups or two each, 159 to 183; MXFP4 keys so 149 to 172 where 131.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.gpu import mosaic, mosaic_bulk, mosaic_memory
from pallas_kernels.index_scores import left_operand, quantize_queries, unpack_mxfp4
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


def _score_kernel(
    queries,
    weights,
    table,
    request_ids,
    visible,
    layer,
    codes,
    scales,
    magnitudes,
    scores,
    raw_queries_smem,
    raw_weights_smem,
    landed,
    queries_smem,
    weights_smem,
    queries_ready,
    codes_smem,
    words_smem,
    barriers_smem,
    *operands_in_memory,
    shapes: Shapes,
    tiling: Tiling,
    core: TensorCore,
):
    s, stages, layouts = shapes, tiling.stages, core.layouts
    num_words = s.num_words(core)
    word_layouts = layouts[-num_words:]
    token, program = lax.axis_index("token"), lax.axis_index("program")
    group = lax.axis_index("warpgroup")

    @pl.when(group == tiling.groups - 1)
    def _load_queries():
        plgpu.copy_gmem_to_smem(queries.at[token], raw_queries_smem, landed)
        plgpu.copy_gmem_to_smem(weights.at[token], raw_weights_smem, landed)

    request = request_ids[token]
    num_visible = jnp.where(request >= 0, jnp.minimum(visible[token], s.num_entries), 0)
    layer_number = layer[0]
    first_tile = program * tiling.tiles
    last_tile = jnp.minimum(
        first_tile + tiling.tiles, lax.div(num_visible + core.tile - 1, core.tile)
    )
    num_turns = lax.div(
        jnp.maximum(last_tile - first_tile - group, 0) + tiling.groups - 1, tiling.groups
    )
    last_visible = jnp.maximum(num_visible - 1, 0)
    last_block = mosaic.divide(last_visible, s.entries_per_block)[0]
    first_of_table = jnp.maximum(request, 0) * s.table_width
    first_of_layer = layer_number * s.num_blocks * s.entries_per_block
    piece = s.rows_of_piece(core)
    offset = piece * plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=mosaic_bulk.LANES)
    barriers = barriers_smem.at[group]
    fetching = mosaic_bulk.is_fetching(group)

    def tile_of(turn):
        return first_tile + turn * tiling.groups + group

    def find(turn):
        """Logical blocks of a tile's pieces, and their first rows in them: i32[32] each.

        Beyond the last visible block, where scores don't matter, the block is that one.
        """
        block, row = mosaic.divide(tile_of(turn) * core.tile + offset, s.entries_per_block)
        return jnp.minimum(block, last_block), row

    def load_blocks(turn):
        """Physical blocks of a tile's pieces; any where none is visible."""
        block, _ = find(turn)
        return mosaic_memory.gather_words(
            [table],
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
                [codes_smem.at[group, slot], words_smem.at[group, slot]],
                [codes, scales],
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
            return mosaic.multiply_registers(operand, queries_smem)
        keys_smem, products_tmem, products_ready = operands_in_memory
        mosaic_memory.store(keys_smem.at[group], keys, s.key_layout)
        plgpu.commit_smem()
        mine = products_tmem.at[:, pl.ds(group * HEADS, HEADS)]
        plgpu.tcgen05_mma(
            mine,
            keys_smem.at[group],
            queries_smem.transpose((1, 0)),
            products_ready.at[group],
            accumulate=False,
        )
        plgpu.barrier_wait(products_ready.at[group])
        products = plgpu.async_load_tmem(mine, layout=core.layout)
        plgpu.wait_load_tmem()
        return products

    def score_tile(turn, state):
        """Scores a tile, and has the one `stages` turns on fetched to where it was."""
        blocks, slot, parity = state
        mosaic_bulk.wait(barriers, slot, parity)
        rows = plgpu.load(codes_smem.at[group, slot], layout=mosaic.EVEN_ROWS, optimized=False)
        words = [
            plgpu.load(words_smem.at[group, slot], layout=layout, optimized=False)
            for layout in word_layouts
        ]
        if s.mxfp4:
            keys = unpack_mxfp4.unpack(rows, words[0], magnitudes)
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
        mosaic_memory.store_run(scores.at[token], tile_of(turn) * core.tile, score, layouts[-1])
        is_last = slot == stages - 1
        return next_blocks, jnp.where(is_last, 0, slot + 1), jnp.where(is_last, 1 - parity, parity)

    def quantize_heads(turn):
        """Some heads' queries into codes, whose scales go into weights; none beyond the last."""
        first = (turn * tiling.groups + group) * quantize_queries.ROWS

        @pl.when(first < HEADS)
        def _():
            heads = pl.ds(first, quantize_queries.ROWS)
            query, weight = quantize_queries.quantize(
                *quantize_queries.load(raw_queries_smem.at[heads], raw_weights_smem.at[heads])
            )
            if core.has_memory:
                mosaic_memory.store(queries_smem.at[heads], query, mosaic.LINES)
            else:
                left_operand.store_columns(queries_smem.at[heads], query, s.key_layout)
            mosaic_memory.store(weights_smem.at[heads], weight * s.factor, quantize_queries.BY_ROW)

    def fetch_first_tiles():
        """Returns the blocks of the tile after them."""
        blocks = [load_blocks(turn) for turn in range(stages + 1)]
        for turn in range(stages):
            fetch_tile(turn, blocks[turn], jnp.int32(turn))
        return blocks[-1]

    mosaic_bulk.make_barriers(barriers)
    blocks = lax.cond(fetching, fetch_first_tiles, lambda: find(0)[0])
    plgpu.barrier_wait(landed)
    for turn in range(-(-HEADS // (quantize_queries.ROWS * tiling.groups))):
        quantize_heads(turn)
    plgpu.commit_smem()
    plgpu.barrier_arrive(queries_ready)
    plgpu.barrier_wait(queries_ready)
    head_weights = plgpu.load(weights_smem, layout=core.layout.reduce(0), optimized=False)
    head_weights = lax.broadcast_in_dim(head_weights, (core.tile, HEADS), [1])
    head_weights = plgpu.layout_cast(head_weights, core.layout)
    start = (blocks, jnp.int32(0), jnp.int32(0))
    lax.fori_loop(0, num_turns, score_tile, start)


def index_scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: Planes,
    block_table: jax.Array,
    *,
    request_ids: jax.Array,
    visible: jax.Array,
    layer: jax.Array,
    codec: Codec,
    tiling: Tiling | None = None,
    core: TensorCore | None = None,
) -> jax.Array:
    """Scores of each token's visible entries.

    Args:
      queries: f32[T, 64, 128], rounded as keys are.
      weights: f32[T, 64].
      pool: as in `op.index_topk`, and so are the others.
      block_table: i32[B, LB].
      request_ids: i32[T].
      visible: i32[T].
      layer: i32[].
      codec: of MXFP4 or FP8 keys.
      tiling: by default that of `choose_tiling`.
      core: by default `choose_core()`.

    Returns:
      f32[T, E], E the entries of a table row and those that fill the last tile; arbitrary where not
      visible.
    """
    num_tokens = queries.shape[0]
    _, num_blocks, entries_per_block = pool["codes"].shape[:3]
    num_requests, table_width = block_table.shape
    bytes_of_block = sum(math.prod(p.shape[2:]) * p.dtype.itemsize for p in pool.values())
    shapes = Shapes(
        entries_per_block=entries_per_block,
        num_blocks=num_blocks,
        table_width=table_width,
        mxfp4=is_mxfp4(codec),
        last=read_once(num_tokens, num_requests, table_width * bytes_of_block),
    )
    core = core or choose_core()
    num_tiles = -(-shapes.num_entries // core.tile)
    tiling = tiling or choose_tiling(num_tokens, num_tiles, shapes.mxfp4, core)
    swizzled = functools.partial(
        plgpu.SMEM, dtype=jnp.float8_e4m3fn, transforms=mosaic.SWIZZLED_BYTES
    )

    operands_in_memory = (
        [
            swizzled((tiling.groups, core.tile, DIM)),
            plgpu.TMEM((core.tile, tiling.groups * HEADS), jnp.float32),
            plgpu.Barrier(num_barriers=tiling.groups, orders_tensor_core=True),
        ]
        if core.has_memory
        else []
    )

    def score_kernel(*refs):
        _score_kernel(*refs, shapes=shapes, tiling=tiling, core=core)

    return plgpu.kernel(
        score_kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens, num_tiles * core.tile), jnp.float32),
        grid=(num_tokens, -(-num_tiles // tiling.tiles)),
        grid_names=("token", "program"),
        num_threads=tiling.groups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((HEADS, DIM), jnp.float32),
            plgpu.SMEM((HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            swizzled((HEADS, DIM)),
            plgpu.SMEM((HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=tiling.groups),
            plgpu.SMEM((tiling.groups, tiling.stages, core.tile, shapes.width), jnp.uint8),
            plgpu.SMEM((tiling.groups, tiling.stages, core.tile), jnp.int32),
            plgpu.SMEM((tiling.groups, mosaic_bulk.WORDS_OF_BARRIER * tiling.stages), jnp.int32),
            *operands_in_memory,
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        queries,
        weights,
        block_table.reshape(-1, 1),
        request_ids,
        visible,
        layer[None],
        pool["codes"].reshape(-1, pool["codes"].shape[-1]),
        pool["scale"].reshape(math.prod(pool["scale"].shape[:3]), -1),
        jnp.asarray(unpack_mxfp4.magnitude_bytes()),
    )
