"""What a CTA of the index scores does, from its queries to its scores; see `mosaic_gpu`."""

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
from pallas_kernels.index_scores.key_pipeline import KeyPipeline, Keys
from pallas_kernels.index_scores.operands import Cta, Operands, Ref, Scratch
from pallas_kernels.index_scores.tiling import HEADS, Shapes, Tiling

_KEPT_WEIGHTS = 2
"""Tokens whose weights of heads a thread has room for."""


class State(NamedTuple):
    """What a warpgroup carries from tile to tile.

    Attributes:
      blocks: i32[32] in `mosaic_bulk.LANES`, physical blocks of the tile to be fetched next.
      stage: i32[], of the tile to be scored.
      parity: i32[], of that stage's barrier: 0, 1, 0, ... by its use.
    """

    blocks: jax.Array
    stage: jax.Array
    parity: jax.Array


def score_tiles(
    inputs: Operands, scores_gmem: Ref, scratch: Scratch, *, shapes: Shapes, tiling: Tiling
) -> None:
    """Scores a run of the entries that the CTA's tokens see, into f32[T, E]."""
    cta = Cta.here(inputs, scratch, shapes, tiling)
    _copy_queries(cta)
    pipeline = KeyPipeline.of(cta)
    # Seen by the copy engine before the first fetch names them.
    mosaic_bulk.make_barriers(pipeline.barriers)
    # The first keys are on their way while queries are rounded.
    keys = pipeline.find_keys(0)
    blocks = pipeline.start(keys, jnp.int32(0))
    _round_queries(cta)
    kept = tiling.tokens <= _KEPT_WEIGHTS
    weights = [_load_weights(cta, i) for i in range(tiling.tokens)] if kept else []
    score_tile = functools.partial(
        _score_tile, cta=cta, pipeline=pipeline, scores_gmem=scores_gmem, kept_weights=weights
    )
    state = State(blocks, stage=jnp.int32(0), parity=jnp.int32(0))
    state = _score_keys(keys, state, score_tile)
    # Of tokens of other requests, if there are any, the keys take another pass each.
    for number in range(1, tiling.tokens):
        keys = pipeline.find_keys(number)

        def run_pass(
            stage: jax.Array, parity: jax.Array, keys: Keys = keys
        ) -> tuple[jax.Array, jax.Array]:
            first = State(pipeline.start(keys, stage), stage, parity)
            last = _score_keys(keys, first, score_tile)
            return last.stage, last.parity

        # No other request among the tokens, which is what most of a prompt's are: no pass.
        stage, parity = lax.cond(
            keys.num_turns > 0, run_pass, lambda *state: state, state.stage, state.parity
        )
        state = State(blocks, stage, parity)


def _copy_queries(cta: Cta) -> None:
    """The last warpgroup has the tokens' queries and weights copied to shared memory."""

    @pl.when(cta.warpgroup == cta.tiling.warpgroups - 1)
    def _() -> None:
        for i, token in enumerate(cta.tokens):
            queries, weights = _raw(cta, i)
            # The copy engine's until `landed`, at which each copy arrives by itself.
            plgpu.copy_gmem_to_smem(cta.inputs.queries.at[token], queries, cta.scratch.landed)
            plgpu.copy_gmem_to_smem(cta.inputs.weights.at[token], weights, cta.scratch.landed)


def _round_queries(cta: Cta) -> None:
    """All warpgroups turn queries to E4M3, a share of the heads each; then all see all of them."""
    tiling, scratch = cta.tiling, cta.scratch
    # The copies have written raw queries and weights: from here on they are read.
    plgpu.barrier_wait(scratch.landed)
    heads_at_once = quantize_queries.ROWS * tiling.warpgroups
    for turn in range(pl.cdiv(tiling.tokens * HEADS, heads_at_once)):
        first = (turn * tiling.warpgroups + cta.warpgroup) * quantize_queries.ROWS
        pl.when(first < tiling.tokens * HEADS)(functools.partial(_round_heads, cta, first))
    # Stores of threads, before the tensor cores of other warpgroups read them.
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.queries_ready)
    plgpu.barrier_wait(scratch.queries_ready)  # all heads are there; nothing writes them again


def _round_heads(cta: Cta, first: jax.Array) -> None:
    """Some heads' queries into codes, whose scales go into weights."""
    shapes, scratch = cta.shapes, cta.scratch
    i, head = mosaic.quotient_and_remainder(first, HEADS)
    heads = pl.ds(head, quantize_queries.ROWS)
    raw_query, raw_weight = _raw(cta, i, heads)
    query, weight = quantize_queries.quantize(*quantize_queries.load_heads(raw_query, raw_weight))
    # From rows of `LINES` to the order in which the tensor core reads them.
    queries_smem = scratch.queries_smem.at[i, heads]
    if shapes.device.has_tmem:
        mosaic_memory.store_shared(queries_smem, query, mosaic.LINES)
    else:  # in the order of columns in which a thread's keys become the left operand
        left_operand.store_columns(queries_smem, query, shapes.key_layout)
    mosaic_memory.store_shared(
        scratch.weights_smem.at[i, heads], weight * shapes.factor, quantize_queries.BY_ROW
    )


def _raw(cta: Cta, i: jax.Array | int, *heads: Any) -> tuple[Ref, Ref]:
    """Where a token's queries and weights come to lie."""
    at = (i, *heads)
    return cta.scratch.raw_queries_smem.at[at], cta.scratch.raw_weights_smem.at[at]


def _load_weights(cta: Cta, i: int) -> jax.Array:
    """f32[tile_m, 64], a token's weights beside each key, in the layout of products."""
    layout = cta.shapes.product_layout
    weights = plgpu.load(cta.scratch.weights_smem.at[i], layout=layout.reduce(0), optimized=False)
    weights = lax.broadcast_in_dim(weights, (cta.shapes.tile_m, HEADS), [1])
    # A thread has loaded the weights of its columns, the heads: the cast moves nothing.
    return plgpu.layout_cast(weights, layout)


def _score_keys(keys: Keys, state: State, score_tile: Any) -> State:
    """All tiles of a pass."""
    return lax.fori_loop(0, keys.num_turns, functools.partial(score_tile, keys=keys), state)


def _score_tile(
    turn: jax.Array,
    state: State,
    *,
    keys: Keys,
    cta: Cta,
    pipeline: KeyPipeline,
    scores_gmem: Ref,
    kept_weights: list[jax.Array],
) -> State:
    """Scores a tile, and has the one `stages` turns on fetched to where it was."""
    blocks, stage, parity = state
    pipeline.wait(stage, parity)
    codes, factor = _load_keys(cta, stage)
    operand = _to_operand(cta, codes)  # [tile_m, 128]
    products = _multiply(cta, operand, 0)  # f32[tile_m, 64]
    next_blocks = pipeline.release(keys, turn, blocks, stage)  # the stage is in registers: free
    start = pipeline.tile(turn) * cta.shapes.tile_m
    for i, token in enumerate(cta.tokens):
        if i:
            products = _multiply(cta, operand, i)
        weights = kept_weights[i] if kept_weights else _load_weights(cta, i)
        score = _add_heads(cta, products, weights, factor)  # f32[tile_m]
        store = functools.partial(
            mosaic_memory.store_run, scores_gmem.at[token], start, score, cta.shapes.score_layout
        )
        if len(cta.tokens) == 1:
            store()
        else:  # by the keys of another request a token has no scores
            pl.when(cta.segments[i] == keys.segment)(store)
    is_last = stage == cta.tiling.stages - 1
    return State(
        next_blocks,
        stage=jnp.where(is_last, 0, stage + 1),
        parity=jnp.where(is_last, 1 - parity, parity),
    )


def _load_keys(cta: Cta, stage: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A stage's keys in registers.

    Returns:
      e4m3[tile_m, 128] in `key_layout`; and i32[tile_m] in the last of `scale_layouts`, bits of the
      f32 by which a key's score is multiplied.
    """
    shapes, at = cta.shapes, (cta.warpgroup, stage)
    rows = plgpu.load(cta.scratch.codes_smem.at[at], layout=mosaic.EVEN_ROWS, optimized=False)
    words = [
        plgpu.load(cta.scratch.words_smem.at[at], layout=layout, optimized=False)
        for layout in shapes.scale_layouts
    ]
    if not shapes.mxfp4:
        return lax.bitcast_convert_type(rows, jnp.float8_e4m3fn), words[-1]
    # A key's groups have scales of their own: all go to E4M3 under the largest of them.
    largest = unpack_mxfp4.largest_scale_of_rows(words[0])
    codes = unpack_mxfp4.unpack(rows, words[0], cta.inputs.magnitudes, largest)
    if len(words) > 1:  # wanted once more, where a thread has the sum of a key's heads
        largest = unpack_mxfp4.largest_scale(words[-1])
    return codes, largest << 23  # UE8M0, an f32's exponent


def _to_operand(cta: Cta, codes: jax.Array) -> Any:
    """Keys as the left operand: registers of wgmma on Hopper, shared memory on Blackwell."""
    layout = cta.shapes.key_layout
    if not cta.shapes.device.has_tmem:
        return left_operand.from_rows(codes, layout)
    keys_smem = cta.scratch.keys_smem.at[cta.warpgroup]
    mosaic_memory.store_shared(keys_smem, codes, layout)
    plgpu.commit_smem()  # before the tensor core reads what threads have stored
    return keys_smem


def _multiply(cta: Cta, operand: Any, i: int) -> jax.Array:
    """f32[tile_m, 64] in `product_layout`, products of keys and all heads of a token."""
    queries_smem = cta.scratch.queries_smem.at[i]
    if not cta.shapes.device.has_tmem:
        return mosaic.multiply_registers(operand, queries_smem)
    ready = cta.scratch.products_ready.at[cta.warpgroup]
    mine = cta.scratch.products_tmem.at[:, pl.ds(cta.warpgroup * HEADS, HEADS)]
    # [tile_m, 128] @ [128, 64]; the tensor core arrives at `ready` when it has ended.
    plgpu.tcgen05_mma(mine, operand, queries_smem.transpose((1, 0)), ready, accumulate=False)
    # The tensor core has written its memory; now threads own it, until the next product.
    plgpu.barrier_wait(ready)
    products = plgpu.async_load_tmem(mine, layout=cta.shapes.product_layout)
    plgpu.wait_load_tmem()  # until the registers have them
    return products


def _add_heads(cta: Cta, products: jax.Array, weights: jax.Array, factor: jax.Array) -> jax.Array:
    """f32[tile_m] in `score_layout`: the sum over heads of weight times ReLU, times the factor."""
    twice_relu = products + jnp.abs(products)  # added, for the maximum's unit has more to do
    score = (twice_relu * weights).sum(axis=1)
    if not cta.shapes.device.has_tmem:  # to the threads that have its key's scale
        score = left_operand.to_rows(score)
    return score * lax.bitcast_convert_type(factor, jnp.float32)
