"""What the manager changes on the device between steps: tables, lengths, copies, loads, poison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.cache.block_split import own_blocks, own_mask
from dsv4_jax.cache.model_cache import ModelCache, check_rows, update_slots
from dsv4_jax.cache.poison import poison
from dsv4_jax.cache.snapshots import SnapshotStore, check_store, load_snapshots
from dsv4_jax.mesh import on_mesh
from pallas_kernels.common.addressing import drop_absent

Array = jax.Array | np.ndarray


@flax.struct.dataclass(kw_only=True)
class SlotChanges:
    """One batch of changes; shapes depend on the cache alone, -1 is no change.

    Copies read the cache as it was; then what was freed is poisoned, if that is asked for; then
    copies and snapshots are written, last tables and lengths.

    Attributes:
      slots: i32[NS], whose length and table row are set.
      length_tokens: i32[NS]; -1 leaves a length as it is, where steps have yet to be counted.
      block_table: i32[NS, LB].
      copy_from: i32[NS], slot whose rings and states are copied.
      copy_to: i32[NS], slot that they go to.
      block_from: i32[NS], open block that is copied too; -1 where there is none.
      block_to: i32[NS], block that it is copied to.
      load_slots: i32[NS], slots that a snapshot goes to.
      load_places: i32[NS], that snapshot's place in the store.
      load_ends: i32[NS], that snapshot's boundary.
      freed_slots: bool[NS], slots to poison; None poisons nothing.
      freed_blocks: bool[NB], blocks to poison; None poisons nothing.
    """

    slots: Array
    length_tokens: Array
    block_table: Array
    copy_from: Array
    copy_to: Array
    block_from: Array
    block_to: Array
    load_slots: Array
    load_places: Array
    load_ends: Array
    freed_slots: Array | None = None
    freed_blocks: Array | None = None


@on_mesh("cache")
def apply_changes(cache: ModelCache, store: SnapshotStore, changes: SlotChanges) -> ModelCache:
    """The cache with a batch of changes.

    Args:
      cache: between steps.
      store: the snapshots; not changed.
      changes: what `KVCacheManager.take_changes` gave.

    Raises:
      ValueError: an array has another shape or dtype or, outside jit, names a slot, a block or a
        snapshot that is not there.
    """
    checks.instance("cache", cache, ModelCache)
    check_store(store, cache.state)
    checks.instance("changes", changes, SlotChanges)
    check_rows(cache, changes.slots, changes.length_tokens, changes.block_table)  # type: ignore
    lengths = _lengths(cache, changes.slots, changes.length_tokens)
    slots, blocks = cache.max_requests, cache.num_blocks
    for name, high in (
        ("copy_from", slots),
        ("copy_to", slots),
        ("block_from", blocks),
        ("block_to", blocks),
        ("load_slots", slots),
        ("load_places", store.num_snapshots),
        ("load_ends", cache.max_context_tokens + 1),
    ):
        checks.array(name, getattr(changes, name), (slots,))
        checks.in_range(name, getattr(changes, name), -1, high)
    source = jnp.maximum(changes.copy_from, 0)
    copied = jax.tree.map(lambda plane: plane[:, source], cache.state)
    block_from, block_to, freed_blocks = changes.block_from, changes.block_to, changes.freed_blocks
    if cache.split_cache:  # the open block of a fork lies where its source does
        block_from, block_to = (own_blocks(jnp.asarray(b), blocks) for b in (block_from, block_to))
        freed_blocks = None if freed_blocks is None else own_mask(jnp.asarray(freed_blocks), blocks)
    block_source = jnp.maximum(block_from, 0)
    copied_blocks = jax.tree.map(lambda plane: plane[:, block_source], cache.paged)
    cache = poison(cache, changes.freed_slots, freed_blocks)

    def write(targets: Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def put(plane: jax.Array, values: jax.Array) -> jax.Array:
            return plane.at[:, drop_absent(jnp.asarray(targets), plane.shape[1])].set(
                values, mode="drop"
            )

        return put

    state = jax.tree.map(write(changes.copy_to), cache.state, copied)
    paged = jax.tree.map(write(block_to), cache.paged, copied_blocks)
    places = (changes.load_slots, changes.load_places, changes.load_ends)
    state = load_snapshots(state, store, *map(jnp.asarray, places))
    cache = dataclasses.replace(cache, state=state, paged=paged)
    rows = (changes.slots, lengths, changes.block_table)
    return update_slots(cache, *map(jnp.asarray, rows))


def set_tables(cache: ModelCache, changes: SlotChanges, *, in_place: bool = False) -> ModelCache:
    """Tables and lengths alone; the cache's other arrays are passed on as they are.

    With `in_place` its tables and lengths are gone.
    """
    rows = (changes.slots, changes.length_tokens, changes.block_table)
    small = dataclasses.replace(cache, state={}, paged={})
    small = (_jit_set_rows_in_place if in_place else _jit_set_rows)(small, *rows)
    return dataclasses.replace(small, state=cache.state, paged=cache.paged)


@on_mesh("cache")
def _set_rows(cache: ModelCache, slots: Array, length_tokens: Array, table: Array) -> ModelCache:
    lengths = _lengths(cache, slots, length_tokens)
    return update_slots(cache, *map(jnp.asarray, (slots, lengths, table)))


_jit_set_rows = jax.jit(_set_rows)
_jit_set_rows_in_place = jax.jit(_set_rows, donate_argnames="cache")


def _lengths(cache: ModelCache, slots: Array, length_tokens: Array) -> Array:
    """Lengths to set, with those of the cache where they stay."""
    slots = jnp.clip(jnp.asarray(slots), 0, cache.length_tokens.shape[0] - 1)
    return jnp.where(jnp.asarray(length_tokens) < 0, cache.length_tokens[slots], length_tokens)


jit_apply_changes = jax.jit(apply_changes, donate_argnames="cache")
"""`apply_changes`, jitted; the old cache is gone."""
