"""The definitions of the collectives, with those of JAX.

Parts are added in f32, in the order of the devices, and rounded once. NCCL begins a sum at another
device in each part of an array, so that a request would get other bits in another row. Two numbers
have one sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GATHERED_BYTES = 2 << 20
"""Beyond them it takes less time to add each device's share of the rows and to gather the sums."""


def all_reduce(x: jax.Array, axis_name: str) -> jax.Array:
    """See `op.all_reduce`."""
    devices = jax.lax.axis_size(axis_name)
    if devices == 2:
        return jax.lax.psum(x, axis_name)
    num_bytes = x.size * x.dtype.itemsize
    # Each device gets all parts [n, rows, ...] and adds them up itself.
    if x.shape[0] % devices or (devices - 2) * num_bytes <= _GATHERED_BYTES:
        return _add_up(jax.lax.all_gather(x, axis_name))
    # [rows / n, ...] of the sum, then all shares in the order of devices.
    own = reduce_scatter(x.reshape(devices, -1, *x.shape[1:]), axis_name)
    return jax.lax.all_gather(own, axis_name, tiled=True)


def reduce_scatter(x: jax.Array, axis_name: str) -> jax.Array:
    """See `op.reduce_scatter`."""
    if jax.lax.axis_size(axis_name) == 2:
        return jax.lax.psum_scatter(x, axis_name, scatter_dimension=0)
    return _add_up(all_to_all(x, axis_name))


def all_gather(*arrays: jax.Array, axis_name: str) -> tuple[jax.Array, ...]:
    """See `op.all_gather`; rows of words of the narrowest array, 16 bits at most."""
    if len(arrays) == 1:
        return (jax.lax.all_gather(arrays[0], axis_name),)
    bits = min(16, *(8 * array.dtype.itemsize for array in arrays))
    words = [_to_words(array, jnp.dtype(f"uint{bits}")) for array in arrays]
    together = jax.lax.all_gather(jnp.concatenate(words, axis=1), axis_name)
    ends = np.cumsum([word.shape[1] for word in words])[:-1].tolist()
    parts = jnp.split(together, ends, axis=2)  # [n, rows, words] of each array
    return tuple(
        _from_words(part, array.dtype).reshape(-1, *array.shape)
        for part, array in zip(parts, arrays, strict=True)
    )


def all_to_all(x: jax.Array, axis_name: str) -> jax.Array:
    """See `op.all_to_all`."""
    return jax.lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0)


def _add_up(parts: jax.Array) -> jax.Array:
    """[n, ...] -> [...], from the first to the last, rounded once."""
    wide = jnp.float32 if parts.dtype.itemsize < 4 else parts.dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    return total.astype(parts.dtype)


def _to_words(array: jax.Array, word: Any) -> jax.Array:
    words = jax.lax.bitcast_convert_type(array, word)  # [rows, ...], a last axis if it was wider
    return words.reshape(array.shape[0], -1)


def _from_words(words: jax.Array, dtype: Any) -> jax.Array:
    count = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    if count > 1:
        words = words.reshape(*words.shape[:-1], -1, count)  # words of an element in the last axis
    return jax.lax.bitcast_convert_type(words, dtype)
