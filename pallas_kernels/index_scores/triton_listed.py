"""Triton kernel that scores the index keys that each token lists: 64 of them a program.

    addresses of the keys through the block table; their rows, decoded to bf16, which is exact
    their products with all heads of the query, on tensor cores; ReLU, weights, the sum over heads

For selections among candidates, of which alone keys are read. Bytes: those keys, once, and the
scores. It has run on no card: it is compiled for Hopper and Blackwell, and compared in the
interpreter.
Source: deepseek_v41.md section 7.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Codec, FP4KeyCodec, PlainCodec
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gpu import devices, triton
from pallas_kernels.gpu.triton_entries import Source, find_entries, load_rows

Ref = Any
_KEYS = 64
_LEAST = 16
"""Of rows and inputs of a product on tensor cores."""
_INPUTS = 64
"""A key's codes fill words, and so do its scales."""
_NUM_WARPS = 4


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs; see `op.listed_scores`.

    Attributes:
      queries: bf16[T, IH, IC].
      weights: f32[T, IH].
      listed: i32[T, n].
      table: i32[B, LB].
      segment_ids: i32[T].
      layer: i32[1].
      planes: of the pool, byte planes as words.
    """

    queries: Any
    weights: Any
    listed: Any
    table: Any
    segment_ids: Any
    layer: Any
    planes: Any


def find_obstacle(queries: jax.Array, codec: Codec) -> str | None:
    """Why the kernel can't serve a call, as the rest of a sentence; None where it can."""
    is_bf16 = codec == PlainCodec("bfloat16")
    if not is_bf16 and not (isinstance(codec, FP4KeyCodec) and codec.power_of_two):
        return f"takes keys in MXFP4 and bf16, got {codec}"
    if queries.shape[2] % _INPUTS or pl.next_power_of_2(queries.shape[2]) != queries.shape[2]:
        return f"needs IC a power of two of at least {_INPUTS}, got {queries.shape=}"
    return devices.find_obstacle()


def listed_scores(
    queries: jax.Array, weights: jax.Array, pool: LayerPlanes, call: CallIndices, listed: jax.Array
) -> jax.Array:
    """See `op.listed_scores`; queries are rounded as keys are, so that bf16 holds them."""
    num_tokens, num_heads, dim = queries.shape
    width = max(_LEAST, pl.next_power_of_2(num_heads))
    num_places = listed.shape[1]
    entries_per_block = first_plane(pool.planes).shape[2]
    factor = np.float32((num_heads * dim) ** -0.5)

    def kernel(refs: _Operands, scores: Ref) -> None:
        tile, token = pl.program_id(0), pl.program_id(1)
        place = tile * _KEYS + jnp.arange(_KEYS, dtype=jnp.int32)
        inside = place < num_places
        # Places beyond the last list no entry, and load nothing.
        entry = triton.load_where(refs.listed, (token, place), inside, -1)
        block, row, present = find_entries(
            entry, refs.table, refs.segment_ids[token], entries_per_block=entries_per_block
        )
        source = Source(refs.planes, (refs.layer[0], block, row), present)
        [keys] = load_rows([source], pool.codec, dim=dim, dtype=jnp.bfloat16)  # [64, IC]
        head, column = (jnp.arange(n, dtype=jnp.int32) for n in (width, dim))
        is_head = jnp.broadcast_to((head < num_heads)[:, None], (width, dim))
        # bf16[width, IC]; heads beyond the last are zeros, since tensor cores take 16 at least.
        query = triton.load_where(refs.queries, (token, head[:, None], column[None]), is_head)
        over_inputs = ((1,), (1,)), ((), ())
        # f32[64, width], a key's products with each head.
        products = jax.lax.dot_general(
            keys.values, query, over_inputs, preferred_element_type=jnp.float32
        )
        weight = triton.load_where(refs.weights, (token, head), head < num_heads) * factor
        # f32[64]; heads that are not there have weight 0.
        score = jnp.sum(jnp.maximum(products, 0.0) * weight[None], axis=1)
        triton.store_where(scores, (token, place), score, inside)

    return triton.launch(
        kernel,
        grid=(pl.cdiv(num_places, _KEYS), num_tokens),
        inputs=_Operands(
            queries=queries.astype(jnp.bfloat16),
            weights=weights.astype(jnp.float32),
            listed=listed,
            table=call.block_table,
            segment_ids=call.segment_ids,
            layer=pool.layer[None],
            planes=triton.as_words(pool.planes),
        ),
        outputs=jax.ShapeDtypeStruct((num_tokens, num_places), jnp.float32),
        num_warps=_NUM_WARPS,
        name="score_listed",
    )
