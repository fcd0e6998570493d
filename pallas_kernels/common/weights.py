"""Weights as the released checkpoint stores them: block FP8 and MXFP4, beside dense arrays.

A weight is a matrix [out, in], or a stack of them. What a kernel needs to find in another order is
rearranged once, without loss, when the weight is made; `to_stored` undoes it.

Source: deepseek_v4.md section 4.5.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.common import numbers
from pallas_kernels.common.shaped import Shaped

FP8_BLOCK = 128
"""Outputs and inputs that share a scale of block FP8, and inputs that share one of activations.

`BlockFP8.block` and `MXFP4.row_group` may say otherwise.
"""
SMALL_BLOCK = 32
"""As `FP8_BLOCK`, of DeepSeek-V4.1."""
FP8_BLOCKS = (FP8_BLOCK, SMALL_BLOCK)
"""Those that releases have: DeepSeek-V4's, and DeepSeek-V4.1's."""
MXFP4_GROUP = 32
"""Inputs that share a scale of MXFP4."""
ROWS, INPUTS = 64, 128
"""A tile of MXFP4 codes: one product of a tensor core, four groups wide."""
ACTIVATIONS = ("fp8", "bfloat16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFP8(Shaped):
    """E4M3 codes with one scale for each square block; a value is code times scale.

    Attributes:
      codes: e4m3[..., out, in].
      scale: [..., ceil(out / block), ceil(in / block)], UE8M0 as u8, or f32.
      dtype: name of the dtype that the weight stands for; static.
      activations: what multiplies it: "fp8" rounds rows to E4M3 first, as the release does
        (`rows.round_rows`), "bfloat16" takes them as they are; static.
      block: outputs and inputs of a block, and inputs of a row that are rounded under one scale;
        static.
    """

    codes: jax.Array
    scale: jax.Array
    dtype: str = dataclasses.field(metadata={"static": True})
    activations: str = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(default=FP8_BLOCK, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]."""
        return self.codes.shape

    @property
    def row_group(self) -> int:
        """As of `MXFP4`."""
        return self.block

    def decode(self) -> jax.Array:
        """The values, f32[..., out, in]: exact where scales are powers of two."""
        blocks = jnp.repeat(_scale_values(self.scale), self.block, axis=-2)
        blocks = jnp.repeat(blocks[..., : self.shape[-2], :], self.block, axis=-1)
        return self.codes.astype(jnp.float32) * blocks[..., : self.shape[-1]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(Shaped):
    """E2M1 codes with a UE8M0 scale for each 32 inputs of a row; a value is code times scale.

    Tiles of 64 rows and 128 inputs lie one after the other, filled up with zeros at the ends of a
    matrix. Signs are interleaved as `numbers.interleave_signs` has it.

    Attributes:
      codes: u8[..., ceil(out / 64), ceil(in / 128), 64, 64], two codes a byte.
      scale: i32[..., ceil(out / 64), ceil(in / 128), 64], the four scales of a row in a tile, the
        first one in the lowest byte.
      size: (out, in); static.
      dtype: as of `BlockFP8`.
      activations: as of `BlockFP8`.
      row_group: inputs of a row that are rounded under one scale; static.
    """

    codes: jax.Array
    scale: jax.Array
    size: tuple[int, int] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    activations: str = dataclasses.field(metadata={"static": True})
    row_group: int = dataclasses.field(default=FP8_BLOCK, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]."""
        return (*self.codes.shape[:-4], *self.size)

    @classmethod
    def from_stored(
        cls,
        pairs: jax.Array,
        scale: jax.Array,
        *,
        dtype: str,
        activations: str = "fp8",
        row_group: int = FP8_BLOCK,
    ) -> MXFP4:
        """Rearranges a weight in the released order.

        Args:
          pairs: u8[..., out, ceil(in / 2)], the even input in the low nibble.
          scale: u8[..., out, ceil(in / 32)].
          dtype: see `BlockFP8`.
          activations: see `BlockFP8`.
          row_group: see the attribute.
        """
        out, half = pairs.shape[-2:]
        tiles = pl.cdiv(out, ROWS), pl.cdiv(2 * half, INPUTS)
        codes = _to_tiles(pairs, *tiles, INPUTS // 2)
        words = codes.reshape(*codes.shape[:-1], INPUTS // 8, 4)
        moved = numbers.interleave_signs(jax.lax.bitcast_convert_type(words, jnp.uint32))
        codes = jax.lax.bitcast_convert_type(moved, jnp.uint8).reshape(codes.shape)
        groups = INPUTS // MXFP4_GROUP
        scales = jax.lax.bitcast_convert_type(_to_tiles(scale, *tiles, groups), jnp.int32)
        size = out, 2 * half
        return cls(
            codes=codes,
            scale=scales,
            size=size,
            dtype=dtype,
            activations=activations,
            row_group=row_group,
        )

    def to_stored(self) -> tuple[jax.Array, jax.Array]:
        """Pairs and scales in the released order, as `from_stored` takes them."""
        out, into = self.size
        words = self.codes.reshape(*self.codes.shape[:-1], INPUTS // 8, 4)
        moved = numbers.restore_signs(jax.lax.bitcast_convert_type(words, jnp.uint32))
        codes = jax.lax.bitcast_convert_type(moved, jnp.uint8).reshape(self.codes.shape)
        scales = jax.lax.bitcast_convert_type(self.scale, jnp.uint8)
        num_groups = pl.cdiv(into, MXFP4_GROUP)
        return _from_tiles(codes, out, into // 2), _from_tiles(scales, out, num_groups)

    def decode(self) -> jax.Array:
        """The values, f32[..., out, in], exact."""
        pairs, scale = self.to_stored()
        values = numbers.decode_e2m1(numbers.unpack_nibbles(pairs))
        scales = jnp.repeat(_scale_values(scale), MXFP4_GROUP, axis=-1)
        return values * scales[..., : values.shape[-1]]


Weight = jax.Array | BlockFP8 | MXFP4
"""A matrix [out, in], or a stack of them."""


def is_quantized(leaf: Any) -> bool:
    """Whether it is a quantised weight, for `is_leaf` of tree functions."""
    return isinstance(leaf, BlockFP8 | MXFP4)


def takes_rounded_rows(weight: Weight) -> bool:
    """Whether a product with it rounds rows to E4M3 first (`rows.round_rows`)."""
    return isinstance(weight, BlockFP8 | MXFP4) and weight.activations == "fp8"


def decode_weight(weight: Weight) -> jax.Array:
    """A dense weight as it is, a quantised one as f32."""
    return weight.decode() if isinstance(weight, BlockFP8 | MXFP4) else weight


def with_activations[Tree](tree: Tree, activations: str) -> Tree:
    """The same tree, whose quantised weights take rows in that form.

    Raises:
      ValueError: there is no such form.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {ACTIVATIONS}, got {activations!r}")

    def change(leaf: Any) -> Any:
        return dataclasses.replace(leaf, activations=activations) if is_quantized(leaf) else leaf

    return jax.tree.map(change, tree, is_leaf=is_quantized)


def quantize_block_fp8(
    values: jax.Array, *, dtype: str, activations: str = "fp8", block: int = FP8_BLOCK
) -> BlockFP8:
    """As the release does: scales are the least powers of two at which no code exceeds 448.

    Args:
      values: [..., out, in].
      dtype: see `BlockFP8`.
      activations: see `BlockFP8`.
      block: see `BlockFP8`.
    """
    *lead, out, into = values.shape
    rows, columns = pl.cdiv(out, block), pl.cdiv(into, block)
    padding = [(0, 0)] * len(lead) + [(0, rows * block - out), (0, columns * block - into)]
    padded = jnp.pad(values.astype(jnp.float32), padding)
    blocks = padded.reshape(*lead, rows, block, columns, block)
    amax = jnp.max(jnp.abs(blocks), axis=(-3, -1))
    scale = numbers.encode_ue8m0(jnp.maximum(amax, np.float32(448 * 2.0**-126)) * numbers.INV_448)
    codes = numbers.encode_e4m3(blocks * numbers.invert_ue8m0(scale)[..., :, None, :, None])
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).reshape(padded.shape)
    codes = codes[..., :out, :into]
    return BlockFP8(codes=codes, scale=scale, dtype=dtype, activations=activations, block=block)


def quantize_mxfp4(
    values: jax.Array, *, dtype: str, activations: str = "fp8", row_group: int = FP8_BLOCK
) -> MXFP4:
    """As the release does; see `quantize_block_fp8`. The number of inputs must be even."""
    groups = numbers.split_groups(values.astype(jnp.float32), MXFP4_GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), np.float32(6 * 2.0**-126))
    scale = numbers.encode_ue8m0(amax * numbers.INV_6)
    codes = numbers.encode_e2m1(groups * numbers.invert_ue8m0(scale)[..., None])
    pairs = numbers.pack_nibbles(numbers.join_groups(codes, values.shape[-1]))
    return MXFP4.from_stored(
        pairs, scale, dtype=dtype, activations=activations, row_group=row_group
    )


def _scale_values(scale: jax.Array) -> jax.Array:
    return numbers.decode_ue8m0(scale) if scale.dtype == jnp.uint8 else scale


def _to_tiles(matrix: jax.Array, rows: int, columns: int, width: int) -> jax.Array:
    """[..., m, n] -> [..., rows, columns, 64, width], filled up with zeros."""
    *lead, m, n = matrix.shape
    padding = [(0, 0)] * len(lead) + [(0, rows * ROWS - m), (0, columns * width - n)]
    split = jnp.pad(matrix, padding).reshape(*lead, rows, ROWS, columns, width)
    return jnp.moveaxis(split, -3, -2)


def _from_tiles(tiles: jax.Array, m: int, n: int) -> jax.Array:
    """The inverse of `_to_tiles`."""
    *lead, rows, columns, height, width = tiles.shape
    joined = jnp.moveaxis(tiles, -3, -2).reshape(*lead, rows * height, columns * width)
    return joined[..., :m, :n]


def weight_bytes(weight: Weight) -> int:
    """Bytes of its arrays, or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
