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

import dataclasses
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

plgpu: Any = mosaic_gpu  # whose annotations describe its insides and not what callers may do

SWIZZLE = 64
SWIZZLED = (plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE))
"""Shared memory of 16-bit elements as these products take it."""
PRODUCERS = 2
REGISTERS = (216, 144)
"""Registers of a consumer's thread and a producer's; the three warpgroups share 3 * 168."""
BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of a value for each row, a head, and for each column of a product."""
SLACK = 8.0
"""How far, in powers of 2, a logit may exceed the maximum that weights are relative to."""


class Scratch(NamedTuple):
    """What a CTA has to itself: shared memory, tensor memory, barriers.

    Of two, one is for each half of the queries' columns, or for each stage, which are of tiles in
    turn.

    Attributes:
      queries_smem: [2, 64, C / 2], a half each; in the end the output.
      keys_smem: [2, 64, C], of each stage.
      weights_smem: [64, 64], of a tile.
      bias_smem: f32[2, 64], of each stage: 0 for a key and minus infinity for none.
      logits_tmem: f32[64, 64], of a tile.
      sums_tmem: f32[64, C / 4] four times, the accumulator, a quarter of the columns each.
      queries_landed: for each half: its copy has come.
      keys_ready: for each stage: all producers have stored their share of its tile.
      keys_free: for each stage: the tensor core has read its tile.
      products_ready: the tensor core has written what was asked of it.
      weights_ready: the consumer's threads have stored the weights.
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


class State(NamedTuple):
    """What the consumer carries from tile to tile, beside the accumulator in tensor memory.

    Attributes:
      followed: f32[64], a value a row: the logit, times log2(e), that weights are relative to.
      total: f32[64], likewise: the sum of all weights so far.
    """

    followed: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True)
class Consumer:
    """The warpgroup that starts products and takes exponentials, and what it works with."""

    inputs: Operands
    scratch: Scratch
    shapes: Shapes
    cta: Place

    def columns(self, count: int) -> list[pl.Slice]:
        """All columns in so many equal runs."""
        size = self.shapes.dim // count
        return [pl.ds(i * size, size) for i in range(count)]


def _attention_kernel(
    inputs: Operands, outputs: Outputs, scratch: Scratch, *, shapes: Shapes
) -> None:
    """A consumer and producers."""
    cta, warpgroup = find_place(inputs, shapes), lax.axis_index("warpgroup")
    consumer = Consumer(inputs, scratch, shapes, cta)

    @pl.when(warpgroup == 0)
    def _consume() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        _attend(consumer, outputs)

    def produce(share: int) -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        halves = consumer.columns(2)
        gather_keys(
            inputs,
            shapes,
            cta,
            range(share, shapes.dim // GROUP, PRODUCERS),
            target_of=lambda stage, half: scratch.keys_smem.at[stage, :, halves[half]],
            bias_smem=scratch.bias_smem if share == 0 else None,
            keys_ready=[scratch.keys_ready],
            keys_free=scratch.keys_free,
            store_shared=_store_shared,
        )

    for share in range(PRODUCERS):
        pl.when(warpgroup == 1 + share)(functools.partial(produce, share))


def _attend(consumer: Consumer, outputs: Outputs) -> None:
    """All that the consumer does: queries, tiles, the output."""
    scratch, shapes = consumer.scratch, consumer.shapes
    halves = [(i, scratch.queries_smem.at[i], scratch.queries_landed.at[i]) for i in range(2)]
    load_queries(consumer.inputs, shapes, consumer.cta, halves, store_shared=_store_shared)
    state = State(followed=_per_row(FLOOR), total=_per_row(0.0))
    add_tile = functools.partial(_add_tile, consumer=consumer)
    # The first tile overwrites the accumulator in tensor memory, which nobody clears.
    state = add_tile(0, state, is_first=True)
    state = lax.fori_loop(1, consumer.cta.num_tiles, add_tile, state)
    # The last product with keys has been started, but not waited for.
    plgpu.tcgen05_commit_arrive(scratch.products_ready)
    plgpu.barrier_wait(scratch.products_ready)
    if shapes.splits > 1:
        _store_part(consumer, outputs, state)
    else:
        _store_output(consumer, outputs, state)


def _add_tile(
    turn: jax.Array | int, state: State, *, consumer: Consumer, is_first: bool = False
) -> State:
    """Weighs a tile's keys and has them added to the accumulator."""
    scratch, shapes, stage = consumer.scratch, consumer.shapes, lax.rem(turn, 2)
    logits = _find_logits(consumer, stage)
    followed, total = state
    largest = jnp.maximum(followed, logits.max(axis=1))
    if is_first:
        followed = largest
    else:
        # One answer for all 64 rows, so that the warpgroup's threads go the same way.
        has_outgrown = (largest - followed > SLACK).astype(jnp.int32).max() > 0
        largest = jnp.where(has_outgrown, largest, followed)
        decay = jnp.exp2(followed - largest)
        followed, total = largest, total * decay
        pl.when(has_outgrown)(functools.partial(_scale_sums, consumer, decay))
    weights = jnp.exp2(logits - lax.broadcast_in_dim(followed, logits.shape, [0]))
    total = total + weights.sum(axis=1)
    # The tensor core has read the weights of the tile before: their logits' product came after it.
    _store_shared(scratch.weights_smem, weights.astype(shapes.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.weights_ready)  # once a thread's stores are out
    plgpu.barrier_wait(scratch.weights_ready)  # of all threads, before one starts the product
    for tmem, columns in zip(scratch.sums_tmem, consumer.columns(4), strict=True):
        keys = scratch.keys_smem.at[stage, :, columns]
        # [64, 64] @ [64, C / 4], a quarter of the accumulator.
        plgpu.tcgen05_mma(tmem, scratch.weights_smem, keys, accumulate=not is_first)
    # Arrives when the tensor core has read the keys: the producers may fill the stage again.
    plgpu.tcgen05_commit_arrive(scratch.keys_free.at[stage])
    return State(followed, total)


def _find_logits(consumer: Consumer, stage: jax.Array) -> jax.Array:
    """f32[64, 64] in WGMMA layout, a tile's logits times log2(e); minus infinity for no key."""
    scratch, shapes = consumer.scratch, consumer.shapes
    first = mosaic.opaque(0)  # else descriptors of the queries would stay in registers
    # The stage is the consumer's from here on, until `keys_free`.
    plgpu.barrier_wait(scratch.keys_ready.at[stage])
    for half, columns in enumerate(consumer.columns(2)):
        keys = scratch.keys_smem.at[stage, :, columns].transpose((1, 0))  # [C / 2, 64], a view
        queries = scratch.queries_smem.at[first + half]
        # [64, C / 2] @ [C / 2, 64]; the first half overwrites the logits of the tile before.
        plgpu.tcgen05_mma(scratch.logits_tmem, queries, keys, accumulate=half > 0)
    plgpu.tcgen05_commit_arrive(scratch.products_ready)  # once both have ended
    bias = plgpu.load(scratch.bias_smem.at[stage], layout=BY_COLUMN, optimized=False)
    plgpu.barrier_wait(scratch.products_ready)  # from here on threads own the logits' memory
    logits = _load_products(scratch.logits_tmem)
    bias = lax.broadcast_in_dim(bias, logits.shape, [1])
    return jnp.where(bias < 0, bias, logits * (shapes.scale * LOG2_E))  # a NaN query too


def _scale_sums(consumer: Consumer, factor: jax.Array) -> None:
    """The accumulator times f32[64], through registers."""
    for tmem in consumer.scratch.sums_tmem:
        sums = _load_products(tmem)
        sums = sums * lax.broadcast_in_dim(factor, sums.shape, [0])
        plgpu.async_store_tmem(tmem, sums)  # back to where they were
    plgpu.commit_tmem()  # before the tensor core adds to what threads have stored


def _store_part(consumer: Consumer, outputs: Outputs, state: State) -> None:
    """Of a split: its sums as they are, and its statistics."""
    cta = consumer.cta
    for tmem, columns in zip(consumer.scratch.sums_tmem, consumer.columns(4), strict=True):
        outputs.sums.at[cta.split, cta.token, cta.heads, columns][...] = _load_products(tmem)
    outputs.statistics.at[cta.split, cta.token, 0, cta.heads][...] = state.followed  # f32[64]
    outputs.statistics.at[cta.split, cta.token, 1, cta.heads][...] = state.total


def _store_output(consumer: Consumer, outputs: Outputs, state: State) -> None:
    """Without splits: divides, rounds, rotates, and copies the output to device memory."""
    scratch, shapes, cta = consumer.scratch, consumer.shapes, consumer.cta
    own_sink = plgpu.load(consumer.inputs.sink.at[cta.heads], layout=BY_ROW, optimized=False)
    factor = inverse_total(state.followed, state.total, own_sink)
    # Where the queries were, which nobody reads any more.
    quarter = shapes.dim // 4
    for i, tmem in enumerate(scratch.sums_tmem):
        out = _load_products(tmem)
        out = out * lax.broadcast_in_dim(factor, out.shape, [0])
        target = scratch.queries_smem.at[i // 2, :, pl.ds(i % 2 * quarter, quarter)]
        _store_shared(target, as_bf16(out, shapes.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()  # columns are rotated by other threads than stored them
    if shapes.rotated:
        angles = consumer.inputs.angles.at[cta.token]
        for i in range(2):
            half = scratch.queries_smem.at[i]
            rotate_half(half, i, angles, shapes=shapes, store_shared=_store_shared)
        plgpu.commit_smem()  # before the copy engine reads what threads have stored
    for i, columns in enumerate(consumer.columns(2)):
        out_smem = scratch.queries_smem.at[i]
        if shapes.heads_of_cta < HEADS:
            out_smem = out_smem.at[pl.ds(0, shapes.heads_of_cta)]
        # The copy engine's until the wait below.
        plgpu.copy_smem_to_gmem(out_smem, outputs.sums.at[cta.token, cta.own_heads, columns])
    plgpu.wait_smem_to_gmem(0)  # the CTA's memory is read until then


def _load_products(tmem: Ref) -> jax.Array:
    """Tensor memory that the tensor core has written, into registers."""
    # In WGMMA layout: `BY_ROW` goes with its rows, and `_store_shared` takes it.
    products = plgpu.async_load_tmem(tmem, layout=plgpu.Layout.WGMMA)
    plgpu.wait_load_tmem()  # until the registers have them
    return products


def _per_row(value: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), BY_ROW)  # one value: no move


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
