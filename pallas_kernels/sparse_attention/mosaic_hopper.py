"""Sparse attention through Mosaic GPU, for Hopper.

One CTA: one query token, 64 of its heads, one split of its keys, in tiles of 64. Warpgroups:

    producer     addresses of a tile through ring and block table; its rows from device memory into
                 registers, one tile ahead; to 16 bits, swizzled            -> keys_smem[stage]
    consumer a   owns tiles a, a + 2, ...: logits Q K^T, softmax            -> weights_smem[a]
                 all tiles: out[:, a C / 2 :] += weights keys[:, a C / 2 :]

64 x C sums in f32 do not fit one warpgroup's registers at C = 512, so two hold half each; one
multiplies while the other takes exponentials. Logits begin when half of a tile is there.

Split-K: splits take tiles in turn, their number follows from shapes, and `combine_triton` adds them
up. Tiles beyond what a token sees are not looked at; a split that has no other looks at one.

Bytes: those of the keys, and 2 * 64 * C of queries and of output. Latency bounds calls of few
tiles, shared memory and the producer together large ones. Products are of f16 or bf16
(`Shapes.dtype`), with f32 sums. Measurements and roads not taken: docs/kernels/sparse_attention.md.
Source: deepseek_v4.md section 1.3, step 9.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic, mosaic_memory
from pallas_kernels.gpu.devices import H200
from pallas_kernels.sparse_attention.call_shapes import FLOOR, GROUP, HEADS, LOG2_E, TILE, Shapes
from pallas_kernels.sparse_attention.gather_keys import gather_keys
from pallas_kernels.sparse_attention.launch import Kernel, as_bf16, inverse_total, launch
from pallas_kernels.sparse_attention.loads import (
    Operands,
    Outputs,
    Place,
    Ref,
    find_place,
    load_queries,
)
from pallas_kernels.sparse_attention.rope import rotate_half

REGISTERS = (192, 120)
"""Registers of a consumer's thread and a producer's; 2 + 1 warpgroups share 3 * 168."""
DECAY, LARGEST, TOTAL = range(3)
BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of a value for each row, a head, and for each column of a product."""


class Scratch(NamedTuple):
    """What a CTA has to itself: shared memory, then barriers.

    Of two, one is for each half of the queries' columns, for each stage, which are of tiles in
    turn, or for the tiles of each consumer. A consumer's own tiles are those of one stage.

    Attributes:
      queries_smem: [2, 64, C / 2], a half each; in the end the output.
      keys_smem: [2, 2, 64, C / 2], stage and half.
      weights_smem: [2, 64, 64], of each consumer's tile.
      bias_smem: f32[2, 64], of each stage: 0 for a key and minus infinity for none.
      statistics_smem: f32[2, 3, 64], of each consumer: `DECAY`, `LARGEST` and `TOTAL`.
      queries_landed: for each half: its copy has come.
      queries_ready: both consumers have their half of the queries as products take it.
      keys_ready: for each half of a tile's columns and each stage: the producer has stored it.
      keys_free: for each stage: both consumers have multiplied its tile.
      weights_ready: for each consumer: its tile's weights, decay and largest logit are there.
      weights_free: for each consumer: the other one has multiplied them.
      totals_ready: both consumers have stored what they exchange.
    """

    queries_smem: Any
    keys_smem: Any
    weights_smem: Any
    bias_smem: Any
    statistics_smem: Any
    queries_landed: Any
    queries_ready: Any
    keys_ready: Any
    keys_free: Any
    weights_ready: Any
    weights_free: Any
    totals_ready: Any


class State(NamedTuple):
    """What a consumer carries from tile to tile.

    Attributes:
      out: f32[64, C / 2] in WGMMA layout, the accumulator: keys by their weights, its half of C.
      largest: f32[64], a value a row: the largest logit of all tiles so far, times log2(e).
      total: f32[64], likewise: the sum of the weights in its own tiles, relative to it.
    """

    out: jax.Array
    largest: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One of the two warpgroups that multiply, and what it works with.

    Attributes:
      inputs: arrays in device memory.
      scratch: the CTA's own memory.
      shapes: sizes of the call.
      cta: place of the CTA.
      keys_ready: the barriers of parts of a tile, of two or one.
      me: i32[], 0 or 1: it owns tiles me, me + 2, ..., which lie in stage `me`.
      other: i32[], the other consumer.
      columns: its half of the columns, which it sums over all tiles.
    """

    inputs: Operands
    scratch: Scratch
    shapes: Shapes
    cta: Place
    keys_ready: Sequence[Ref]
    me: jax.Array
    other: jax.Array
    columns: pl.Slice


def _attention_kernel(
    inputs: Operands, outputs: Outputs, scratch: Scratch, *, shapes: Shapes
) -> None:
    """Two consumers and a producer."""
    cta, warpgroup = find_place(inputs, shapes), lax.axis_index("warpgroup")
    keys_ready = scratch.keys_ready
    if shapes.tiles_per_split == 1:  # nothing hides a second wait
        keys_ready = keys_ready[:1]

    @pl.when(warpgroup < 2)
    def _consume() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        half = shapes.dim // 2
        consumer = Consumer(
            inputs,
            scratch,
            shapes,
            cta,
            keys_ready,
            me=warpgroup,
            other=1 - warpgroup,
            columns=pl.ds(warpgroup * half, half),
        )
        _attend(consumer, outputs)

    @pl.when(warpgroup == 2)
    def _produce() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        gather_keys(
            inputs,
            shapes,
            cta,
            range(shapes.dim // GROUP),
            target_of=lambda stage, half: scratch.keys_smem.at[stage, half],
            bias_smem=scratch.bias_smem,
            keys_ready=keys_ready,
            keys_free=scratch.keys_free,
            store_shared=mosaic_memory.store_shared,
        )


def _attend(consumer: Consumer, outputs: Outputs) -> None:
    """All that a consumer does: queries, tiles, the sum of weights, the output."""
    shapes, cta = consumer.shapes, consumer.cta
    # Wanted last; asked for now, it is there by then.
    own_sink = None
    if shapes.splits == 1 or shapes.heads_of_cta == HEADS:
        own_sink = plgpu.load(consumer.inputs.sink.at[cta.heads], layout=BY_ROW, optimized=False)
    _bring_queries(consumer)
    zeros = jnp.zeros((HEADS, shapes.dim // 2), jnp.float32)
    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)  # as products come out
    # Consumer 0 owns the even tiles and consumer 1 the odd ones: of an odd number the former has
    # one more.
    turns = (cta.num_tiles + consumer.other) // 2
    state = State(out=zeros, largest=_per_row(FLOOR), total=_per_row(0.0))
    add_own_tile = functools.partial(_add_own_tile, consumer=consumer)
    state = lax.fori_loop(0, turns, add_own_tile, state)
    # Before each of its own it has added the other's tile up; after its last one there may be one.
    add_tile_of_other = functools.partial(_add_tile_of_other, consumer)
    is_last_of_other = cta.num_tiles % 2 == consumer.me
    state = lax.cond(is_last_of_other, add_tile_of_other, lambda state: state, state)

    @pl.when(turns > 0)
    def _() -> None:  # the other one has read the last weights: their memory is free at the end
        plgpu.barrier_wait(consumer.scratch.weights_free.at[consumer.me])

    total = _add_totals(consumer, state.total)
    if shapes.splits > 1:
        _store_part(consumer, outputs, state._replace(total=total))
    else:
        assert own_sink is not None
        factor = inverse_total(state.largest, total, own_sink)
        _store_output(consumer, outputs, _scaled(state.out, factor))


def _bring_queries(consumer: Consumer) -> None:
    """Each consumer brings its half of the queries' columns; then both may read all of them."""
    scratch, me = consumer.scratch, consumer.me
    load_queries(
        consumer.inputs,
        consumer.shapes,
        consumer.cta,
        [(me, scratch.queries_smem.at[me], scratch.queries_landed.at[me])],
        store_shared=mosaic_memory.store_shared,
        add_squares=functools.partial(_add_squares_of_other, consumer),
    )
    # Both halves are in shared memory once both have arrived; from then on they are read alone.
    plgpu.barrier_arrive(scratch.queries_ready)
    plgpu.barrier_wait(scratch.queries_ready)


def _add_squares_of_other(consumer: Consumer, squares: jax.Array) -> jax.Array:
    """f32[64] in `mosaic.ROW` layout: the squares of all columns, for the norm of queries."""
    statistics_smem, ready = consumer.scratch.statistics_smem, consumer.scratch.totals_ready
    mosaic_memory.store_shared(statistics_smem.at[consumer.me, TOTAL], squares, mosaic.ROW)
    plgpu.commit_smem()  # visible to the other consumer before it is told
    plgpu.barrier_arrive(ready)  # its own squares are there
    plgpu.barrier_wait(ready)  # until the other one's are there
    theirs = statistics_smem.at[consumer.other, TOTAL]
    return squares + plgpu.load(theirs, layout=mosaic.ROW, optimized=False)


def _add_own_tile(turn: jax.Array, state: State, *, consumer: Consumer) -> State:
    """Weighs an own tile, hands its weights to the other consumer, and adds it up."""
    # First the other's tile before it, so that one multiplies while the other takes exponentials.
    has_before = turn + consumer.me > 0
    add_tile_of_other = functools.partial(_add_tile_of_other, consumer)
    state = lax.cond(has_before, add_tile_of_other, lambda state: state, state)
    logits = _find_logits(consumer)
    largest = jnp.maximum(state.largest, logits.max(axis=1))
    # What was summed so far is relative to the old maximum; both consumers scale theirs by this.
    decay = jnp.exp2(state.largest - largest)
    weights = jnp.exp2(logits - lax.broadcast_in_dim(largest, logits.shape, [0]))  # [64, 64]
    added = weights.sum(axis=1)
    _hand_over(consumer, turn, weights, decay, largest)
    state = _accumulate(consumer, state, consumer.me, decay, largest)
    return state._replace(total=state.total + added)


def _find_logits(consumer: Consumer) -> jax.Array:
    """f32[64, 64] in WGMMA layout, an own tile's logits times log2(e); minus infinity for no key.

    Each half of the columns is waited for on its own: products begin when the first is there.
    """
    scratch, shapes, me = consumer.scratch, consumer.shapes, consumer.me
    first = mosaic.opaque(0)  # else descriptors of the queries would stay in registers
    logits = mosaic.multiply(
        [
            (
                scratch.queries_smem.at[first + half],  # [64 heads, C / 2]
                scratch.keys_smem.at[me, first + half].transpose((1, 0)),  # [C / 2, 64], a view
            )
            for half in range(2)
        ],
        ready=[ready.at[me] for ready in consumer.keys_ready],
    )
    bias = plgpu.load(scratch.bias_smem.at[me], layout=BY_COLUMN, optimized=False)
    bias = lax.broadcast_in_dim(bias, logits.shape, [1])
    return jnp.where(bias < 0, bias, logits * (shapes.scale * LOG2_E))  # a NaN query too


def _hand_over(
    consumer: Consumer, turn: jax.Array, weights: jax.Array, decay: jax.Array, largest: jax.Array
) -> None:
    """Leaves an own tile's weights and statistics for the other consumer, and for itself."""
    scratch, me = consumer.scratch, consumer.me

    @pl.when(turn > 0)
    def _() -> None:  # until the other one has multiplied those of the turn before
        plgpu.barrier_wait(scratch.weights_free.at[me])

    # From the layout of products to shared memory, swizzled, as the left operand of the next.
    weights = weights.astype(consumer.shapes.dtype)
    mosaic_memory.store_shared(scratch.weights_smem.at[me], weights, plgpu.Layout.WGMMA)
    mosaic_memory.store_shared(scratch.statistics_smem.at[me, DECAY], decay, BY_ROW)
    mosaic_memory.store_shared(scratch.statistics_smem.at[me, LARGEST], largest, BY_ROW)
    plgpu.commit_smem()  # weights to the tensor core, statistics to the other consumer
    plgpu.barrier_arrive(scratch.weights_ready.at[me])  # the other one's to read, too


def _add_tile_of_other(consumer: Consumer, state: State) -> State:
    """Adds up the tile that the other consumer has weighed."""
    scratch, other = consumer.scratch, consumer.other
    # From here on the weights are read by this consumer too, until `weights_free`.
    plgpu.barrier_wait(scratch.weights_ready.at[other])
    decay, largest = (_load_statistic(consumer, other, which) for which in (DECAY, LARGEST))
    state = _accumulate(consumer, state, other, decay, largest)
    # Read, as the product has ended: the other one may store its next weights there.
    plgpu.barrier_arrive(scratch.weights_free.at[other])
    return state


def _accumulate(
    consumer: Consumer, state: State, owner: jax.Array, decay: jax.Array, largest: jax.Array
) -> State:
    """Adds weights times keys of a tile, which lie in its owner's stage, over the own columns."""
    scratch = consumer.scratch
    out = mosaic.multiply_add(
        _scaled(state.out, decay),
        scratch.weights_smem.at[owner],  # [64 heads, 64 keys]
        scratch.keys_smem.at[owner, consumer.me],  # [64 keys, C / 2]
    )
    plgpu.barrier_arrive(scratch.keys_free.at[owner])  # once both have, the producer fills it
    return State(out, largest, state.total * decay)


def _add_totals(consumer: Consumer, total: jax.Array) -> jax.Array:
    """f32[64]: the weights of both consumers' tiles."""
    scratch = consumer.scratch
    mosaic_memory.store_shared(scratch.statistics_smem.at[consumer.me, TOTAL], total, BY_ROW)
    plgpu.commit_smem()  # visible to the other consumer before it is told
    plgpu.barrier_arrive(scratch.totals_ready)  # no product of its own runs now
    plgpu.barrier_wait(scratch.totals_ready)  # the other's have ended, too
    return _load_statistic(consumer, 0, TOTAL) + _load_statistic(consumer, 1, TOTAL)


def _store_part(consumer: Consumer, outputs: Outputs, state: State) -> None:
    """Of a split: its sums as they are, and its statistics."""
    cta = consumer.cta
    outputs.sums.at[cta.split, cta.token, cta.heads, consumer.columns][...] = state.out

    @pl.when(consumer.me == 0)
    def _() -> None:
        outputs.statistics.at[cta.split, cta.token, 0, cta.heads][...] = state.largest  # f32[64]
        outputs.statistics.at[cta.split, cta.token, 1, cta.heads][...] = state.total


def _store_output(consumer: Consumer, outputs: Outputs, out: jax.Array) -> None:
    """Without splits: rounds, rotates, and copies its half of the output to device memory."""
    scratch, shapes, cta, me = consumer.scratch, consumer.shapes, consumer.cta, consumer.me
    # Where its half of the queries was, which nobody reads any more.
    out_smem = scratch.queries_smem.at[me]
    # From the layout of products to the swizzle that the copy engine takes; the products that read
    # queries have ended in both consumers, since both have come through `totals_ready`.
    mosaic_memory.store_shared(out_smem, as_bf16(out, shapes.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()  # columns are rotated by other threads than stored them
    if shapes.rotated:
        for number in range(2):
            turn = functools.partial(
                rotate_half,
                scratch.queries_smem.at[number],
                number,
                consumer.inputs.angles.at[cta.token],
                shapes=shapes,
                store_shared=mosaic_memory.store_shared,
            )
            pl.when(me == number)(turn)
        plgpu.commit_smem()  # before the copy engine reads what threads have stored
    out_smem = scratch.queries_smem.at[me]
    if shapes.heads_of_cta < HEADS:
        out_smem = out_smem.at[pl.ds(0, shapes.heads_of_cta)]
    out_gmem = outputs.sums.at[cta.token, cta.own_heads, consumer.columns]
    plgpu.copy_smem_to_gmem(out_smem, out_gmem)  # the copy engine's until the wait
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the CTA's memory is read until then


def _per_row(value: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), BY_ROW)  # one value: no move


def _load_statistic(consumer: Consumer, owner: jax.Array | int, which: int) -> jax.Array:
    statistics = consumer.scratch.statistics_smem.at[owner, which]
    return plgpu.load(statistics, layout=BY_ROW, optimized=False)


def _scaled(out: jax.Array, factor: jax.Array) -> jax.Array:
    """f32[64, n], rows times f32[64]."""
    return out * lax.broadcast_in_dim(factor, out.shape, [0])


def _scratch(dim: int, dtype: Any) -> Scratch:
    tile = functools.partial(plgpu.SMEM, dtype=dtype, transforms=mosaic.SWIZZLED)
    return Scratch(
        queries_smem=tile((2, HEADS, dim // 2)),
        keys_smem=tile((2, 2, TILE, dim // 2)),
        weights_smem=tile((2, HEADS, TILE)),
        bias_smem=plgpu.SMEM((2, TILE), jnp.float32),
        statistics_smem=plgpu.SMEM((2, 3, HEADS), jnp.float32),
        queries_landed=plgpu.Barrier(num_barriers=2),
        queries_ready=plgpu.Barrier(num_arrivals=2),
        keys_ready=[plgpu.Barrier(num_barriers=2)] * 2,
        keys_free=plgpu.Barrier(num_arrivals=2, num_barriers=2),
        weights_ready=plgpu.Barrier(num_barriers=2),
        weights_free=plgpu.Barrier(num_barriers=2),
        totals_ready=plgpu.Barrier(num_arrivals=2),
    )


sparse_attention = functools.partial(launch, Kernel(_attention_kernel, _scratch, 3, H200))
"""See `op.sparse_attention`."""
