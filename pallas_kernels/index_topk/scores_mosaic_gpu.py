"""Index scores through Mosaic GPU, for Hopper and Blackwell.

One program: one query token and a run of its request's entries; each of its warpgroups takes every
fourth tile of 64 keys (128 on Blackwell) by itself:

    blocks of a tile, two tiles ahead; its keys from device memory into registers, one tile ahead;
    MXFP4 unpacked to E4M3             -> keys_smem[warpgroup]
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

from pallas_kernels import formats, mosaic, numbers, tilings
from pallas_kernels.backend import compute_capability
from pallas_kernels.formats import Codec, Planes
from pallas_kernels.index_topk import left_operand, unpack_mosaic

HEADS, DIM = 64, 128
"""Index heads and their dims, the released models'."""
GROUPS, AHEAD = 5, 1
"""Tiles of a warpgroup that are on their way while one is multiplied."""


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


HOPPER = TensorCore(tile=64, layout=plgpu.Layout.WGMMA, has_memory=False)
BLACKWELL = TensorCore(tile=128, layout=plgpu.Layout.TCGEN05, has_memory=True)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a token's entries are cut.

    Attributes:
      tiles: of a program.
      groups: warpgroups of a program.
    """

    tiles: int
    groups: int = 4


def choose_tiling(num_tokens: int, num_tiles: int, num_cores: int = 132) -> Tiling:
    """Programs that fill the cores once, or several times evenly; each warpgroup has a tile."""
    groups = GROUPS
    programs = max(1, num_cores // num_tokens)
    formula = Tiling(tiles=max(groups, -(-num_tiles // programs)), groups=groups)
    return tilings.tune("index_scores", formula, tokens=num_tokens, tiles=num_tiles)


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
    *operands_in_memory,
    shapes: _Shapes,
    tiling: Tiling,
    core: TensorCore,
):
    s = shapes
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

    def tile_of(turn):
        return first_tile + turn * tiling.groups + group

    def places(layout, wide):
        return plgpu.broadcasted_iota(jnp.int32, (core.tile, wide), 0, layout=layout).max(axis=1)

    layouts = [(mosaic.ROW, places(mosaic.ROWS, DIM // 2))]
    if core.has_memory:  # a thread has sums of other keys than it loads
        layouts.append((core.layout.reduce(1), places(core.layout, HEADS)))

    last_visible = jnp.maximum(num_visible - 1, 0)
    first_of_table = jnp.maximum(request, 0) * s.table_width
    first_of_layer = layer_number * s.num_blocks

    def entries_of(turn, place):
        """Entries of a tile; beyond the last visible one, where scores don't matter, that one."""
        return jnp.minimum(tile_of(turn) * core.tile + place, last_visible)

    def load_blocks(turn, layout, place):
        """Physical blocks of a tile's entries; any where none is visible."""
        logical, _ = mosaic.divide(entries_of(turn, place), s.entries_per_block)
        return mosaic.gather_words(
            [table], logical * 0, first_of_table + logical, word=0, layout=layout, all_present=True
        )

    def locate(turn, block, place):
        _, row = mosaic.divide(entries_of(turn, place), s.entries_per_block)
        return (first_of_layer + jnp.maximum(block, 0)) * s.entries_per_block + row

    def load_all_blocks(turn):
        return [load_blocks(turn, *layout) for layout in layouts]

    def load_keys(turn, blocks):
        """Codes, and scales in each of the layouts."""
        index = [
            locate(turn, block, place) for block, (_, place) in zip(blocks, layouts, strict=True)
        ]
        layout, width = (mosaic.ROWS, DIM // 2) if s.mxfp4 else (s.key_layout, DIM)
        rows = mosaic.gather_rows(
            [codes], index[0] * 0, index[0], start=0, width=width, layout=layout, all_present=True
        )
        words = [
            mosaic.gather_words([scales], i * 0, i, word=0, layout=layout, all_present=True)
            for i, (layout, _) in zip(index, layouts, strict=True)
        ]
        return rows, words

    def multiply(keys):
        """f32[tile, 64], products of keys and all heads' queries."""
        if not core.has_memory:
            operand = left_operand.from_rows(keys, s.key_layout)
            return mosaic.multiply([(operand, queries_smem.transpose((1, 0)))])
        keys_smem, products_tmem, products_ready = operands_in_memory
        mosaic.store(keys_smem.at[group], keys, s.key_layout)
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
        """Scores a tile and fetches, into the registers it has left, the one `AHEAD` turns on."""
        (rows, words), blocks = state
        if s.mxfp4:
            rows = unpack_mosaic.unpack(rows, words[0], magnitudes)
            scale = unpack_mosaic.largest_scale(words[-1]) << 23  # UE8M0, an f32's exponent
            factor = lax.bitcast_convert_type(scale, jnp.float32) / unpack_mosaic.HEADROOM
        else:
            rows = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn)
            factor = lax.bitcast_convert_type(words[-1], jnp.float32)
        products = multiply(rows)
        later = load_keys(turn + AHEAD, blocks), load_all_blocks(turn + 2 * AHEAD)
        twice_relu = products + jnp.abs(products)  # added, for the maximum's unit has more to do
        score = (twice_relu * head_weights).sum(axis=1)
        if not core.has_memory:
            score = left_operand.to_rows(score)

        @pl.when(turn < num_turns)
        def _():
            target = scores.at[token, pl.ds(tile_of(turn) * core.tile, core.tile)]
            mosaic.store(target, score * factor, layouts[-1][0])

        return later

    def step(i, states):
        return [score_tile(i * AHEAD + ahead, state) for ahead, state in enumerate(states)]

    @pl.when(group == 0)
    def _():
        plgpu.copy_gmem_to_smem(queries.at[token], queries_smem, queries_ready)

    blocks = [load_all_blocks(turn) for turn in range(2 * AHEAD)]
    states = [(load_keys(turn, blocks[turn]), blocks[AHEAD + turn]) for turn in range(AHEAD)]
    head_weights = plgpu.load(weights.at[token], layout=by_head, optimized=False)
    head_weights = lax.broadcast_in_dim(head_weights * 0.5, (core.tile, HEADS), [1])
    head_weights = plgpu.layout_cast(head_weights, core.layout)
    plgpu.barrier_wait(queries_ready)
    lax.fori_loop(0, lax.div(num_turns + AHEAD - 1, AHEAD), step, states)


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
    tiling = tiling or choose_tiling(num_tokens, num_tiles)
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
            swizzled((HEADS, DIM)),
            plgpu.Barrier(),
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
