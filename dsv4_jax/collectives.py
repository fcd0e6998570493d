"""Collectives of a step, where the devices of a mesh must agree.

Each of them is the identity where its axis has one device or there is no mesh. Those of a layer go
through peer buffers where there are some (`peers.py`); all others, and those of many rows, are
NCCL's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.mesh import DATA, MODEL, axis_size
from dsv4_jax.peers import own_buffer
from pallas_kernels.peer_collectives import all_gather, all_reduce, all_to_all, reduce_scatter


def sum_over_model(x: jax.Array, plus: jax.Array | None = None) -> jax.Array:
    """The sum of the devices of a data shard, on each of them: [T, ...] -> [T, ...].

    Parts are added in f32 in the order of the devices, and rounded once: the same bits whatever T
    is and wherever a row lies.

    Args:
      x: what this device has.
      plus: is added to `x` first, and the sum rounded; None is nothing.
    """
    if axis_size(MODEL) == 1:
        return x if plus is None else x + plus
    return all_reduce(x, MODEL, plus=plus, buffer=own_buffer(MODEL))


def gather_over_model(x: jax.Array) -> jax.Array:
    """[n, ...] -> [model, n, ...], or [1, n, ...]."""
    return jax.lax.all_gather(x, MODEL) if axis_size(MODEL) > 1 else x[None]


def join_last_axis(x: jax.Array) -> jax.Array:
    """[..., n] -> [..., model * n], the parts of all devices of a data shard."""
    if axis_size(MODEL) == 1:
        return x
    return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)


def gather_in_one(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """What the devices of a data shard have, in one collective.

    Args:
      *arrays: [T, ...] each, of 16 or 32 bits.

    Returns:
      [model, T, ...] each.
    """
    if axis_size(MODEL) == 1:
        return tuple(array[None] for array in arrays)
    words = [_to_words(array, jnp.uint16) for array in arrays]
    together = all_gather(jnp.concatenate(words, axis=1), MODEL, buffer=own_buffer(MODEL))
    ends = np.cumsum([word.shape[1] for word in words])[:-1].tolist()
    return tuple(
        jax.vmap(lambda part, like=array: _from_words(part, like.dtype).reshape(like.shape))(part)
        for part, array in zip(jnp.split(together, ends, axis=2), arrays, strict=True)
    )


def exchange_over_model(x: jax.Array) -> jax.Array:
    """Row i goes to device i: [model, ...] -> [model, ...], what each device has for this one."""
    if axis_size(MODEL) == 1:
        return x
    return all_to_all(x, MODEL, buffer=own_buffer(MODEL))


def gather_rows(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The rows of all data shards, in order, in one collective.

    Args:
      *arrays: [T, n] each, of 8, 16 or 32 bits.

    Returns:
      [data * T, n] each.
    """
    if axis_size(DATA) == 1:
        return arrays
    bits = min(16, *(8 * array.dtype.itemsize for array in arrays))
    words = [_to_words(array, jnp.dtype(f"uint{bits}")) for array in arrays]
    together = all_gather(jnp.concatenate(words, axis=1), DATA, buffer=own_buffer(DATA))
    together = together.reshape(-1, together.shape[-1])
    ends = np.cumsum([word.shape[1] for word in words])[:-1].tolist()
    parts = jnp.split(together, ends, axis=1)
    return tuple(_from_words(p, a.dtype) for p, a in zip(parts, arrays, strict=True))


def sum_own_rows(x: jax.Array) -> jax.Array:
    """The sum over `data` of this shard's rows: [data * T, ...] -> [T, ...].

    Parts are added as by `sum_over_model`.
    """
    shards = axis_size(DATA)
    if shards == 1:
        return x
    parts = x.reshape(shards, -1, *x.shape[1:])
    return reduce_scatter(parts, DATA, buffer=own_buffer(DATA))


def _to_words(array: jax.Array, word: Any) -> jax.Array:
    words = jax.lax.bitcast_convert_type(array, word)
    return words.reshape(array.shape[0], -1)


def _from_words(words: jax.Array, dtype: Any) -> jax.Array:
    count = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    if count > 1:
        words = words.reshape(words.shape[0], -1, count)
    return jax.lax.bitcast_convert_type(words, dtype)
