"""Index scores through Mosaic GPU, for Hopper and Blackwell.

One program: one query token and a run of its request's entries; its warpgroups take tiles, 64 keys
or on Blackwell 128, in turn, each by itself:

    queries to E4M3, by the first two    -> queries_smem
    blocks of a tile, then its keys into shared memory, some tiles ahead, from there to registers;
    MXFP4 unpacked to E4M3             in registers, on Blackwell -> keys_smem[warpgroup]
    [64 keys, 64 heads] = keys Q^T     FP8 tensor cores, on Blackwell into tensor memory
    score = key scale * sum over heads of weight * relu

Keys are the rows of the product, so that heads add up along a row of registers.

Bytes: 68 per visible key (MXFP4) or 132 (FP8), and 4 per score written. FP8 keys in large calls are
bound by them. MXFP4 keys are bound by what a tile costs a thread, some 200 instructions, and by its
product, while which the registers' ports are taken: of an H200's cycles 58 % issue an instruction
and 30 % multiply, and 16 % of a warp's time is a stall of the dispatch. Sums of the FP8 tensor
core keep some 14 bits below their largest term. Has not run on a Blackwell card.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic, mosaic_memory
from pallas_kernels.formats import Codec, Planes
from pallas_kernels.index_topk import left_operand, query_mosaic, unpack_mosaic
from pallas_kernels.index_topk.scores_tiling import (
    DIM,
    HEADS,
    TensorCore,
    Tiling,
    choose_core,
    choose_tiling,
    is_mxfp4,
)


def _key_layout(mxfp4: bool) -> Any:
    return mosaic.WIDE_ROWS if mxfp4 else mosaic.EVEN_ROWS


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Static sizes of a call.

    Attributes:
      entries_per_block: EB.
      num_blocks: NB.
      table_width: LB.
      mxfp4: whether keys are; else FP8.
    """

    entries_per_block: int
    num_blocks: int
    table_width: int
    mxfp4: bool

    @property
    def key_layout(self) -> Any:
        """In which a thread has a tile's keys, as E4M3 codes."""
        return _key_layout(self.mxfp4)

    @property
    def num_entries(self) -> int:
        return self.table_width * self.entries_per_block

    @property
    def width(self) -> int:
        """Bytes of a key's codes."""
        return DIM // 2 if self.mxfp4 else DIM

    def num_words(self, core: TensorCore) -> int:
        """Layouts in which a key's scales are wanted: to unpack it, and to scale its sum."""
        return len(core.layouts) if self.mxfp4 else 1

    @property
    def factor(self) -> float:
        """Of weights: the norm of scores, half of relu's sum, and what unpacked keys are over."""
        return 0.5 * (HEADS * DIM) ** -0.5 / (unpack_mosaic.HEADROOM if self.mxfp4 else 1.0)


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
    queries_smem,
    weights_smem,
    queries_ready,
    fetched_smem,
    *operands_in_memory,
    shapes: _Shapes,
    tiling: Tiling,
    core: TensorCore,
):
    s, stages, layouts = shapes, tiling.stages, core.layouts
    num_words = s.num_words(core)
    word_layouts = layouts[-num_words:]
    token, program = lax.axis_index("token"), lax.axis_index("program")
    group = lax.axis_index("warpgroup")
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
    places = [
        plgpu.broadcasted_iota(jnp.int32, (core.tile,), 0, layout=layout) for layout in layouts
    ]
    last_visible = jnp.maximum(num_visible - 1, 0)
    last_block = mosaic.divide(last_visible, s.entries_per_block)[0]
    first_of_table = jnp.maximum(request, 0) * s.table_width
    first_of_layer = layer_number * s.num_blocks * s.entries_per_block

    def tile_of(turn):
        return first_tile + turn * tiling.groups + group

    def place_of_codes(slot):
        return fetched_smem.at[group, slot, pl.ds(0, core.tile * s.width)]

    def place_of_words(slot, number):
        start = core.tile * s.width + number * mosaic_memory.FETCHED_WORDS
        return fetched_smem.at[group, slot, pl.ds(start, mosaic_memory.FETCHED_WORDS)]

    def find(turn, place):
        """Logical block of a tile's entries, and their row in it.

        Beyond the last visible block, where scores don't matter, the block is that one.
        """
        if core.tile % s.entries_per_block == 0:  # so that the row is the same in every tile
            block, row = mosaic.divide(place, s.entries_per_block)
            block = block + tile_of(turn) * (core.tile // s.entries_per_block)
        else:
            block, row = mosaic.divide(tile_of(turn) * core.tile + place, s.entries_per_block)
        return jnp.minimum(block, last_block), row

    def load_blocks(turn):
        """Physical blocks of a tile's entries, in each layout; any where none is visible."""
        logical = [find(turn, place)[0] for place in places]
        return [
            mosaic_memory.gather_words(
                [table],
                block * 0,
                block,
                word=0,
                layout=layout,
                all_present=True,
                within=block * 0 + first_of_table,
            )
            for block, layout in zip(logical, layouts, strict=True)
        ]

    def fetch_tile(turn, blocks, slot):
        """Begins to copy a tile's codes and scales, if there is such a tile."""

        @pl.when(turn < num_turns)
        def _():
            where = [
                {
                    "index": jnp.maximum(block, 0),  # -1, none, is no address
                    "run": s.entries_per_block,
                    "within": first_of_layer + find(turn, place)[1],
                }
                for block, place in zip(blocks, places, strict=True)
            ]
            mosaic_memory.fetch_rows(
                place_of_codes(slot), codes, layout=mosaic.EVEN_ROWS, **where[0]
            )
            for number, (layout, rows) in enumerate(
                zip(word_layouts, where[-num_words:], strict=True)
            ):
                target = place_of_words(slot, number)
                mosaic_memory.fetch_words(target, scales, layout=layout, **rows)

        mosaic_memory.commit_fetches()

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
        """Scores a tile, and has the one `stages` turns on fetched to where the last one was."""
        blocks, last_slot = state
        slot = jnp.where(last_slot == stages, 0, last_slot + 1)
        mosaic_memory.wait_fetched(stages - 1)
        rows = mosaic_memory.take_rows(place_of_codes(slot), (core.tile, s.width), mosaic.EVEN_ROWS)
        words = [
            mosaic_memory.take_words(place_of_words(slot, number), core.tile, layout)
            for number, layout in enumerate(word_layouts)
        ]
        fetch_tile(turn + stages, blocks, last_slot)
        blocks = load_blocks(turn + stages + 1)
        if s.mxfp4:
            keys = unpack_mosaic.unpack(rows, words[0], magnitudes)
            factor = unpack_mosaic.largest_scale(words[-1]) << 23  # UE8M0, an f32's exponent
        else:
            keys, factor = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn), words[-1]
        products = multiply(keys)
        twice_relu = products + jnp.abs(products)  # added, for the maximum's unit has more to do
        score = (twice_relu * head_weights).sum(axis=1)
        if not core.has_memory:
            score = left_operand.to_rows(score)
        score = score * lax.bitcast_convert_type(factor, jnp.float32)
        mosaic_memory.store_run(scores.at[token], tile_of(turn) * core.tile, score, layouts[-1])
        return blocks, slot

    blocks = [load_blocks(turn) for turn in range(stages + 1)]
    for turn in range(stages):
        fetch_tile(turn, blocks[turn], turn)

    def quantize_queries(half):
        """Of 32 heads."""
        heads = pl.ds(half * (HEADS // 2), HEADS // 2)
        first, shape = token * HEADS + half * (HEADS // 2), (HEADS // 2, DIM)
        query, weight = query_mosaic.quantize(queries, weights, first, shape, s.key_layout)
        store = mosaic_memory.store if core.has_memory else left_operand.store_columns
        store(queries_smem.at[heads], query, s.key_layout)
        by_row = s.key_layout.reduce(1)
        mosaic_memory.store(weights_smem.at[heads], weight * s.factor, by_row)
        plgpu.commit_smem()
        plgpu.barrier_arrive(queries_ready)

    for half in range(2):
        pl.when(group == half % tiling.groups)(functools.partial(quantize_queries, half))
    plgpu.barrier_wait(queries_ready)
    head_weights = plgpu.load(weights_smem, layout=core.layout.reduce(0), optimized=False)
    head_weights = lax.broadcast_in_dim(head_weights, (core.tile, HEADS), [1])
    head_weights = plgpu.layout_cast(head_weights, core.layout)
    lax.fori_loop(0, num_turns, score_tile, (blocks[stages], jnp.int32(stages)))


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
    shapes = _Shapes(
        entries_per_block=entries_per_block,
        num_blocks=num_blocks,
        table_width=block_table.shape[1],
        mxfp4=is_mxfp4(codec),
    )
    core = core or choose_core()
    num_tiles = -(-shapes.num_entries // core.tile)
    tiling = tiling or choose_tiling(num_tokens, num_tiles, shapes.mxfp4, core)
    swizzled = functools.partial(
        plgpu.SMEM, dtype=jnp.float8_e4m3fn, transforms=mosaic.SWIZZLED_BYTES
    )

    slot_bytes = core.tile * shapes.width
    slot_bytes += shapes.num_words(core) * mosaic_memory.FETCHED_WORDS
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
            swizzled((HEADS, DIM)),
            plgpu.SMEM((HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.SMEM((tiling.groups, tiling.stages + 1, slot_bytes), jnp.uint8),
            *operands_in_memory,
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        queries.reshape(-1, DIM),
        weights.reshape(-1, 1),
        block_table.reshape(-1, 1),
        request_ids,
        visible,
        layer[None],
        pool["codes"].reshape(-1, pool["codes"].shape[-1]),
        pool["scale"].reshape(math.prod(pool["scale"].shape[:3]), -1),
        jnp.asarray(unpack_mosaic.magnitude_bytes()),
    )
