"""Sparse attention through Mosaic GPU, for Blackwell. It has never run on a card of that kind.

One CTA: one query token, 64 of its heads, one split of its keys, in tiles of 64. Warpgroups:

    producers    each half of a tile's columns, from device memory through registers, one tile
                 ahead; to 16 bits, swizzled                                -> keys_smem [2, 64, C]
    consumer     one of its threads starts the products, all take exponentials:
                     logits_tmem = Q K^T, softmax                          -> weights_smem
                     sums_tmem += weights keys

Sums of 64 x 512 in f32 take half of tensor memory; 128 heads would leave nothing for logits. A
product of 64 rows lies folded over the lanes, its columns in two halves, and half of 64 keys is
less than a swizzle of 128 bytes spans: operands have one of 64.

A maximum is followed only once one of the 64 outgrew it by 2^8, for all sums pass through registers
then. Bytes: those of the keys, and 2 * 64 * C of queries and of output; by count of instructions
the products bound it. Products are of f16 or bf16 (`Shapes.dtype`), with f32 sums. More:
docs/kernels/sparse_attention.md. Source: deepseek_v4.md section 1.3, step 9.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.devices import B200
from pallas_kernels.sparse_attention.call_shapes import FLOOR, GROUP, HEADS, LOG2_E, TILE, Shapes
from pallas_kernels.sparse_attention.launch import Kernel, as_bf16, inverse_total, launch
from pallas_kernels.sparse_attention.loads import (
    Operands,
    Outputs,
    Ref,
    find_place,
    gather_keys,
    load_queries,
)
from pallas_kernels.sparse_attention.rope import rotate_half

plgpu: Any = mosaic_gpu  # whose annotations describe its insides and not what callers may do

SWIZZLE = 64
SWIZZLED = (plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE))
"""Shared memory of 16-bit elements as these products take it."""
PRODUCERS = 2
REGISTERS = (216, 144)
"""Registers of a consumer's thread and a producer's; the three warpgroups share 3 * 168."""
SLACK = 8.0
"""How far, in powers of 2, a logit may exceed the maximum that weights are relative to."""


class Scratch(NamedTuple):
    """What a CTA has to itself: shared memory, tensor memory, barriers.

    Of two, one is for each half of the queries' columns, or for each slot of tiles in turn;
    `sums_tmem` are a quarter of the columns each.
    """

    queries_smem: Any
    keys_smem: Any
    weights_smem: Any
    bias_smem: Any
    logits_tmem: Any
    sums_tmem: Any
    queries_landed: Any
    keys_ready: Any
    keys_free: Any
    products_ready: Any
    weights_ready: Any


def _attention_kernel(inputs: Operands, outputs: Outputs, scratch: Scratch, *, shapes: Shapes):
    s = shapes
    cta, group = find_place(inputs, s), lax.axis_index("warpgroup")
    queries_smem, keys_smem = scratch.queries_smem, scratch.keys_smem
    weights_smem, bias_smem = scratch.weights_smem, scratch.bias_smem
    logits_tmem, sums_tmem = scratch.logits_tmem, scratch.sums_tmem
    keys_ready, keys_free = scratch.keys_ready, scratch.keys_free
    products_ready, weights_ready = scratch.products_ready, scratch.weights_ready
    quarters = [pl.ds(i * s.dim // 4, s.dim // 4) for i in range(4)]
    halves = [pl.ds(i * s.dim // 2, s.dim // 2) for i in range(2)]
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @pl.when(group == 0)
    def _consume():
        plgpu.set_max_registers(REGISTERS[0], action="increase")

        def load_products(tmem):
            products = plgpu.async_load_tmem(tmem, layout=plgpu.Layout.WGMMA)
            plgpu.wait_load_tmem()
            return products

        def scale_sums(factor):
            for tmem in sums_tmem:
                sums = load_products(tmem)
                sums = sums * lax.broadcast_in_dim(factor, sums.shape, [0])
                plgpu.async_store_tmem(tmem, sums)
            plgpu.commit_tmem()

        def add_tile(i, state, *, is_first=False):
            followed, total = state
            slot, first = lax.rem(i, 2), mosaic.opaque(0)
            plgpu.barrier_wait(keys_ready.at[slot])
            for part, columns in enumerate(halves):
                keys = keys_smem.at[slot, :, columns].transpose((1, 0))
                plgpu.tcgen05_mma(
                    logits_tmem, queries_smem.at[first + part], keys, accumulate=part > 0
                )
            plgpu.tcgen05_commit_arrive(products_ready)
            bias = plgpu.load(bias_smem.at[slot], layout=by_column, optimized=False)
            plgpu.barrier_wait(products_ready)
            logits = load_products(logits_tmem)
            bias = lax.broadcast_in_dim(bias, logits.shape, [1])
            logits = jnp.where(bias < 0, bias, logits * (s.scale * LOG2_E))  # a NaN query too
            largest = jnp.maximum(followed, logits.max(axis=1))
            if is_first:
                followed = largest
            else:
                has_outgrown = (largest - followed > SLACK).astype(jnp.int32).max() > 0
                largest = jnp.where(has_outgrown, largest, followed)
                decay = jnp.exp2(followed - largest)
                followed, total = largest, total * decay
                pl.when(has_outgrown)(functools.partial(scale_sums, decay))
            weights = jnp.exp2(logits - lax.broadcast_in_dim(followed, logits.shape, [0]))
            total = total + weights.sum(axis=1)
            _store_shared(weights_smem, weights.astype(s.dtype), plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready)
            plgpu.barrier_wait(weights_ready)
            for tmem, columns in zip(sums_tmem, quarters, strict=True):
                keys = keys_smem.at[slot, :, columns]
                plgpu.tcgen05_mma(tmem, weights_smem, keys, accumulate=not is_first)
            plgpu.tcgen05_commit_arrive(keys_free.at[slot])
            return followed, total

        parts = [(i, queries_smem.at[i], scratch.queries_landed.at[i]) for i in range(2)]
        load_queries(inputs, s, cta, parts, store_shared=_store_shared)
        state = tuple(
            plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), by_row)
            for value in (FLOOR, 0.0)
        )
        state = add_tile(0, state, is_first=True)
        followed, total = lax.fori_loop(1, cta.num_tiles, add_tile, state)
        plgpu.tcgen05_commit_arrive(products_ready)
        plgpu.barrier_wait(products_ready)
        if s.splits > 1:
            for tmem, columns in zip(sums_tmem, quarters, strict=True):
                outputs.sums.at[cta.split, cta.token, cta.heads, columns][...] = load_products(tmem)
            outputs.statistics.at[cta.split, cta.token, 0, cta.heads][...] = followed
            outputs.statistics.at[cta.split, cta.token, 1, cta.heads][...] = total
            return
        own_sink = plgpu.load(inputs.sink.at[cta.heads], layout=by_row, optimized=False)
        factor = inverse_total(followed, total, own_sink)
        for i, tmem in enumerate(sums_tmem):
            out = load_products(tmem)
            out = out * lax.broadcast_in_dim(factor, out.shape, [0])
            target = queries_smem.at[i // 2, :, pl.ds(i % 2 * s.dim // 4, s.dim // 4)]
            _store_shared(target, as_bf16(out, s.dtype), plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        if s.rotated:
            angles = inputs.angles.at[cta.token]
            for i in range(2):
                half = queries_smem.at[i]
                rotate_half(half, i, angles, shapes=s, store_shared=_store_shared)
            plgpu.commit_smem()
        for i, columns in enumerate(halves):
            out_smem = queries_smem.at[i]
            if s.heads_of_cta < HEADS:
                out_smem = out_smem.at[pl.ds(0, s.heads_of_cta)]
            plgpu.copy_smem_to_gmem(out_smem, outputs.sums.at[cta.token, cta.own_heads, columns])
        plgpu.wait_smem_to_gmem(0)

    def produce(share):
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        gather_keys(
            inputs,
            s,
            cta,
            range(share, s.dim // GROUP, PRODUCERS),
            target_of=lambda slot, i: keys_smem.at[slot, :, halves[i]],
            bias_smem=bias_smem if share == 0 else None,
            keys_ready=[keys_ready],
            keys_free=keys_free,
            store_shared=_store_shared,
        )

    for share in range(PRODUCERS):
        pl.when(group == 1 + share)(functools.partial(produce, share))


def _store_shared(target: Ref, values: jax.Array, layout: Any) -> None:
    """Stores an array of the given layout; as `mosaic_memory.store_shared`, but for the swizzle."""
    if interpreting():
        target[...] = values
        return
    transforms = SWIZZLED if values.ndim == 2 else ()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), layout))
    def write(_, target, values):
        if transforms:
            values.store_tiled(target, swizzle=SWIZZLE)
        else:
            values.store_untiled(target, optimized=False)

    write(target, values)


def _scratch(dim: int, dtype: Any) -> Scratch:
    tile = functools.partial(plgpu.SMEM, dtype=dtype, transforms=SWIZZLED)
    return Scratch(
        queries_smem=tile((2, HEADS, dim // 2)),
        keys_smem=tile((2, TILE, dim)),
        weights_smem=tile((HEADS, TILE)),
        bias_smem=plgpu.SMEM((2, TILE), jnp.float32),
        logits_tmem=plgpu.TMEM((HEADS, TILE), jnp.float32),
        sums_tmem=[plgpu.TMEM((HEADS, dim // 4), jnp.float32)] * 4,
        queries_landed=plgpu.Barrier(num_barriers=2),
        keys_ready=plgpu.Barrier(num_arrivals=PRODUCERS, num_barriers=2),
        keys_free=plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        products_ready=plgpu.Barrier(orders_tensor_core=True),
        weights_ready=plgpu.Barrier(orders_tensor_core=True),
    )


sparse_attention = functools.partial(
    launch, Kernel(_attention_kernel, _scratch, 1 + PRODUCERS, B200)
)
"""See `op.sparse_attention`."""
