"""Collectives of a step, where the devices of a mesh must agree.

Each of them is the identity where its axis has one device or there is no mesh. Those of a layer go
through peer buffers where there are some (`peers.py`); all others, and those of many rows, are
NCCL's.
"""

from __future__ import annotations

import jax

from dsv4_jax.mesh import DATA, MODEL, axis_size
from dsv4_jax.peers import own_buffer
from pallas_kernels.common.pending import SplitSums, finish
from pallas_kernels.peer_collectives import all_gather, all_reduce, all_to_all, reduce_scatter


def sum_over_model(
    x: jax.Array | SplitSums, plus: jax.Array | SplitSums | None = None
) -> jax.Array:
    """The sum of the devices of a data shard, on each of them: [T, ...] -> [T, ...].

    Parts are added in f32 in the order of the devices, and rounded once: the same bits whatever T
    is and wherever a row lies.

    Args:
      x: what this device has; a product may have left it in parts.
      plus: is added to `x` first, and the sum rounded; None is nothing.
    """
    if axis_size(MODEL) == 1:
        return finish(x) if plus is None else finish(x) + finish(plus)
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
    return all_gather(*arrays, axis_name=MODEL, buffer=own_buffer(MODEL))


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
    found = all_gather(*arrays, axis_name=DATA, buffer=own_buffer(DATA))
    return tuple(every.reshape(-1, *every.shape[2:]) for every in found)


def sum_own_rows(x: jax.Array) -> jax.Array:
    """The sum over `data` of this shard's rows: [data * T, ...] -> [T, ...].

    Parts are added as by `sum_over_model`.
    """
    shards = axis_size(DATA)
    if shards == 1:
        return x
    parts = x.reshape(shards, -1, *x.shape[1:])
    return reduce_scatter(parts, DATA, buffer=own_buffer(DATA))
