"""Index scores through Mosaic GPU, for Hopper and Blackwell.

One program: one query token and a run of its request's entries; its warpgroups take tiles, 64 keys
or on Blackwell 128, in turn, each by itself:

    blocks of a tile, then its keys into shared memory, some tiles ahead, from there to registers;
    MXFP4 unpacked to E4M3             in registers, on Blackwell -> keys_smem[warpgroup]
    [64 keys, 64 heads] = keys Q^T     FP8 tensor cores, on Blackwell into tensor memory
    score = key scale * sum over heads of weight * relu

Keys are the rows of the product, so that heads add up along a row of registers.

Bytes: 68 per visible key (MXFP4) or 132 (FP8), and 4 per score written. Bound by them in large
calls, by instructions (about 200 per tile and thread) close behind in MXFP4. Sums of the FP8 tensor
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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats, mosaic, mosaic_memory, numbers, tilings
from pallas_kernels.backend import compute_capability
from pallas_kernels.formats import Codec, Planes
from pallas_kernels.index_topk import left_operand, unpack_mosaic

HEADS, DIM = 64, 128
"""Index heads and their dims, the released models'."""


@dataclasses.dataclass(frozen=True)
class TensorCore:
    """How a GPU multiplies keys with queries.

    Attributes:
      tile: keys of one product.
      layout: of a product in registers.
      has_memory: whether products arrive in tensor memory (tcgen05), or in registers (wgmma).
    """

    tile: int
    layout: plgpu.Layout
    has_memory: bool

    @property
    def word_layouts(self) -> list[Any]:
        """In which a thread wants keys' scales: of those it loads, and of those it has sums of."""
        return [mosaic.ROW, self.layout.reduce(1)] if self.has_memory else [mosaic.ROW]


HOPPER = TensorCore(tile=64, layout=plgpu.Layout.WGMMA, has_memory=False)
BLACKWELL = TensorCore(tile=128, layout=plgpu.Layout.TCGEN05, has_memory=True)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a token's entries are cut.

    Attributes:
      tiles: of a program.
      groups: warpgroups of a program.
      stages: tiles of a warpgroup that are on their way while one is multiplied.
    """

    tiles: int
    groups: int = 4
    stages: int = 3


def choose_tiling(
    num_tokens: int, num_tiles: int, mxfp4: bool, core: TensorCore = HOPPER, num_cores: int = 132
) -> Tiling:
    """Programs that fill the cores once, or several times evenly; each warpgroup has a tile."""
    groups, stages = (4, 2 if mxfp4 else 1) if core.has_memory else (5, 3)
    programs = max(1, num_cores // num_tokens)
    formula = Tiling(max(groups, -(-num_tiles // programs)), groups, stages)
    bits = 4 if mxfp4 else 8
    return tilings.tune("index_scores", formula, tokens=num_tokens, tiles=num_tiles, bits=bits)


def find_obstacle(queries: jax.Array, codec: Codec) -> str | None:
    """Why this kernel can't serve a call, as the rest of a sentence; None where it can."""
    capability = compute_capability()
    if not isinstance(codec, formats.FP8KeyCodec) and not _is_mxfp4(codec):
        return f"takes MXFP4 and FP8 keys, got {codec}"
    if queries.shape[1:] != (HEADS, DIM):
        return f"needs queries [T, {HEADS}, {DIM}], got {queries.shape=}"
    if capability is not None and capability[0] not in (9, 10):
        return f"is for Hopper and Blackwell, got compute capability {capability}"
    return None


def _is_mxfp4(codec: Codec) -> bool:
    return isinstance(codec, formats.FP4KeyCodec) and codec.power_of_two


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
    queries_ready,
    codes_smem,
    *rest,
    shapes: _Shapes,
    tiling: Tiling,
    core: TensorCore,
):
    s, stages = shapes, tiling.stages
    layouts = core.word_layouts
    words_smem, operands_in_memory = rest[: len(layouts)], rest[len(layouts) :]
    token, program = lax.axis_index("token"), lax.axis_index("program")
    group = lax.axis_index("warpgroup")
    by_head = core.layout.reduce(0)
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

    def slot_of(turn):
        return group * (stages + 1) + mosaic.divide(turn, stages + 1)[1]

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

    def fetch_tile(turn, blocks):
        """Begins to copy a tile's codes and scales, if there is such a tile."""

        @pl.when(turn < num_turns)
        def _():
            slot = slot_of(turn)
            where = [
                {
                    "index": jnp.maximum(block, 0),
                    "run": s.entries_per_block,
                    "within": first_of_layer + find(turn, place)[1],
                }
                for block, place in zip(blocks, places, strict=True)
            ]
            mosaic_memory.fetch_rows(
                codes_smem.at[slot], codes, layout=mosaic.EVEN_ROWS, **where[0]
            )
            for target, layout, rows in zip(words_smem, layouts, where, strict=True):
                mosaic_memory.fetch_words(target.at[slot], scales, layout=layout, **rows)

        mosaic_memory.commit_fetches()

    def multiply(keys):
        """f32[tile, 64], products of keys and all heads' queries."""
        if not core.has_memory:
            operand = left_operand.from_rows(keys, s.key_layout)
            return mosaic.multiply([(operand, queries_smem.transpose((1, 0)))])
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

    def score_tile(turn, blocks):
        """Scores a tile, and has the one `stages` turns on fetched."""
        mosaic_memory.wait_fetched(stages - 1)
        rows = mosaic_memory.take_rows(codes_smem.at[slot_of(turn)], mosaic.EVEN_ROWS)
        words = [
            mosaic_memory.take_words(source.at[slot_of(turn)], core.tile, layout)
            for source, layout in zip(words_smem, layouts, strict=True)
        ]
        fetch_tile(turn + stages, blocks)
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
        return blocks

    @pl.when(group == 0)
    def _():
        plgpu.copy_gmem_to_smem(queries.at[token], queries_smem, queries_ready)

    blocks = [load_blocks(turn) for turn in range(stages + 1)]
    for turn in range(stages):
        fetch_tile(turn, blocks[turn])
    head_weights = plgpu.load(weights.at[token], layout=by_head, optimized=False)
    half = 0.5 / unpack_mosaic.HEADROOM if s.mxfp4 else 0.5
    head_weights = lax.broadcast_in_dim(head_weights * half, (core.tile, HEADS), [1])
    head_weights = plgpu.layout_cast(head_weights, core.layout)
    plgpu.barrier_wait(queries_ready)
    lax.fori_loop(0, num_turns, score_tile, blocks[stages])


def choose_core() -> TensorCore:
    """That of the GPU, or Hopper's where there is none."""
    capability = compute_capability()
    return BLACKWELL if capability is not None and capability[0] == 10 else HOPPER


def quantize_queries(
    queries: jax.Array, weights: jax.Array, codec: Codec, core: TensorCore | None = None
) -> tuple[jax.Array, jax.Array]:
    """Queries as E4M3 codes, and weights that make up for it.

    Args:
      queries: f32[T, IH, IC], rounded as keys are; exact where a head's group scales lie within a
        factor of 2^14.
      weights: f32[T, IH].
      codec: of the keys.
      core: by default `choose_core()`.

    Returns:
      e4m3[T, IH, IC], columns in the order that the core wants for such keys, and f32[T, IH],
      weight * scale / sqrt(IC * IH), scale a power of two.
    """
    largest = jnp.maximum(jnp.max(jnp.abs(queries), axis=-1), np.float32(1e-30))
    code = numbers.encode_ue8m0(largest / np.float32(448))
    scaled = queries * numbers.invert_ue8m0(code)[..., None]
    rounded = lax.bitcast_convert_type(numbers.encode_e4m3(scaled), jnp.float8_e4m3fn)
    if not (core or choose_core()).has_memory:
        rounded = left_operand.order_columns(rounded, _key_layout(_is_mxfp4(codec)))
    norm = np.float32((queries.shape[-1] * queries.shape[-2]) ** -0.5)
    return rounded, weights * numbers.decode_ue8m0(code) * norm


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
      queries: e4m3[T, 64, 128] of `quantize_queries`.
      weights: f32[T, 64] of `quantize_queries`.
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
        mxfp4=_is_mxfp4(codec),
    )
    core = core or choose_core()
    num_tiles = -(-shapes.num_entries // core.tile)
    tiling = tiling or choose_tiling(num_tokens, num_tiles, shapes.mxfp4, core)
    swizzled = functools.partial(
        plgpu.SMEM, dtype=jnp.float8_e4m3fn, transforms=mosaic.SWIZZLED_BYTES
    )

    num_slots = tiling.groups * (tiling.stages + 1)
    fetched = [
        plgpu.SMEM((num_slots, core.tile, pool["codes"].shape[-1]), jnp.uint8),
        *(
            plgpu.SMEM((num_slots, core.tile * 4 if layout == mosaic.ROW else 128, 4), jnp.uint8)
            for layout in core.word_layouts
        ),
    ]
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
            plgpu.Barrier(),
            *fetched,
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
        jnp.asarray(unpack_mosaic.magnitude_bytes()),
    )
