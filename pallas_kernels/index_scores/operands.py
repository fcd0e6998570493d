"""What a CTA of the index scores works with: arrays, its own memory, and its tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic, mosaic_bulk
from pallas_kernels.index_scores.tiling import DIM, HEADS, Shapes, Tiling

Ref = Any


class Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs in device memory.

    Attributes:
      queries: bf16[T, 64, 128].
      weights: f32[T, 64].
      table: i32[B LB, 1].
      segment_ids: i32[T].
      visible: i32[T].
      layer: i32[1].
      codes: [rows, n], codes of keys.
      scales: [rows, n], their scales.
      magnitudes: i32[20, 2], the table of `unpack_mxfp4`.
    """

    queries: Any
    weights: Any
    table: Any
    segment_ids: Any
    visible: Any
    layer: Any
    codes: Any
    scales: Any
    magnitudes: Any


class Scratch(NamedTuple):
    """What a CTA has to itself, for N tokens, G warpgroups, S stages and tiles of M keys.

    Attributes:
      raw_queries_smem: bf16[N, 64, 128], queries as they come.
      raw_weights_smem: f32[N, 64].
      landed: barrier: queries and weights have come.
      queries_smem: e4m3[N, 64, 128], swizzled, the right operand of products.
      weights_smem: f32[N, 64], with the queries' scales in them.
      queries_ready: barrier: all warpgroups have rounded their share of the queries.
      codes_smem: u8[G, S, M, n], codes of keys.
      words_smem: i32[G, S, M], their scales.
      barriers_smem: i32[G, 2 S], for each stage a barrier of `mosaic_bulk`.
      keys_smem: e4m3[G, M, 128], swizzled, the left operand; Blackwell's, as what follows.
      products_tmem: f32[M, G 64], each warpgroup's products.
      products_ready: a barrier for each warpgroup: its product is there.
    """

    raw_queries_smem: Any
    raw_weights_smem: Any
    landed: Any
    queries_smem: Any
    weights_smem: Any
    queries_ready: Any
    codes_smem: Any
    words_smem: Any
    barriers_smem: Any
    keys_smem: Any = None
    products_tmem: Any = None
    products_ready: Any = None


def scratch_types(shapes: Shapes, tiling: Tiling) -> Scratch:
    """The types of a CTA's own memory."""
    swizzled = functools.partial(
        plgpu.SMEM, dtype=jnp.float8_e4m3fn, transforms=mosaic.SWIZZLED_BYTES
    )
    tile_m, per_stage = shapes.tile_m, (tiling.warpgroups, tiling.stages)
    # Barriers of `mosaic_bulk` are plain words of shared memory.
    barrier_words = mosaic_bulk.WORDS_OF_BARRIER * tiling.stages
    scratch = Scratch(
        raw_queries_smem=plgpu.SMEM((tiling.tokens, HEADS, DIM), jnp.bfloat16),
        raw_weights_smem=plgpu.SMEM((tiling.tokens, HEADS), jnp.float32),
        landed=plgpu.Barrier(num_arrivals=2 * tiling.tokens),
        queries_smem=swizzled((tiling.tokens, HEADS, DIM)),
        weights_smem=plgpu.SMEM((tiling.tokens, HEADS), jnp.float32),
        queries_ready=plgpu.Barrier(num_arrivals=tiling.warpgroups),
        codes_smem=plgpu.SMEM((*per_stage, tile_m, shapes.width), jnp.uint8),
        words_smem=plgpu.SMEM((*per_stage, tile_m), jnp.int32),
        barriers_smem=plgpu.SMEM((tiling.warpgroups, barrier_words), jnp.int32),
    )
    # Hopper's keys stay in registers, and so do its products.
    if not shapes.device.has_tmem:
        return scratch
    return scratch._replace(
        keys_smem=swizzled((tiling.warpgroups, tile_m, DIM)),
        products_tmem=plgpu.TMEM((tile_m, tiling.warpgroups * HEADS), jnp.float32),
        products_ready=plgpu.Barrier(num_barriers=tiling.warpgroups, orders_tensor_core=True),
    )


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA, as one of its warpgroups sees it.

    Attributes:
      inputs: arrays in device memory.
      scratch: its own memory.
      shapes: sizes of the call.
      tiling: how it is cut.
      run: i32[], which run of `tiling.tiles` tiles it has, of a row of the block table.
      warpgroup: i32[], which of its warpgroups this is.
      tokens: i32[] each. Beyond the call's last token it is that one again, which stores the same
        scores.
      segments: i32[] each, the tokens' requests.
    """

    inputs: Operands
    scratch: Scratch
    shapes: Shapes
    tiling: Tiling
    run: jax.Array
    warpgroup: jax.Array
    tokens: list[jax.Array]
    segments: list[jax.Array]

    @classmethod
    def here(cls, inputs: Operands, scratch: Scratch, shapes: Shapes, tiling: Tiling) -> Cta:
        """The CTA that runs this."""
        run, warpgroup = lax.axis_index("run"), lax.axis_index("warpgroup")
        tokens = [
            jnp.minimum(lax.axis_index("token") * tiling.tokens + i, shapes.num_tokens - 1)
            for i in range(tiling.tokens)
        ]
        segments = [inputs.segment_ids[token] for token in tokens]
        return cls(inputs, scratch, shapes, tiling, run, warpgroup, tokens, segments)
