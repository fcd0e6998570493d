"""Index scores through Mosaic GPU, for Hopper and Blackwell.

One CTA: one query token, or some that follow each other, and a run of their request's entries; its
warpgroups take tiles, 64 keys or on Blackwell 128, in turn, each its own producer and consumer
(`score_tiles` is what they do, `key_pipeline` how keys come):

    queries, in bulk, to E4M3            -> queries_smem
    codes and scales of a tile, a block's at once, tiles ahead     -> codes_smem, words_smem
    MXFP4 unpacked to E4M3             in registers, on Blackwell -> keys_smem[warpgroup]
    [64 keys, 64 heads] = keys Q^T     FP8 tensor cores, on Blackwell into tensor memory
    score = key scale * sum over heads of weight * relu

Of several tokens a tile is loaded and unpacked once for all of one request. Those of another take
another pass, in which what this one's products are is not stored.

Keys are the rows of the product, so that heads add up along a row of registers.

Bytes: 68 per visible key (MXFP4) or 132 (FP8), and 4 per score written. They bound FP8 keys in
large calls; MXFP4 keys keep ALU, tensor cores and issue slots busy together. Sums of the FP8 tensor
core keep some 14 bits below their largest term. It has not run on a Blackwell card. Measurements
and roads not taken: docs/kernels/index_scores.md. Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gpu import unpack_mxfp4
from pallas_kernels.gpu.devices import Device, current_device
from pallas_kernels.index_scores.operands import Operands, Scratch, scratch_types
from pallas_kernels.index_scores.score_tiles import score_tiles
from pallas_kernels.index_scores.tiling import (
    HEADS,
    Shapes,
    Tiling,
    choose_tiling,
    is_mxfp4,
    read_once,
)


def index_scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: LayerPlanes,
    call: CallIndices,
    *,
    tiling: Tiling | None = None,
    device: Device | None = None,
) -> jax.Array:
    """Scores of each token's visible entries.

    Args:
      queries: bf16 or f32[T, 64, 128], rounded as keys are, so that BF16 holds them exactly; or
        fewer heads, which are filled up with zeros.
      weights: f32[T, 64], or fewer.
      pool: planes of MXFP4 or FP8 keys; see `op.index_topk`.
      call: where the queries belong, with `visible`; see `op.index_topk`.
      tiling: how entries are cut; None asks `choose_tiling`.
      device: the device to cut for; None is the one at hand.

    Returns:
      f32[T, E], E the entries of a table row and those that fill the last tile; arbitrary where not
      visible.
    """
    device = device or current_device()
    num_tokens, num_heads, _ = queries.shape
    codes, scales = pool.planes["codes"], pool.planes["scale"]
    _, num_blocks, entries_per_block = codes.shape[:3]
    num_requests, table_width = call.block_table.shape
    # Of a block of one layer, codes and scales: which decide whether L2 may drop keys first.
    bytes_of_block = sum(math.prod(p.shape[2:]) * p.dtype.itemsize for p in (codes, scales))
    shapes = Shapes(
        num_tokens=num_tokens,
        num_heads=num_heads,
        entries_per_block=entries_per_block,
        num_blocks=num_blocks,
        table_width=table_width,
        mxfp4=is_mxfp4(pool.codec),
        last=read_once(num_tokens, num_requests, table_width * bytes_of_block, device),
        device=device,
    )
    num_tiles = pl.cdiv(shapes.num_entries, shapes.tile_m)
    tiling = tiling or choose_tiling(
        num_tokens, num_tiles, shapes.mxfp4, device, num_requests=num_requests
    )

    if num_heads < HEADS:
        # A head of zeros adds nothing, and tensor cores have 64 of them anyway.
        spare = (0, HEADS - num_heads)
        queries = jnp.pad(queries, ((0, 0), spare, (0, 0)))
        weights = jnp.pad(weights, ((0, 0), spare))

    def score_kernel(inputs: Operands, scores_gmem: Any, scratch: Scratch) -> None:
        score_tiles(inputs, scores_gmem, scratch, shapes=shapes, tiling=tiling)

    return plgpu.kernel(
        score_kernel,
        # Whole tiles: a CTA stores all scores of its last one, also those beyond the table.
        out_type=jax.ShapeDtypeStruct((num_tokens, num_tiles * shapes.tile_m), jnp.float32),
        grid=(pl.cdiv(num_tokens, tiling.tokens), pl.cdiv(num_tiles, tiling.tiles)),
        grid_names=("token", "run"),
        num_threads=tiling.warpgroups,
        thread_name="warpgroup",
        scratch_types=[scratch_types(shapes, tiling)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        Operands(
            # Exact, since queries come rounded; half the bytes for the bulk copy.
            queries=queries.astype(jnp.bfloat16),
            weights=weights,
            # Rows of one word and of one key each, as threads and the copy engine address them.
            table=call.block_table.reshape(-1, 1),
            segment_ids=call.segment_ids,
            visible=call.visible,
            layer=pool.layer[None],
            codes=codes.reshape(-1, codes.shape[-1]),
            scales=scales.reshape(math.prod(scales.shape[:3]), -1),
            magnitudes=jnp.asarray(unpack_mxfp4.magnitude_bytes()),
        )
    )
