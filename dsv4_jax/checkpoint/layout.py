"""How tensors are laid out in files that we write: their names, dtypes and shards.

Source: deepseek_v4.md sections 4.5 and 6.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv4_jax.checkpoint.names import Target
from dsv4_jax.config.kinds import Whole
from pallas_kernels.common.weights import FP8_BLOCK, MXFP4, MXFP4_GROUP, BlockFP8

OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
MAX_SHARD_BYTES = 5 * 2**30
SHARD_BYTES = Whole(1, 2**62)
"""What `max_shard_bytes` may be."""
_UE8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file: its canonical name, its dtype and its shape."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def list_entries(name: str, target: Target, leaf: Any) -> list[Entry]:
    """The tensors that store a canonical one: itself, and its scale if it is quantised.

    Args:
      name: its canonical name.
      target: where it lies.
      leaf: the leaf that it is of, arrays or their shapes.
    """
    shape = target.shape
    if target.is_hash_table:
        return [Entry(name, np.dtype(np.int64), shape)]
    if not isinstance(leaf, BlockFP8 | MXFP4):
        return [Entry(name, np.dtype(leaf.dtype), shape)]
    out, into = shape
    if isinstance(leaf, MXFP4):
        codes = Entry(name, np.dtype(np.int8), (out, into // 2))
        scale = Entry(scale_name(name), _UE8M0, (out, -(-into // MXFP4_GROUP)))
        return [codes, scale]
    blocks = -(-out // leaf.block), -(-into // leaf.block)
    dtype = _UE8M0 if leaf.scale.dtype == jnp.uint8 else np.dtype(np.float32)
    codes = Entry(name, np.dtype(ml_dtypes.float8_e4m3fn), shape)
    return [codes, Entry(scale_name(name), dtype, blocks)]


def list_arrays(target: Target, leaf: Any) -> list[np.ndarray]:
    """The contents of `list_entries`."""
    if isinstance(leaf, MXFP4):
        arrays = _stored_mxfp4(leaf, np.asarray(target.index, np.int32))
    elif isinstance(leaf, BlockFP8):
        arrays = _part(leaf.codes, target.index), _part(leaf.scale, target.index)
    else:
        arrays = (_part(leaf, target.index),)
    entries = list_entries("", target, leaf)
    return [
        as_stored(np.asarray(array), entry.dtype).reshape(entry.shape)
        for array, entry in zip(arrays, entries, strict=True)
    ]


def _part(leaf: jax.Array, index: tuple[int, ...]) -> jax.Array | np.ndarray:
    """A part of a stack; where a CPU holds it, no program is compiled for its shape."""
    on_host = all(device.platform == "cpu" for device in leaf.devices())
    return np.asarray(leaf)[index] if on_host else leaf[index]


def as_stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An array in the dtype that a file has: codes keep their bits, numbers their value."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array).view(dtype)
    return np.ascontiguousarray(array.astype(dtype, copy=False))


@jax.jit
def _stored_mxfp4(stack: MXFP4, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    indices = tuple(index[i] for i in range(index.shape[0]))
    return jax.tree.map(lambda leaf: leaf[indices], stack).to_stored()


def scale_name(name: str) -> str:
    """The name of a weight's scale."""
    return f"{name.removesuffix('.weight')}.scale"


def split_into_shards(
    entries: dict[str, list[Entry]], max_shard_bytes: int
) -> dict[str, list[str]]:
    """Canonical names by file, of at most that many bytes; a larger tensor has one of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, parts in entries.items():
        count = sum(entry.num_bytes for entry in parts)
        if shards[-1] and size + count > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def format_fields(leaves: Collection[Any]) -> dict[str, Any]:
    """What `config.json` says about quantised weights, as the release has it; {} of dense ones."""
    fp8 = [leaf for leaf in leaves if isinstance(leaf, BlockFP8)]
    has_fp4 = any(isinstance(leaf, MXFP4) for leaf in leaves)
    if not fp8 and not has_fp4:
        return {}
    block = next(leaf.row_group for leaf in leaves if isinstance(leaf, BlockFP8 | MXFP4))
    quantisation = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }
    if all(leaf.scale.dtype == jnp.uint8 for leaf in fp8):
        quantisation["scale_fmt"] = "ue8m0"
    experts = {"expert_dtype": "fp4" if has_fp4 else "fp8"}
    if block != FP8_BLOCK:  # DeepSeek-V4.1, whose configs have it inside
        return {"quantization_config": quantisation | experts}
    return experts | {"quantization_config": quantisation}
