"""Collectives of a step, where the devices of a mesh must agree.

Each of them is the identity where its axis has one device or there is no mesh. Those of a layer go
through peer buffers where there are some (`peers.py`); all others, and those of many rows, are
NCCL's.
"""

from __future__ import annotations

import jax

from dsv4_jax.mesh import DATA, MODEL, axis_size, place_on
from dsv4_jax.peers import own_buffer
from pallas_kernels.common.pending import MaybeSplit, finish
from pallas_kernels.peer_collectives import all_gather, all_reduce, all_to_all, reduce_scatter


def sum_over_model(x: MaybeSplit, plus: MaybeSplit | None = None) -> jax.Array:
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


DEALT_ROWS = 256
"""Rows of a data shard from which on they are dealt over `model` between sublayers."""


def rows_of_a_device(num_rows: int) -> int:
    """How many of T rows each device of a data shard has between sublayers.

    All of them, or T / model where they are dealt and divide: a sum over `model` is then a
    reduce-scatter and a gather, and hyper-connections and norms, which lie between the two, are
    computed for a device's own rows alone. Sums are added in the same order.
    """
    devices = axis_size(MODEL)
    is_dealt = num_rows >= DEALT_ROWS and num_rows % devices == 0
    return num_rows // devices if is_dealt else num_rows


def take_rows(x: jax.Array, own: int) -> jax.Array:
    """[T, ...] -> [n, ...]: of all rows those of this device, n as `rows_of_a_device` gave it."""
    if own == x.shape[0]:
        return x
    return jax.lax.dynamic_slice_in_dim(x, place_on(MODEL) * own, own)


def join_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """[n, ...] -> [T, ...]: the rows of all devices, in order."""
    if axis_size(MODEL) == 1 or x.shape[0] == num_rows:
        return x
    [every] = all_gather(x, axis_name=MODEL, buffer=own_buffer(MODEL))
    return every.reshape(num_rows, *x.shape[1:])


def sum_to_rows(x: MaybeSplit, plus: MaybeSplit | None = None) -> jax.Array:
    """`sum_over_model` of a sublayer's output: [T, D] -> [n, D], the rows that this device has."""
    num_rows, width = x.shape
    own = rows_of_a_device(num_rows)
    if own == num_rows:
        return sum_over_model(x, plus)
    parts = num_rows // own, own, width
    plus = None if plus is None else plus.reshape(*parts)
    return reduce_scatter(x.reshape(*parts), MODEL, plus=plus, buffer=own_buffer(MODEL))


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
    gathered = all_gather(*arrays, axis_name=DATA, buffer=own_buffer(DATA))
    return tuple(every.reshape(-1, *every.shape[2:]) for every in gathered)


def sum_own_rows(x: jax.Array) -> jax.Array:
    """The sum over `data` of this shard's rows: [data * T, ...] -> [T, ...].

    Parts are added as by `sum_over_model`.
    """
    shards = axis_size(DATA)
    if shards == 1:
        return x
    parts = x.reshape(shards, -1, *x.shape[1:])
    return reduce_scatter(parts, DATA, buffer=own_buffer(DATA))
