"""Sparse attention through Mosaic GPU, for Hopper.

One CTA: one query token, 64 of its heads, one split of its keys, in tiles of 64. Warpgroups:

    producer     addresses of a tile through ring and block table; its rows from device memory into
                 registers, one tile ahead; to 16 bits, swizzled            -> keys_smem[slot]
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

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic, mosaic_memory
from pallas_kernels.gpu.devices import H200
from pallas_kernels.sparse_attention.call_shapes import FLOOR, GROUP, HEADS, LOG2_E, TILE, Shapes
from pallas_kernels.sparse_attention.launch import Kernel, as_bf16, inverse_total, launch
from pallas_kernels.sparse_attention.loads import (
    Operands,
    Outputs,
    find_place,
    gather_keys,
    load_queries,
)
from pallas_kernels.sparse_attention.rope import rotate_half

REGISTERS = (192, 120)
"""Registers of a consumer's thread and a producer's; 2 + 1 warpgroups share 3 * 168."""
DECAY, LARGEST, TOTAL = range(3)


class Scratch(NamedTuple):
    """What a CTA has to itself: shared memory, then barriers.

    Of two, one is for each half of the queries' columns, for each slot of tiles in turn, or for the
    tiles of each consumer.
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


def _attention_kernel(inputs: Operands, outputs: Outputs, scratch: Scratch, *, shapes: Shapes):
    s, half = shapes, shapes.dim // 2
    cta, group = find_place(inputs, s), lax.axis_index("warpgroup")
    queries_smem, keys_smem = scratch.queries_smem, scratch.keys_smem
    weights_smem, bias_smem = scratch.weights_smem, scratch.bias_smem
    statistics_smem = scratch.statistics_smem
    keys_ready, keys_free = scratch.keys_ready, scratch.keys_free
    weights_ready, weights_free = scratch.weights_ready, scratch.weights_free
    if s.tiles_per_split == 1:  # nothing hides a second wait
        keys_ready = keys_ready[:1]
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @pl.when(group < 2)
    def _consume():
        """Owns tiles me, me + 2, ...; sums all tiles over columns me * C / 2 and on."""
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        me, other = group, 1 - group
        columns = pl.ds(me * half, half)

        def per_row(value):
            return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), by_row)

        def load_statistic(owner, which):
            return plgpu.load(statistics_smem.at[owner, which], layout=by_row, optimized=False)

        def scaled(out, factor):
            return out * lax.broadcast_in_dim(factor, out.shape, [0])

        def add_tile(state, owner, decay, largest):
            """Takes up a tile's weights and keys, which lie in the slots of its owner."""
            out, _, total = state
            out = mosaic.multiply_add(
                scaled(out, decay), weights_smem.at[owner], keys_smem.at[owner, me]
            )
            plgpu.barrier_arrive(keys_free.at[owner])
            return out, largest, total * decay

        def add_tile_of_other(state):
            plgpu.barrier_wait(weights_ready.at[other])
            decay, largest = load_statistic(other, DECAY), load_statistic(other, LARGEST)
            state = add_tile(state, other, decay, largest)
            plgpu.barrier_arrive(weights_free.at[other])
            return state

        def add_own_tile(turn, state):
            has_before = turn + me > 0
            state = lax.cond(has_before, add_tile_of_other, lambda state: state, state)
            first = mosaic.opaque(0)
            logits = mosaic.multiply(
                [
                    (queries_smem.at[first + w], keys_smem.at[me, first + w].transpose((1, 0)))
                    for w in range(2)
                ],
                ready=[ready.at[me] for ready in keys_ready],
            )
            bias = plgpu.load(bias_smem.at[me], layout=by_column, optimized=False)
            bias = lax.broadcast_in_dim(bias, logits.shape, [1])
            logits = jnp.where(bias < 0, bias, logits * (s.scale * LOG2_E))  # a NaN query too
            largest = jnp.maximum(state[1], logits.max(axis=1))
            decay = jnp.exp2(state[1] - largest)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(largest, logits.shape, [0]))
            added = weights.sum(axis=1)

            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(weights_free.at[me])

            mosaic_memory.store_shared(
                weights_smem.at[me], weights.astype(s.dtype), plgpu.Layout.WGMMA
            )
            mosaic_memory.store_shared(statistics_smem.at[me, DECAY], decay, by_row)
            mosaic_memory.store_shared(statistics_smem.at[me, LARGEST], largest, by_row)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready.at[me])
            out, largest, total = add_tile(state, me, decay, largest)
            return out, largest, total + added

        def add_squares_of_other(squares):
            target = statistics_smem.at[me, TOTAL]
            mosaic_memory.store_shared(target, squares, mosaic.ROW)
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.totals_ready)
            plgpu.barrier_wait(scratch.totals_ready)
            theirs = statistics_smem.at[other, TOTAL]
            return squares + plgpu.load(theirs, layout=mosaic.ROW, optimized=False)

        # Wanted last; asked for now, it is there by then.
        own_sink = None
        if s.splits == 1 or s.heads_of_cta == HEADS:
            own_sink = plgpu.load(inputs.sink.at[cta.heads], layout=by_row, optimized=False)
        own_half = me, queries_smem.at[me], scratch.queries_landed.at[me]
        load_queries(
            inputs,
            s,
            cta,
            [own_half],
            store_shared=mosaic_memory.store_shared,
            add_squares=add_squares_of_other,
        )
        plgpu.barrier_arrive(scratch.queries_ready)
        plgpu.barrier_wait(scratch.queries_ready)
        zeros = plgpu.layout_cast(jnp.zeros((HEADS, half), jnp.float32), plgpu.Layout.WGMMA)
        turns = (cta.num_tiles + other) // 2
        state = lax.fori_loop(0, turns, add_own_tile, (zeros, per_row(FLOOR), per_row(0.0)))
        is_last_of_other = cta.num_tiles % 2 == me
        state = lax.cond(is_last_of_other, add_tile_of_other, lambda state: state, state)
        out, largest, total = state

        @pl.when(turns > 0)
        def _():
            plgpu.barrier_wait(weights_free.at[me])

        mosaic_memory.store_shared(statistics_smem.at[me, TOTAL], total, by_row)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.totals_ready)
        plgpu.barrier_wait(scratch.totals_ready)
        total = load_statistic(0, TOTAL) + load_statistic(1, TOTAL)
        if s.splits > 1:
            outputs.sums.at[cta.split, cta.token, cta.heads, columns][...] = out

            @pl.when(me == 0)
            def _():
                outputs.statistics.at[cta.split, cta.token, 0, cta.heads][...] = largest
                outputs.statistics.at[cta.split, cta.token, 1, cta.heads][...] = total

            return
        assert own_sink is not None
        out = scaled(out, inverse_total(largest, total, own_sink))
        mosaic_memory.store_shared(queries_smem.at[me], as_bf16(out, s.dtype), plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        if s.rotated:
            for number in range(2):
                turn = functools.partial(
                    rotate_half,
                    queries_smem.at[number],
                    number,
                    inputs.angles.at[cta.token],
                    shapes=s,
                    store_shared=mosaic_memory.store_shared,
                )
                pl.when(me == number)(turn)
            plgpu.commit_smem()
        out_smem = queries_smem.at[me]
        if s.heads_of_cta < HEADS:
            out_smem = out_smem.at[pl.ds(0, s.heads_of_cta)]
        plgpu.copy_smem_to_gmem(out_smem, outputs.sums.at[cta.token, cta.own_heads, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(group == 2)
    def _produce():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        gather_keys(
            inputs,
            s,
            cta,
            range(s.dim // GROUP),
            target_of=lambda slot, i: keys_smem.at[slot, i],
            bias_smem=bias_smem,
            keys_ready=keys_ready,
            keys_free=keys_free,
            store_shared=mosaic_memory.store_shared,
        )


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
