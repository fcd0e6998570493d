"""Which weights the release stores as block FP8 and as MXFP4, and how it makes them of dense ones.

Source: deepseek_v4.md section 4.5.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.weights import (
    FP8_BLOCK,
    MXFP4,
    MXFP4_GROUP,
    BlockFP8,
    is_quantized,
    quantize_block_fp8,
    quantize_mxfp4,
)

_FP8 = re.compile(
    r"(^|\.)(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|engram\.wkv|shared_w[123]|([eh]|main)_proj)$"
)
_FP4 = re.compile(r"(^|\.)ffn\.w[123]$")


def released_format(path: str) -> type[BlockFP8] | type[MXFP4] | None:
    """The format of the leaf at a dotted path of the parameters; None is dense."""
    if _FP8.search(path):
        return BlockFP8
    return MXFP4 if _FP4.search(path) else None


def released_shapes[Tree](shapes: Tree, block: int = FP8_BLOCK) -> Tree:
    """Shapes of dense parameters, those that the release quantises as quantised weights."""

    def change(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        name = released_format(_dotted(path))
        return leaf if name is None else quantized_shape(name, leaf.shape, leaf.dtype, block=block)

    return jax.tree.map_with_path(change, shapes)


def quantized_shape(
    weight_format: type[BlockFP8] | type[MXFP4],
    shape: tuple[int, ...],
    dtype: Any,
    *,
    scale_dtype: Any = jnp.uint8,
    block: int = FP8_BLOCK,
) -> BlockFP8 | MXFP4:
    """A quantised weight of that logical shape, with shapes in place of arrays.

    Args:
      weight_format: its class.
      shape: [..., out, in].
      dtype: what the weight stands for.
      scale_dtype: u8 or f32; of MXFP4, u8 alone.
      block: as of `BlockFP8`, and the groups of rows that multiply either.
    """
    *lead, out, into = shape
    name = jnp.dtype(dtype).name
    if weight_format is BlockFP8:
        blocks = (*lead, -(-out // block), -(-into // block))
        codes: Any = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
        scale: Any = jax.ShapeDtypeStruct(blocks, scale_dtype)
        return BlockFP8(codes=codes, scale=scale, dtype=name, activations="fp8", block=block)
    matrix = _mxfp4_shape(out, into, name, block)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype), matrix)


@functools.cache
def _mxfp4_shape(out: int, into: int, dtype: str, row_group: int) -> MXFP4:
    pairs = jax.ShapeDtypeStruct((out, into // 2), jnp.uint8)
    scale = jax.ShapeDtypeStruct((out, -(-into // MXFP4_GROUP)), jnp.uint8)
    make = functools.partial(MXFP4.from_stored, dtype=dtype, row_group=row_group)
    return jax.eval_shape(make, pairs, scale)


def quantize_leaves[Tree](params: Tree, block: int = FP8_BLOCK) -> Tree:
    """Dense parameters, or any part of them, in the formats of the release.

    Raises:
      ValueError: an expert has an odd number of inputs; all of them are listed.
    """
    leaves, treedef = jax.tree.flatten_with_path(params, is_leaf=is_quantized)
    odd = [
        f"{_dotted(path)} {list(leaf.shape)}"
        for path, leaf in leaves
        if released_format(_dotted(path)) is MXFP4 and leaf.shape[-1] % 2
    ]
    if odd:
        raise ValueError(
            "MXFP4 stores two values a byte, so inputs must be even in number; these are not: "
            + ", ".join(odd)
        )
    changed = []
    for path, leaf in leaves:
        name = None if is_quantized(leaf) else released_format(_dotted(path))
        changed.append(leaf if name is None else quantize_weight(leaf, name, block))
    return jax.tree.unflatten(treedef, changed)


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantize_weight(
    values: jax.Array, weight_format: type[BlockFP8] | type[MXFP4], block: int = FP8_BLOCK
) -> BlockFP8 | MXFP4:
    """Quantises [..., out, in] as the release does, one matrix after the other."""
    if weight_format is BlockFP8:
        quantize = functools.partial(quantize_block_fp8, block=block)
    else:
        quantize = functools.partial(quantize_mxfp4, row_group=block)
    lead = values.shape[:-2]
    matrices = values.reshape(math.prod(lead), *values.shape[-2:])
    weights = jax.lax.map(functools.partial(quantize, dtype=values.dtype.name), matrices)
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), weights)


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
