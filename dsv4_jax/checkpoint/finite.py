"""Weights that hold NaN or infinity, by name: in NumPy while they load, and on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.weights import MXFP4, BlockFP8, Weight, is_quantized

CHECKED_BYTES = 2**26
"""Checkpoints up to this size are checked unless told otherwise; 64 MiB take some 50 ms."""

_CHUNK = 2**20
"""Elements looked at at once, so that a check holds a megabyte beside the tensor."""


def count_not_finite(array: np.ndarray) -> int:
    """Elements that are NaN or infinity; none of an array of integers.

    Args:
      array: of integers, or f32, bf16, f16 or E4M3.
    """
    if array.dtype.kind in "iu":
        return 0
    flat = array.reshape(-1)
    count = 0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        count += part.size - int(np.count_nonzero(np.isfinite(part)))
    return count


def find_not_finite(name: str, array: np.ndarray) -> list[str]:
    """What is wrong with the values of the tensor of this name: one line, or none."""
    if not (count := count_not_finite(array)):
        return []
    return [
        f"not finite: {name} has {count:,} of {array.size:,} values that are NaN or infinity in "
        f"{array.dtype}"
    ]


def list_not_finite(params: Any) -> list[str]:
    """Names of parameters on the device that hold NaN or infinity, in codes or scales too."""
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]
    return [jax.tree_util.keystr(path) for path, leaf in leaves if not _is_finite(leaf)]


def _is_finite(leaf: Weight) -> bool:
    """Whether no value is NaN or infinity, and no UE8M0 scale 255, which is its NaN."""
    if isinstance(leaf, BlockFP8 | MXFP4):
        if not jnp.issubdtype(leaf.scale.dtype, jnp.floating):
            scales = jax.lax.bitcast_convert_type(leaf.scale, jnp.uint8)
            return _is_finite(leaf.codes) and bool(jnp.all(scales != 255))
        return _is_finite(leaf.codes) and _is_finite(leaf.scale)
    return not jnp.issubdtype(leaf.dtype, jnp.floating) or bool(_all_finite(leaf))


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    """In one pass, without an array of as many flags."""
    return jnp.all(jnp.isfinite(leaf))
