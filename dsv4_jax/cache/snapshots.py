"""Snapshots: what resumes a request at a block boundary, beside the blocks themselves.

At a boundary every compression window is closed, and no token waits for others of its entry. What
is left to know are the rows of the window ring and, of both CSA compressors, the b-stream of the
last window: half of what its rows hold. The last token ids, where they are kept, are a ring too.

    boundary at 128, W = 16, M = 4        ring rows   112 .. 127
                                          tail rows   124 .. 127, columns [0, C)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv4_jax import checks
from dsv4_jax.cache.filled import filled
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import NewTokens, check_staged
from dsv4_jax.cache.poison import poison_of
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.mesh import DATA, check_divides, find_mesh, shardings_of
from pallas_kernels.common.addressing import drop_absent
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes


@flax.struct.dataclass(kw_only=True)
class SnapshotStore:
    """The snapshots of a cache, layers stacked by attention type.

    Attributes:
      window: by family, planes [L, n, W, ...] as they are stored, in ring order.
      tail: CSA: `values` and `scores`, f32[L, n, M, C], the b-stream of the last window; else None.
      index_tail: CSA: the same for the indexer's compressor, IC wide; else None.
    """

    window: dict[str, Planes]
    tail: Planes | None
    index_tail: Planes | None

    @property
    def num_snapshots(self) -> int:
        """Places, taken or not."""
        return jax.tree.leaves(self.window)[0].shape[1]


@flax.struct.dataclass(kw_only=True)
class SnapshotPlan:
    """Which boundaries a step keeps.

    Attributes:
      rows: i32[n], row of the call.
      ends: i32[n], position of the boundary: tokens before it.
      places: i32[n] in the store; -1 keeps nothing.
    """

    rows: jax.Array
    ends: jax.Array
    places: jax.Array


def init_snapshot_store(cache: ModelCache, num_snapshots: int) -> SnapshotStore:
    """A store without snapshots; every bit of it is set, which is NaN in every format.

    It lies on the mesh of the cache, if that lies on one.

    Raises:
      ValueError: the number is negative, or does not divide over the data shards.
    """
    checks.instance("cache", cache, ModelCache)
    num_snapshots = checks.integer("num_snapshots", num_snapshots, 0)
    build, mesh = functools.partial(_empty_store, cache.state, num_snapshots), find_mesh(cache)
    if not isinstance(mesh, Mesh):
        return build()
    check_divides(mesh, {"num_snapshots": num_snapshots}, (DATA,))
    return jax.jit(build, out_shardings=shardings_of(jax.eval_shape(build), mesh))()


def check_store(store: SnapshotStore, state: Mapping[str, StateCachePool]) -> None:
    """Refuses what is no store of a cache.

    Raises:
      ValueError: an argument is of another type, or they have other layers, sizes or formats.
    """
    checks.instance("store", store, SnapshotStore)
    if not isinstance(state, Mapping) or not state:
        checks.refuse("state", "the state pools of a cache, by attention type", state)
    for pool in state.values():
        checks.instance("state", pool, StateCachePool)
    checks.not_deleted("store", store)
    wanted = jax.eval_shape(lambda: _empty_store(state, store.num_snapshots))
    checks.same_arrays("store", store, wanted, "a store of this cache")


def _empty_store(state: Mapping[str, StateCachePool], num_snapshots: int) -> SnapshotStore:
    """The arrays; of those of the state pools it looks at shapes and dtypes alone."""

    def empty(plane: jax.Array, rows: int, width: int | None = None) -> jax.Array:
        rest = plane.shape[3:] if width is None else (width,)
        shape = (plane.shape[0], num_snapshots, rows, *rest)
        return filled(shape, poison_of(plane.dtype), plane.dtype)

    window = {
        attn: {name: empty(plane, plane.shape[2]) for name, plane in pool.window.items()}
        for attn, pool in state.items()
        if pool.window
    }
    tails: dict[str, Planes | None] = {"tail": None, "index_tail": None}
    for pool in state.values():
        for family in tails:
            planes = getattr(pool, family)
            if planes is not None:
                tails[family] = {
                    name: empty(plane, plane.shape[2] // 2, plane.shape[3] // 2)
                    for name, plane in planes.items()
                }
    return SnapshotStore(window=window, **tails)


def save_snapshots(
    store: SnapshotStore,
    state: Mapping[str, StateCachePool],
    rows: Mapping[str, NewTokens] | None,
    call: CallIndices,
    plan: SnapshotPlan,
) -> SnapshotStore:
    """Keeps the boundaries that a call reaches or crosses.

    Args:
      store: the snapshots before the call.
      state: the cache's state pools; with `rows`, as they were before the call, else after it.
      rows: the call's own tokens, stacked [L, T, ...]; they need not be committed. None takes all
        from `state`, for boundaries that are the requests' lengths.
      call: the call.
      plan: boundaries to keep. One beyond what the call keeps is not written.

    Returns:
      The store.

    Raises:
      ValueError: an argument has another type, shape or dtype or, outside jit, `plan` names a place
        that is not there.
    """
    check_store(store, state)
    checks.instance("call", call, CallIndices)
    if rows is not None:
        check_staged("rows", rows, state, call.positions.shape[0])
    checks.instance("plan", plan, SnapshotPlan)
    for name, high in (
        ("rows", call.row_slots.shape[0]),
        ("ends", checks.INT32_MAX),
        ("places", store.num_snapshots),
    ):
        checks.array(name, getattr(plan, name), (None,))
        checks.in_range(name, getattr(plan, name), -1, high)
    if not store.num_snapshots:
        return store
    row = jnp.clip(plan.rows, 0, call.row_slots.shape[0] - 1)
    reached = plan.ends <= call.row_lengths[row] + call.row_counts[row]
    live = (plan.places >= 0) & (call.row_slots[row] >= 0) & reached
    target = drop_absent(plan.places, store.num_snapshots, is_there=live)
    slot = jnp.maximum(call.row_slots[row], 0)

    def put(kept: Planes, ring: Planes, new: Planes | None, positions: jax.Array) -> Planes:
        """Rows at i32[n, R] positions, from the call where they are its own."""
        size = jax.tree.leaves(ring)[0].shape[2]
        token = positions - call.row_lengths[row, None] + call.row_offsets[row, None]
        in_call = positions >= call.row_lengths[row, None]

        def stored(name: str, plane: jax.Array) -> jax.Array:
            width = plane.shape[3:]
            values = ring[name][:, slot[:, None], jnp.maximum(positions, 0) % size]
            if new is not None:
                own = new[name][:, jnp.clip(token, 0, new[name].shape[1] - 1)]
                select = in_call.reshape(1, *in_call.shape, *[1] * len(width))
                values = jnp.where(select, own, values)
            if width:
                values = values[..., : width[-1]]
            return plane.at[:, target].set(values, mode="drop")

        return {name: stored(name, plane) for name, plane in kept.items()}

    window = dict(store.window)
    tails: dict[str, Planes | None] = {"tail": store.tail, "index_tail": store.index_tail}
    for attn, pool in state.items():
        if attn not in window:
            continue
        own = None if rows is None else rows[attn]
        size = jax.tree.leaves(pool.window)[0].shape[2]
        ring_row = jnp.arange(size, dtype=jnp.int32)[None]
        last = plan.ends[:, None] - 1
        positions = last - (last - ring_row) % size
        window[attn] = put(window[attn], pool.window, own and own.window, positions)
        for family, projections in (
            ("tail", own and own.compressor),
            ("index_tail", own and own.indexer),
        ):
            kept, ring = tails[family], getattr(pool, family)
            if kept is not None and ring is not None:
                compression_ratio = jax.tree.leaves(kept)[0].shape[2]
                back = jnp.arange(compression_ratio, dtype=jnp.int32)[None]
                positions = plan.ends[:, None] - compression_ratio + back
                tails[family] = put(kept, ring, projections and projections.planes, positions)
    return dataclasses.replace(store, window=window, **tails)


def load_snapshots(
    state: Mapping[str, StateCachePool],
    store: SnapshotStore,
    slots: jax.Array,
    places: jax.Array,
    ends: jax.Array,
) -> dict[str, StateCachePool]:
    """Puts snapshots into slots; `update_slots` sets lengths and tables.

    Args:
      state: the cache's state pools.
      store: the snapshots.
      slots: i32[U]; -1 loads nothing. No slot twice.
      places: i32[U], place of each.
      ends: i32[U], boundary of each.

    Returns:
      The cache's state pools.

    Raises:
      ValueError: an argument has another type, shape or dtype or, outside jit, names a slot or a
        place that is not there.
    """
    check_store(store, state)
    num_slots = next(iter(state.values())).num_slots
    for name, array, high in (
        ("slots", slots, num_slots),
        ("places", places, store.num_snapshots),
        ("ends", ends, checks.INT32_MAX),
    ):
        checks.array(name, array, (None,))
        checks.in_range(name, array, -1, high)
    checks.no_slot_twice("slots", slots)
    if not store.num_snapshots:
        return dict(state)
    loaded = {}
    source = jnp.maximum(places, 0)
    for attn, pool in state.items():
        if attn not in store.window:
            loaded[attn] = pool
            continue
        target = drop_absent(slots, pool.num_slots)
        window = {
            name: plane.at[:, target].set(store.window[attn][name][:, source], mode="drop")
            for name, plane in pool.window.items()
        }
        tails = {}
        for family in ("tail", "index_tail"):
            kept, ring = getattr(store, family), getattr(pool, family)
            if kept is None or ring is None:
                tails[family] = ring
                continue
            compression_ratio, width = jax.tree.leaves(kept)[0].shape[2:]
            back = jnp.arange(compression_ratio, dtype=jnp.int32)[None]
            row = jnp.maximum(ends[:, None] - compression_ratio + back, 0) % (2 * compression_ratio)
            tails[family] = {
                name: plane.at[:, target[:, None], row, :width].set(
                    kept[name][:, source], mode="drop"
                )
                for name, plane in ring.items()
            }
        loaded[attn] = dataclasses.replace(pool, window=window, **tails)
    return loaded
