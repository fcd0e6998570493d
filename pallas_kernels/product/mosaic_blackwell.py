"""Products of rows with weights on Blackwell: what its two consumers do. It has run on no card.

A product has 128 rows there, both consumers' tiles of 64 outputs, and goes to tensor memory:

    FP8, dense     the tiles as they lie in shared memory
    MXFP4          each consumer unpacks its tile to E4M3               -> unpacked_smem
    consumer 0     starts [128, tile_m] = tiles x^T, f32, a group of inputs ahead
                                                                        -> accumulators_tmem
    consumer g     its half of the rows of x:
                   total += product * scale of the tile (FP8) or row (MXFP4) * scale of x

With a gate and an up projection, the upper 64 rows are the up's, and two of a consumer's warps have
them.

Products of FP8 codes with scales of 32 inputs, which Blackwell has, serve neither format: block FP8
allows scales of any f32, and MXFP4's codes would have to be multiplied with FP4 codes of x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu import mosaic_memory
from pallas_kernels.product import exchange
from pallas_kernels.product.operands import SwiGLU
from pallas_kernels.product.round_rows import await_rows
from pallas_kernels.product.store_transposed import Place, store_transposed
from pallas_kernels.product.tiling import CONSUMERS, TILE_N, TMEM_STAGES, WARPGROUP_N
from pallas_kernels.product.work import Work

plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.TCGEN05


class _Share(NamedTuple):
    """A consumer's halves: of the outputs, which it unpacks, and of x, which it adds and stores.

    Attributes:
      first: i32[], first of its rows of x, of the tile's.
      rows: how many.
      first_output: i32[], first of its `WARPGROUP_N` outputs, of the tile's.
    """

    first: jax.Array
    rows: int
    first_output: jax.Array

    @classmethod
    def of(cls, work: Work) -> _Share:
        """This consumer's."""
        rows = work.tiling.tile_m // CONSUMERS
        return cls(work.warpgroup * rows, rows, work.warpgroup * WARPGROUP_N)


def mainloop(work: Work) -> jax.Array:
    """Multiplies stage after stage: f32[128 outputs, half of tile_m]."""
    share, groups = _Share.of(work), work.groups_of_stage

    def add_stage(k_iter: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        total, tile_scales = carry
        next_scales = _tile_scales(work, k_iter + 1)
        for g in range(groups):
            # The next group is multiplied while this one is scaled and added.
            if g + 1 < groups:
                _start(work, share, k_iter, g + 1)
            else:
                pl.when(k_iter + 1 < work.k_iters)(lambda: _start(work, share, k_iter + 1, 0))
            total = _add(work, share, k_iter, g, total, tile_scales)
        # All products of the stage have ended, which `_add` waited for: it is the producer's again.
        if interpreting():  # which wants loads fenced from later copies; a GPU's are done here
            plgpu.commit_smem()
        plgpu.barrier_arrive(work.scratch.empty.at[lax.rem(k_iter, work.tiling.stages)])
        return total, next_scales

    # In the layout in which products leave tensor memory: sums stay in the thread that began them.
    zeros = plgpu.layout_cast(jnp.zeros((TILE_N, share.rows), jnp.float32), _LAYOUT)
    await_rows(work)
    # The loop adds what was started a turn before it: the first group is started here.
    _start(work, share, 0, 0)
    total, _ = lax.fori_loop(0, work.k_iters, add_stage, (zeros, _tile_scales(work, 0)))
    if interpreting():  # as in `producer.await_empty`
        for tmem_stage in range(min(TMEM_STAGES, work.k_iters * groups)):
            plgpu.barrier_wait(work.scratch.accumulators_empty.at[tmem_stage])
    return total


def epilogue(
    work: Work, accumulators: jax.Array, outputs: list[Any], swiglu: SwiGLU | None
) -> None:
    """Stores the outputs of this consumer's rows, after SwiGLU where that follows.

    The two halves of an activation are in one warpgroup: its upper threads have the up projection,
    and leave it for the lower ones.
    """
    share, total, [out_gmem] = _Share.of(work), accumulators, outputs
    if swiglu is None:
        _store(work, share, out_gmem, total, work.tile.n_index * TILE_N, TILE_N)
        return
    total = total.astype(swiglu.dtype).astype(jnp.float32)  # rounded as a stored product is
    mine = pl.ds(share.first * WARPGROUP_N, share.rows * WARPGROUP_N)
    up_smem = work.scratch.up_smem.at[mine]
    exchange.store_upper(up_smem, jnp.clip(total, -swiglu.limit, swiglu.limit), _LAYOUT)
    plgpu.commit_smem()  # waits for the whole warpgroup: what the upper half wrote is there
    gate = work.activate(total, swiglu.limit, work.tile.first_row + share.first, _LAYOUT)
    up = exchange.load_lower(up_smem, (TILE_N, share.rows), _LAYOUT)
    # Rows beyond WARPGROUP_N are arbitrary here, and not stored.
    _store(work, share, out_gmem, gate * up, work.tile.n_index * WARPGROUP_N, WARPGROUP_N)


def _tmem_stage(work: Work, k_iter: int | jax.Array, g: int) -> jax.Array:
    """Where in tensor memory the products of a group of inputs are, one of `TMEM_STAGES`."""
    return lax.rem(jnp.int32(k_iter * work.groups_of_stage + g), TMEM_STAGES)


def _products(work: Work, tmem_stage: jax.Array, term: int, first: Any, count: int) -> Any:
    """f32[128, count] in tensor memory, products of some rows of a term of x."""
    start = (tmem_stage * work.shapes.num_terms + term) * work.tiling.tile_m + first
    return work.scratch.accumulators_tmem.at[:, pl.ds(start, count)]


def _start(work: Work, share: _Share, k_iter: int | jax.Array, g: int) -> None:
    """Starts the products of a group of inputs: both consumers unpack, the first one multiplies."""
    stage = lax.rem(jnp.int32(k_iter), work.tiling.stages)
    tmem_stage = _tmem_stage(work, k_iter, g)
    if g == 0:  # from here on the stage is the consumers': all copies into it have arrived
        plgpu.barrier_wait(work.scratch.full.at[stage])

    # From the third group on, its place in tensor memory has been used: until both consumers have
    # read it. Tensor memory and the place of unpacked codes are free with it.
    @pl.when(k_iter * work.groups_of_stage + g >= TMEM_STAGES)
    def _():
        plgpu.barrier_wait(work.scratch.accumulators_empty.at[tmem_stage])  # both arrive in `_add`

    if work.shapes.is_mxfp4:
        _unpack(work, share, stage, g, tmem_stage)

    # Consumer 0 starts them for both: f32[128, tile_m], of which each adds half the rows of x.
    @pl.when(work.warpgroup == 0)
    def _():
        tiles = work.scratch.codes_smem.at[stage, g]  # e4m3 or bf16[128, group_k]
        if work.shapes.is_mxfp4:
            tiles = work.scratch.unpacked_smem.at[tmem_stage]  # e4m3[128, 128]
        for term in range(work.shapes.num_terms):
            rows = work.rows_of(jnp.int32(k_iter), g, term).transpose((1, 0))  # a view
            products = _products(work, tmem_stage, term, 0, work.tiling.tile_m)
            plgpu.tcgen05_mma(products, tiles, rows, accumulate=False)
        # The tensor core arrives itself, once all products above have ended.
        plgpu.tcgen05_commit_arrive(work.scratch.accumulators_full.at[tmem_stage])


def _unpack(work: Work, share: _Share, stage: jax.Array, g: int, tmem_stage: jax.Array) -> None:
    """Each consumer's 64 rows of MXFP4 as E4M3 in shared memory, where tcgen05 takes them from."""
    own_rows = pl.ds(share.first_output, WARPGROUP_N)
    operand, factor = work.unpack(stage, g)  # e4m3[64, 128], f32[64]
    target = work.scratch.unpacked_smem.at[tmem_stage, own_rows]
    mosaic_memory.store_shared(target, operand, plgpu.Layout.WGMMA_8BIT)
    target = work.scratch.factors_smem.at[tmem_stage, own_rows]
    mosaic_memory.store_shared(target, factor, plgpu.Layout.WGMMA.reduce(1))
    # Stores of threads become visible to the tensor core, then both halves are waited for.
    plgpu.commit_smem()
    plgpu.barrier_arrive(work.scratch.unpacked_full.at[tmem_stage])
    plgpu.barrier_wait(work.scratch.unpacked_full.at[tmem_stage])  # 64 rows are the other's


def _tile_scales(work: Work, k_iter: int | jax.Array) -> list[list[jax.Array]]:
    """f32[] for each group of inputs of a stage, and each tile; of FP8 alone."""
    if not work.shapes.is_fp8:
        return []
    return [
        [work.scale_of_tile(tile, work.group_of(k_iter, g)) for tile in range(CONSUMERS)]
        for g in range(work.groups_of_stage)
    ]


def _row_factors(work: Work, tmem_stage: jax.Array, tile_scales: list[jax.Array]) -> jax.Array:
    """f32[128], of each row of the tiles."""
    by_row = _LAYOUT.reduce(1)
    if work.shapes.is_mxfp4:
        return plgpu.load(work.scratch.factors_smem.at[tmem_stage], layout=by_row, optimized=False)
    row = plgpu.broadcasted_iota(jnp.int32, (TILE_N,), 0, layout=by_row)
    return jnp.where(row < WARPGROUP_N, *tile_scales)  # rows 0 .. 63 are consumer 0's tile


def _add(
    work: Work, share: _Share, k_iter: jax.Array, g: int, total: jax.Array, tile_scales: Any
) -> jax.Array:
    """Adds the products of a group of inputs, this consumer's rows of x."""
    tmem_stage, terms = _tmem_stage(work, k_iter, g), range(work.shapes.num_terms)
    scales = []
    if not work.shapes.is_dense:
        scales = [
            plgpu.load(
                work.row_scales(k_iter, g, term, share.first, share.rows),
                layout=_LAYOUT.reduce(0),
                optimized=False,
            )
            for term in terms
        ]
    plgpu.barrier_wait(work.scratch.accumulators_full.at[tmem_stage])  # the products have ended
    for term in terms:
        products = _products(work, tmem_stage, term, share.first, share.rows)
        product = plgpu.async_load_tmem(products, layout=_LAYOUT)  # f32[128, share.rows]
        plgpu.wait_load_tmem()  # until the registers have them
        if not work.shapes.is_dense:
            factor = _row_factors(work, tmem_stage, tile_scales[g] if work.shapes.is_fp8 else [])
            product = product * lax.broadcast_in_dim(factor, product.shape, [0])
            scale = lax.broadcast_in_dim(scales[term], product.shape, [1])
            # A thread has all columns of its row, and so all their scales: the cast moves nothing.
            product = product * plgpu.layout_cast(scale, _LAYOUT)
        total = total + product
    # Products and factors are in registers: consumer 0 may multiply into their place again.
    plgpu.barrier_arrive(work.scratch.accumulators_empty.at[tmem_stage])
    return total


def _store(
    work: Work, share: _Share, out_gmem: Any, values: jax.Array, first_column: Any, count: int
) -> None:
    """Stores `count` outputs of this consumer's rows, transposed: values are [outputs, rows]."""
    store_transposed(
        out_gmem.at[work.tile.split],
        values.astype(out_gmem.dtype),
        Place(work.tile.target_row + share.first, work.tile.num_rows - share.first, first_column),
        operand_order=work.shapes.is_mxfp4,
        num_columns=count,
        layout=_LAYOUT,
    )
