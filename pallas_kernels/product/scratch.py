"""What a CTA of a product has to itself: stages in shared memory, barriers, tensor memory.

`scratch_types` is the one place that says how large they are: the launch allocates them, and
`choose_tiling` asks `shared_bytes` how many stages fit.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.product.call_shapes import Shapes
from pallas_kernels.product.tiling import (
    CONSUMERS,
    GROUP_K,
    TILE_N,
    TMEM_STAGES,
    WARPGROUP_N,
    Tiling,
    scale_rows,
)

plgpu: Any = mosaic_gpu


class Scratch(NamedTuple):
    """Memory and barriers of a CTA; as types for the launch, as refs in the kernel.

    A barrier is full or empty: "full" is arrived at by who has written a place and waited for by
    who reads it, "empty" the other way round. S stages, G groups of inputs of a stage, P terms of
    x.

    Attributes:
      codes_smem: weights as they lie, [S, 2, G, 64, group_k]; of MXFP4 u8[S, 2, G, 64, 64]; where
        both consumers' tiles are one operand [S, G, 128, group_k].
      words_smem: i32[S, 2, G, 64], MXFP4's scales, four in a word.
      rows_smem: x, [S, P, G, tile_m, group_k]; where the kernel rounds it, all groups at once,
        [groups, P, tile_m, group_k].
      scales_smem: f32[S, P, G, scale_rows] of x, or [groups, P, scale_rows]; none of dense weights.
      full: of each stage: copies into it have arrived.
      empty: of each stage: both consumers have read it.
      up_smem: f32, what consumer 1, with the up projection, leaves for consumer 0.
      up_full: `up_smem` is written; Hopper's alone.
      up_empty: it is read, where it is written more than once.
      rows_full: rows that the kernel rounds are there, all before the first stage.
      unpacked_smem: e4m3[TMEM_STAGES, 128, 128], MXFP4 unpacked; Blackwell's, as all below.
      factors_smem: f32[TMEM_STAGES, 128], factors of its rows.
      unpacked_full: both consumers have unpacked their halves.
      accumulators_tmem: f32[128, TMEM_STAGES * P * tile_m].
      accumulators_full: products of a group of inputs are there.
      accumulators_empty: both consumers have added them.
    """

    codes_smem: Any
    words_smem: Any
    rows_smem: Any
    scales_smem: Any
    full: Any
    empty: Any
    up_smem: Any
    up_full: Any
    rows_full: Any = None
    up_empty: Any = None
    unpacked_smem: Any = None
    factors_smem: Any = None
    unpacked_full: Any = None
    accumulators_tmem: Any = None
    accumulators_full: Any = None
    accumulators_empty: Any = None


def scratch_types(shapes: Shapes, tiling: Tiling) -> Scratch:
    """What a CTA of such a call allocates."""
    groups, tile_m = shapes.groups_of_stage(tiling), tiling.tile_m
    per_stage = tiling.stages, CONSUMERS, groups
    of_rows = tiling.stages, shapes.num_terms, groups
    e4m3 = functools.partial(plgpu.SMEM, dtype=jnp.float8_e4m3fn, transforms=mosaic.SWIZZLED_BYTES)
    bf16 = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=mosaic.SWIZZLED)
    operand = bf16 if shapes.is_dense else e4m3
    if shapes.is_mxfp4:  # not swizzled: threads load it, to unpack it
        codes = plgpu.SMEM((*per_stage, WARPGROUP_N, GROUP_K // 2), jnp.uint8)
    elif shapes.joins_tiles:
        codes = operand((tiling.stages, groups, TILE_N, shapes.group_k))
    else:
        codes = operand((*per_stage, WARPGROUP_N, shapes.group_k))
    # Each copy of a stage arrives once: codes and scales of MXFP4 as one, others group by group.
    copies = CONSUMERS * (2 if shapes.is_mxfp4 else groups)
    # Rows that the CTA rounds itself are there once for all stages, and no copy of them arrives at
    # `full`.
    if shapes.rounds_rows:
        of_rows = shapes.k_groups // tiling.split_k, shapes.num_terms
    else:
        copies += shapes.num_terms * (groups + (not shapes.is_dense))
    scales = plgpu.SMEM((*of_rows, scale_rows(tile_m)), jnp.float32)
    has_tmem = shapes.core.has_tmem
    rows_full = plgpu.Barrier(num_arrivals=CONSUMERS, orders_tensor_core=has_tmem)
    exchanges = shapes.is_gated and tiling.swap_ab  # else a thread has both values of a pair
    exchanged = WARPGROUP_N * (tile_m if has_tmem else tiling.row_slices[0][1])
    scratch = Scratch(
        codes_smem=codes,
        words_smem=plgpu.SMEM((*per_stage, WARPGROUP_N), jnp.int32) if shapes.is_mxfp4 else None,
        rows_smem=operand((*of_rows, tile_m, shapes.group_k)),
        scales_smem=None if shapes.is_dense else scales,
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiling.stages),
        up_smem=plgpu.SMEM((exchanged,), jnp.float32) if exchanges else None,
        up_full=plgpu.Barrier() if exchanges and not has_tmem else None,
        rows_full=rows_full if shapes.rounds_rows else None,
        up_empty=plgpu.Barrier() if exchanges and tiling.reuses_exchange else None,
    )
    if not has_tmem:
        return scratch
    # Its arrivals order tensor memory too, which ordinary fences do not.
    barrier = functools.partial(plgpu.Barrier, num_barriers=TMEM_STAGES, orders_tensor_core=True)
    columns = TMEM_STAGES * shapes.num_terms * tile_m
    scratch = scratch._replace(
        accumulators_tmem=plgpu.TMEM((TILE_N, columns), jnp.float32),
        accumulators_full=barrier(),
        accumulators_empty=barrier(num_arrivals=CONSUMERS),
    )
    if not shapes.is_mxfp4:
        return scratch
    return scratch._replace(
        unpacked_smem=e4m3((TMEM_STAGES, TILE_N, GROUP_K)),
        factors_smem=plgpu.SMEM((TMEM_STAGES, TILE_N), jnp.float32),
        unpacked_full=barrier(num_arrivals=CONSUMERS),
    )


def shared_bytes(shapes: Shapes, tiling: Tiling) -> int:
    """Bytes of the arrays in shared memory of a CTA; barriers have 8 bytes each beside them."""
    return sum(
        math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tuple(scratch_types(shapes, tiling)))
        if getattr(leaf, "memory_space", None) == plgpu.MemorySpace.SMEM
    )
