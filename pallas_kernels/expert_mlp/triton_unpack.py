"""Triton kernel that unpacks experts in MXFP4 into block FP8: a block per program.

    the largest scale of 128 outputs and 128 inputs     -> the block's scale, over 64
    codes, and their scales beside the largest          -> E4M3, by `unpack_mxfp4`'s table

A product in MXFP4 unpacks a tile of weights anew for each tile of an expert's rows, which keeps its
warps longer than the tensor core is busy. Where an expert has many rows it takes less time to
unpack once, into memory. Values are the same while the 512 scales of a block lie within 2^14 of
each other; smaller ones are rounded to multiples of 2^-9 of the block's scale.

Bytes: the codes in, twice as many out. Measurements: docs/kernels/expert_mlp.md.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import FP8_BLOCK, INPUTS, MXFP4, ROWS, BlockFP8, Weight
from pallas_kernels.gpu import triton, unpack_mxfp4
from pallas_kernels.gpu.triton_rope import join_neighbours

Ref = Any
_WORDS = INPUTS // 8
"""Words of eight codes in a row of a tile."""
_WORDS_OF_GROUP = _WORDS // 4
_HEADROOM_BITS = 6
"""log2 of `unpack_mxfp4.HEADROOM`."""
_SIGNS = np.array(0x80808080, np.uint32).view(np.int32)
_NUM_WARPS = 4
_LOWER = """{
  .reg .b32 select, bytes;
  and.b32 select, $1, 0x77777777;
  prmt.b32 bytes, $2, $3, select;
  lop3.b32 $0, bytes, $1, 0x80808080, 0xf8;
}"""
_UPPER = """{
  .reg .b32 select, bytes, signs;
  shr.u32 select, $1, 16;
  and.b32 select, select, 0x7777;
  prmt.b32 bytes, $2, $3, select;
  shl.b32 signs, $1, 4;
  lop3.b32 $0, bytes, signs, 0x80808080, 0xf8;
}"""
"""Four of the eight codes of a word each; see `numbers.interleave_signs`."""


def can_unpack(weight: Weight) -> TypeGuard[MXFP4]:
    """Whether it is MXFP4 in whole blocks, whose rows are rounded."""
    is_whole = weight.shape[-2] % FP8_BLOCK == 0 and weight.shape[-1] % FP8_BLOCK == 0
    return isinstance(weight, MXFP4) and weight.activations == "fp8" and is_whole


def unpack_to_fp8(weight: MXFP4) -> BlockFP8:
    """A stack of experts [E, out, in], both multiples of 128, in block FP8 with UE8M0 scales."""
    *lead, out, into = weight.shape
    count, rows, columns = math.prod(lead), out // FP8_BLOCK, into // FP8_BLOCK
    words = weight.codes.reshape(-1, columns, ROWS, _WORDS, 4)
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    table = jnp.asarray(unpack_mxfp4.magnitude_bytes())

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        codes, scales, table = inputs
        codes_ref, scale_ref = outputs
        column, block = pl.program_id(0), pl.program_id(1)
        row = jnp.arange(FP8_BLOCK, dtype=jnp.int32)
        word = jnp.arange(_WORDS, dtype=jnp.int32)
        everywhere = jnp.ones((FP8_BLOCK, _WORDS), jnp.bool_)
        # MXFP4's tiles have 64 rows: a block of FP8 has two of them, one above the other.
        of_tile = (block * (FP8_BLOCK // ROWS) + row // ROWS, column, row % ROWS)
        of_row = triton.load_where(scales, of_tile, jnp.ones(FP8_BLOCK, jnp.bool_))
        of_words = (*(i[:, None] if i.ndim else i for i in of_tile), word[None])
        eight = triton.load_where(codes, of_words, everywhere)  # on its way while threads agree
        largest = jnp.max(unpack_mxfp4.largest_scale(of_row))
        largest = jnp.maximum(largest, _HEADROOM_BITS + 1)  # less than 2^-120 is rounded to 0
        # Four words have a group's 32 codes; the group's scale is a byte of the row's word.
        shift = jnp.broadcast_to(word // _WORDS_OF_GROUP * 8, everywhere.shape)
        own = (jnp.broadcast_to(of_row[:, None], everywhere.shape) >> shift) & 255
        steps = jnp.minimum(largest - own, table.shape[0] - 1)  # i32[128, 16], powers of two
        # Magnitudes of E2M1 under each step, eight bytes, looked up for each word of eight codes.
        low, high = (
            triton.load_where(table, (steps, jnp.int32(half)), everywhere) for half in range(2)
        )
        # i32[128, 32]: both halves of each word side by side again, a row's 128 codes of E4M3.
        wide = join_neighbours(_unpack(eight, low, high))
        to = jnp.arange(2 * _WORDS, dtype=jnp.int32)
        target = (block * FP8_BLOCK + row)[:, None], (column * 2 * _WORDS + to)[None]
        triton.store_where(codes_ref, target, wide, jnp.ones(wide.shape, jnp.bool_))
        scale_ref[block, column] = (largest - _HEADROOM_BITS).astype(jnp.uint8)

    codes, scale = triton.launch(
        kernel,
        grid=(columns, count * rows),  # neighbours write neighbouring lines of the same rows
        inputs=[words, weight.scale.reshape(-1, columns, ROWS), table],
        outputs=[
            jax.ShapeDtypeStruct((count * out, into // 4), jnp.int32),
            jax.ShapeDtypeStruct((count * rows, columns), jnp.uint8),
        ],
        num_warps=_NUM_WARPS,
        name="unpack_experts",
    )
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return BlockFP8(
        codes=codes.reshape(weight.shape),
        scale=scale.reshape(*lead, rows, columns),
        dtype=weight.dtype,
        activations=weight.activations,
    )


def _unpack(words: jax.Array, low: jax.Array, high: jax.Array) -> list[jax.Array]:
    """Words of eight E2M1 codes, and magnitudes as eight bytes -> two words of four E4M3 codes."""
    if not interpreting():
        return [
            triton.inline_lines(text, [words, low, high], "=r,r,r,r", pack=1, dtype=jnp.int32)
            for text in (_LOWER, _UPPER)
        ]
    unpacked = []
    for first, signs in ((0, words), (16, words << 4)):
        four = signs & _SIGNS
        for i in range(4):
            code = (words >> (first + 4 * i)) & 7
            half = jnp.where(code < 4, low, high)
            four |= ((half >> (8 * (code & 3))) & 255) << (8 * i)
        unpacked.append(four)
    return unpacked
