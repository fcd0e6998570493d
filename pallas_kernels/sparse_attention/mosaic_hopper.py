"""Sparse attention through Mosaic GPU, for Hopper.

One program: one query token, 64 of its heads, one split of its keys, in tiles of 64. Warpgroups:

    gatherer     addresses of a tile through ring and block table; its rows from device memory into
                 registers, one tile ahead; to 16 bits, swizzled            -> keys_smem[slot]
    attender a   owns tiles a, a + 2, ...: logits Q K^T, softmax           -> weights_smem[a]
                 all tiles: out[:, a C / 2 :] += weights keys[:, a C / 2 :]

64 x C sums in f32 do not fit one warpgroup's registers at C = 512, so two hold half each; that one
multiplies while the other takes exponentials comes with it. Both run the same instructions, which a
warp of each fetches side by side. Logits begin when half of a tile's columns are there.

Splits take tiles in turn, their number follows from shapes, and `combine_triton` adds them up: a
token's result depends on shapes and itself alone. Tiles beyond what a token sees are not looked at;
a split that has no other looks at one. So requests that have room for more entries pay for its
splits, and not for its keys: with room for 8,192, 64 requests of 128 entries take 21 us, of 1,024
40, where looking at all took 145 and 155.

Bytes: those of the keys, and 2 * 64 * C of queries and of output. In calls of few tiles latency
bounds it. A program of three tiles (128 requests of 32 HCA entries: 18.7 to 19.8 us), in thousands
of cycles: 5.5 until its queries are there and 7.7 until its first keys are, as all SMs ask for
theirs at once; 2.7 to store them, then 4 a tile, 1.5 of them waiting for loads; 9.2 after the last,
for logits 1.1, exponentials 0.7, both products 1.8, output 1.3 and its way to the L2 cache 2.9. In
large calls shared memory and the gatherer bound it together. Of 4,790 cycles a tile (64 requests of
8,192 entries, ncu) the L1 cache, whose ports shared memory has, was busy 76 %, when products read
1,790 lines of 128 bytes, 1,660 since; the gatherer writes 512. It waits a third of its time for
loads, as ptxas gives all of them one scoreboard and a turn ends with a wait for the last one
issued; the attenders wait half of theirs for keys. Asking for rows in the L2 cache first took 230
us to 197. What a turn is made of, by leaving it out (128 requests of 1,024 entries, 62.6 us, the
output stored in whole lines; without the prefetch 67): rows of the block table 7.5, entry numbers
3, the part that carries positions 7.5, half of the decoding 14; of what the gatherer does in turn,
each adds to the time.

Roads not taken, on one H200, us. 128 requests of 32 entries, beside this in one run, 19.1: rows of
the block table before a tile is stored, 19.7; the second tile asked for in the L2 cache at the
start, 19.1. Beside it in another, 19.2: half of the queries asked for after the first keys, 19.0,
and all of them, 19.2, though of one request 4 and 7 % more; the window's first tile without waiting
for the block table, 19.4. Rows that the L2 cache may drop first: in eight calls 0 to 1 % more.
Logits when half of a tile is there take 1 to 3 % less in programs of many tiles, and 0.3 us of 11
more where there is one, which waits once; in quarters 7 to 13 % more of 128 and 256 requests, and
places given back to the gatherer in halves, 3 to 8 % more. Beside the kernel
with queries by loads of each thread, 19.2 to 19.6: both attenders bringing the second tile as well,
20.0; a first turn of the gatherer without keys, so that its instructions are there when they are
needed, 20.8. 64 requests of 8,192, beside an earlier one, 195 to 200: two gatherers, each of 32
rows, 197; weights from registers, 196; barriers of a warp between loads, 195; rows of the block
table a turn earlier, 201; loads in sections of four, 209. The output by stores of whole lines in
place of a bulk copy, with which ptxas spills nothing: 77.3 where this takes 74.7 (256 x 640 keys),
62.6 where 60.2 (128 requests of 1,024). In a run of its own: loads half a turn ahead, each half
with a scoreboard of its own, 220 to 240. From before the prefetch: splits added up in clusters of
ten, through each other's shared memory, 20.4 and 42 (1 and 8 x 640 keys: 11.9, 15.8); half a tile
on its way in shared memory, 84 (256 x 640 keys: 76).

Products are of f16 or bf16 (`Shapes.dtype`), with f32 sums; weights are rounded to it.

Source: deepseek_v4.md section 1.3, step 9.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic, mosaic_memory
from pallas_kernels.sparse_attention.call_shapes import FLOOR, GROUP, HEADS, LOG2_E, TILE, Shapes
from pallas_kernels.sparse_attention.launch import as_bf16, inverse_total, launch
from pallas_kernels.sparse_attention.loads import Inputs, Ref, gather_keys, load_queries

CORES = 132
REGISTERS = (192, 120)
"""Of a thread that attends and one that gathers; 2 + 1 of them share the launch's 3 * 168."""
DECAY, LARGEST, TOTAL = range(3)


def _attention_kernel(
    inputs: Inputs, outputs: Sequence[Ref], scratch: Sequence[Ref], *, shapes: Shapes
):
    s = shapes
    (
        queries_smem,
        keys_smem,
        weights_smem,
        bias_smem,
        statistics_smem,
        queries_landed,
        queries_ready,
        *keys_ready,
        keys_free,
        weights_ready,
        weights_free,
        totals_ready,
    ) = scratch
    token, head, split = (lax.axis_index(name) for name in ("token", "head", "split"))
    group = lax.axis_index("warpgroup")
    heads = pl.ds(head * HEADS, HEADS)
    first_query = token * s.num_heads + head * HEADS
    half = s.dim // 2
    if s.tiles_per_split == 1:  # nothing hides a second wait
        keys_ready = keys_ready[:1]
    num_tiles = s.tiles_to_look_at(split, inputs.visible[token])
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @pl.when(group < 2)
    def _attend():
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

            mosaic_memory.store(weights_smem.at[me], weights.astype(s.dtype), plgpu.Layout.WGMMA)
            mosaic_memory.store(statistics_smem.at[me, DECAY], decay, by_row)
            mosaic_memory.store(statistics_smem.at[me, LARGEST], largest, by_row)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready.at[me])
            out, largest, total = add_tile(state, me, decay, largest)
            return out, largest, total + added

        # Wanted last; asked for now, it is there by then.
        own_sink = plgpu.load(inputs.sink.at[heads], layout=by_row, optimized=False)
        own_half = me, queries_smem.at[me], queries_landed.at[me]
        load_queries(inputs, s, first_query, [own_half], store=mosaic_memory.store)
        plgpu.barrier_arrive(queries_ready)
        plgpu.barrier_wait(queries_ready)
        zeros = plgpu.layout_cast(jnp.zeros((HEADS, half), jnp.float32), plgpu.Layout.WGMMA)
        turns = (num_tiles + other) // 2
        state = lax.fori_loop(0, turns, add_own_tile, (zeros, per_row(FLOOR), per_row(0.0)))
        is_last_of_other = num_tiles % 2 == me
        state = lax.cond(is_last_of_other, add_tile_of_other, lambda state: state, state)
        out, largest, total = state

        @pl.when(turns > 0)
        def _():
            plgpu.barrier_wait(weights_free.at[me])

        mosaic_memory.store(statistics_smem.at[me, TOTAL], total, by_row)
        plgpu.commit_smem()
        plgpu.barrier_arrive(totals_ready)
        plgpu.barrier_wait(totals_ready)
        total = load_statistic(0, TOTAL) + load_statistic(1, TOTAL)
        if s.splits > 1:
            outputs[0].at[split, token, heads, columns][...] = out

            @pl.when(me == 0)
            def _():
                outputs[1].at[split, token, 0, heads][...] = largest
                outputs[1].at[split, token, 1, heads][...] = total

            return
        out = scaled(out, inverse_total(largest, total, own_sink))
        mosaic_memory.store(queries_smem.at[me], as_bf16(out, s.dtype), plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries_smem.at[me], outputs[0].at[token, heads, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(group == 2)
    def _gather():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        gather_keys(
            inputs,
            s,
            token,
            split,
            num_tiles,
            range(s.dim // GROUP),
            target_of=lambda slot, i: keys_smem.at[slot, i],
            bias_smem=bias_smem,
            keys_ready=keys_ready,
            keys_free=keys_free,
            store=mosaic_memory.store,
        )


def _scratch_types(dim: int, dtype: Any) -> list[Any]:
    tile = functools.partial(plgpu.SMEM, dtype=dtype, transforms=mosaic.SWIZZLED)
    return [
        tile((2, HEADS, dim // 2)),
        tile((2, 2, TILE, dim // 2)),
        tile((2, HEADS, TILE)),
        plgpu.SMEM((2, TILE), jnp.float32),
        plgpu.SMEM((2, 3, HEADS), jnp.float32),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_arrivals=2),
        *[plgpu.Barrier(num_barriers=2)] * 2,
        plgpu.Barrier(num_arrivals=2, num_barriers=2),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_arrivals=2),
    ]


sparse_attention = functools.partial(launch, _attention_kernel, _scratch_types, 3, CORES)
"""See `op.sparse_attention`."""
