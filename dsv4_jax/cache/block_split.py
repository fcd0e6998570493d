"""Blocks of a request dealt over the devices of a data shard, where a cache is split.

Logical block b of a request lies on device b % n of `model`, entries and index keys alike. In a
table, blocks are numbered through all devices of the data shard: device d holds as many as the
others, from d times that many on. On its device a block is the one of that many fewer.

    n = 2, entries of blocks of 2     entries 0 1 | 2 3 | 4 5 | 6 7
                                      device    0     1     0     1
                                      there   0 1   0 1   2 3   2 3

The entries that a device has keep their order there, and the first of a request that a query sees
are the first that it sees of these. So an op takes a device's own blocks and entries as it takes
those of a whole cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import MODEL, axis_size, place_on


def own_blocks(blocks: jax.Array, num_own: int) -> jax.Array:
    """Blocks by their numbers on this device; -1 for those of other devices and for none.

    Args:
      blocks: i32[...], as tables number them.
      num_own: blocks that a device holds.
    """
    own = blocks - place_on(MODEL) * num_own
    return jnp.where((blocks >= 0) & (own >= 0) & (own < num_own), own, -1)


def own_mask(mask: jax.Array, num_own: int) -> jax.Array:
    """bool[NB] of a data shard -> bool[num_own], of this device's blocks."""
    if mask.shape[0] == num_own:
        return mask
    return jax.lax.dynamic_slice(mask, (place_on(MODEL) * num_own,), (num_own,))


def own_table(block_table: jax.Array, num_own: int) -> jax.Array:
    """i32[B, LB] -> i32[B, ceil(LB / n)]: this device's blocks of each request, in order."""
    parts = axis_size(MODEL)
    spare = -block_table.shape[1] % parts
    padded = jnp.pad(block_table, ((0, 0), (0, spare)), constant_values=-1)
    mine = padded.reshape(block_table.shape[0], -1, parts)[:, :, place_on(MODEL)]
    return own_blocks(mine, num_own)


def count_own(visible: jax.Array, per_block: int) -> jax.Array:
    """How many of a request's first `visible` entries lie here: i32[T] -> i32[T].

    `per_block` is EB, as in every function below.
    """
    parts, part = axis_size(MODEL), place_on(MODEL)
    full, rest = visible // per_block, visible % per_block
    own_full = (full + parts - 1 - part) // parts
    return own_full * per_block + jnp.where(full % parts == part, rest, 0)


def own_entries(entries: jax.Array, per_block: int) -> jax.Array:
    """Entries i32[...] by their numbers here; -1 for those of other devices and for none."""
    parts = axis_size(MODEL)
    block = entries // per_block
    is_own = (entries >= 0) & (block % parts == place_on(MODEL))
    return jnp.where(is_own, block // parts * per_block + entries % per_block, -1)


def logical_entries(own: jax.Array, per_block: int) -> jax.Array:
    """What `own_entries` numbers so: i32[...] -> i32[...]; -1 stays."""
    block = own // per_block * axis_size(MODEL) + place_on(MODEL)
    return jnp.where(own >= 0, block * per_block + own % per_block, -1)


def gather_own(selected: jax.Array, per_block: int) -> tuple[jax.Array, jax.Array]:
    """Of the entries that each query attends to, those that lie here.

    Args:
      selected: i32[T, K] in any order, -1 for none.
      per_block: EB.

    Returns:
      i32[T, K], numbers here, ascending, then -1; and i32[T], how many they are.
    """
    own = own_entries(selected, per_block)
    return ascending(own), jnp.sum(own >= 0, axis=1, dtype=jnp.int32)


def best_of_all(scores: jax.Array, entries: jax.Array, k: int) -> jax.Array:
    """The k best of what each device found best, with the ties of `select_top_k`.

    Args:
      scores: f32[n, T, m].
      entries: i32[n, T, m], -1 for none.
      k: number to select.

    Returns:
      i32[T, k], the best first, then -1.
    """
    last = jnp.iinfo(jnp.int32).max
    scores, entries = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1) for x in (scores, entries))
    scores = jnp.where(scores == 0, 0.0, scores)  # of both signs
    # NaN ranks below minus infinity, and what is none below NaN.
    rank = jnp.where(entries < 0, 2, jnp.isnan(scores).astype(jnp.int32))
    falling = jnp.where(rank > 0, 0.0, -scores)
    *_, best = jax.lax.sort((rank, falling, jnp.where(entries < 0, last, entries)), num_keys=3)
    best = jnp.where(best[:, :k] < last, best[:, :k], -1)
    return jnp.pad(best, ((0, 0), (0, k - best.shape[1])), constant_values=-1)


def ascending(entries: jax.Array) -> jax.Array:
    """i32[T, K], -1 for none, in ascending order, then -1."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(entries >= 0, entries, last), axis=1)
    return jnp.where(ordered < last, ordered, -1)


def join_heads(parts: jax.Array) -> jax.Array:
    """[n, T, H, C] of n devices -> [T, n * H, C]."""
    joined = jnp.moveaxis(parts, 0, 1)
    return joined.reshape(joined.shape[0], -1, joined.shape[-1])
