"""ModelCache: all layers' pools, lengths and block tables; the value that a step donates."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.paged_cache import PagedKVPool, init_paged_pool
from dsv4_jax.cache.schema import (
    FormatName,
    LayerCacheSchema,
    blocks_of,
    build_schema,
    check_selector,
    choose_cache_format,
    compute_block_budget,
    same_sizes,
)
from dsv4_jax.cache.state_cache import StateCachePool, init_state_pool
from dsv4_jax.cache.step_input import StepInput, check_room, check_step_input, index_call
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import draft_layer, layer_schedule
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.mesh import AXES, DATA, AnyMesh, check_divides, mesh_sizes, on_mesh, shardings_of
from pallas_kernels.common.call import CallIndices


@flax.struct.dataclass(kw_only=True)
class ModelCache:
    """The hybrid cache of a whole model, layers stacked by attention type.

    Attributes:
      state: by attention type, the slots of all its layers; only types that have layers.
      paged: by attention type, CSA and HCA, the blocks of all its layers; only types that have
        layers.
      length_tokens: i32[NS], tokens of each slot's request; 0 in a free slot.
      block_table: i32[NS, LB], physical block of each logical one; -1 where there is none. One
        table for both compressed types.
      schemas: schemas of every layer in order, the draft block last.
      split_cache: on a mesh, blocks are dealt over `model` (`block_split.py`); a table then numbers
        them through all devices of the data shard.
    """

    state: dict[str, StateCachePool]
    paged: dict[str, PagedKVPool]
    length_tokens: jax.Array
    block_table: jax.Array
    schemas: tuple[LayerCacheSchema, ...] = flax.struct.field(pytree_node=False)
    split_cache: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def block_tokens(self) -> int:
        """Tokens that a block stands for."""
        return self.schemas[0].block_tokens

    @property
    def max_context_tokens(self) -> int:
        """Tokens that a block table row can address."""
        return self.block_table.shape[1] * self.block_tokens

    @property
    def max_requests(self) -> int:
        """NS, slots."""
        return self.length_tokens.shape[0]

    def memory_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def num_blocks(self) -> int:
        """NB, physical blocks; with no compressed layer, those that the tables may name.

        In a step on a split cache, those of one device.
        """
        pools = list(self.paged.values())
        return pools[0].num_blocks if pools else self.block_table.size

    def check_input(self, step_input: StepInput, *, vocab_size: int, num_steps: int = 1) -> None:
        """Refuses a call that a step would take otherwise than it is written.

        Shapes and dtypes, and outside jit values too: ids and slots that are not there, tokens
        that a slot has no room for.

        Args:
          step_input: the call.
          vocab_size: V.
          num_steps: how often it is repeated.

        Raises:
          ValueError: a field has another shape or dtype, or a value out of range.
        """
        check_step_input(step_input, vocab_size=vocab_size, num_slots=self.max_requests)
        check_room(
            step_input,
            self.length_tokens,
            self.block_table,
            block_tokens=self.block_tokens,
            needs_blocks=bool(self.paged),
            num_steps=num_steps,
        )

    def index(self, step_input: StepInput, *, max_row_tokens: int | None = None) -> CallIndices:
        """The indices of a call; `max_row_tokens` is T unless the caller knows better."""
        return index_call(
            self.length_tokens,
            self.block_table,
            step_input,
            block_tokens=self.block_tokens,
            max_row_tokens=max_row_tokens or step_input.token_ids.shape[0],
        )

    def layer(
        self,
        attn: AttentionType,
        family_idx: jax.Array | int,
        call: CallIndices,
        *,
        in_place: bool = False,
    ) -> LayerCacheHandle:
        """The handle of one layer of an attention type, for one call; `in_place` as there."""
        state = self.state[attn]
        return LayerCacheHandle(
            paged=self.paged.get(attn),
            state=state,
            layer=jnp.asarray(family_idx, jnp.int32),
            call=call,
            schema=state.schema,
            in_place=in_place,
            split_cache=self.split_cache,
        )

    def with_layer(self, handle: LayerCacheHandle) -> ModelCache:
        """The cache with what a handle has written."""
        attn = handle.schema.attn_type
        paged = self.paged if handle.paged is None else {**self.paged, attn: handle.paged}
        return dataclasses.replace(self, state={**self.state, attn: handle.state}, paged=paged)


def init_cache(
    config: DSV4Config,
    *,
    max_requests: int,
    max_context_tokens: int,
    cache_format: FormatName | None = None,
    num_blocks: int | None = None,
    mesh: AnyMesh | None = None,
    split_cache: bool = False,
) -> ModelCache:
    """An empty cache.

    Args:
      config: the model.
      max_requests: NS, slots.
      max_context_tokens: longest context of a request, in tokens; any number.
      cache_format: name of the storage format, or a `CacheFormat`; None is that of the config's
        idea, or the default, `fp8_ue8m0`.
      num_blocks: physical blocks. None gives every slot a full context of its own: slot r holds
        blocks r * LB to (r + 1) * LB - 1, so that it works without a manager. A number leaves
        the tables empty, for a manager to fill.
      mesh: where the cache lies; slots and blocks are split over its axis `data`, and tables hold
        ids within a part. None is one device.
      split_cache: on a mesh, the blocks of a request are dealt over `model` as well: logical block
        b of a table lies on device b % n, which has the b-th part of the data shard's blocks, in
        the order of their ids. A request then takes an n-th of its blocks' bytes on each device,
        and a step two more collectives in each compressed layer.

    Raises:
      ValueError: an argument is out of range or does not divide over the mesh, there is no such
        format, or an idea's selector would need blocks that are split.
    """
    split_cache = checks.flag("split_cache", split_cache)
    if mesh is not None:
        return _init_on_mesh(
            mesh,
            config,
            max_requests=max_requests,
            max_context_tokens=max_context_tokens,
            cache_format=cache_format,
            num_blocks=num_blocks,
            split_cache=split_cache,
        )
    checks.instance("config", config, DSV4Config)
    check_selector(config, split_cache=split_cache)
    max_requests = checks.integer("max_requests", max_requests, 1)
    max_context_tokens = checks.integer("max_context_tokens", max_context_tokens, 1)
    cache_format = choose_cache_format(config, cache_format)
    schedule = (*layer_schedule(config), *([draft_layer(config)] if config.num_mtp_layers else []))
    budget = compute_block_budget(config, schedule, max_context_tokens, max_requests, headroom=0.0)
    width = blocks_of(config, max_context_tokens)
    if num_blocks is not None:
        num_blocks = checks.integer("num_blocks", num_blocks, 1)
    if num_blocks is None:
        checks.integer("max_requests", max_requests, high=checks.INT32_MAX // width)
    else:
        budget = {attn: num_blocks if blocks else 0 for attn, blocks in budget.items()}
    return _empty_cache(
        tuple(build_schema(config, spec, cache_format) for spec in schedule),
        tuple(budget.items()),
        table_shape=(max_requests, width),
        has_own_blocks=num_blocks is None,
        split_cache=split_cache,
    )


@functools.partial(
    jax.jit, static_argnames=("schemas", "budget", "table_shape", "has_own_blocks", "split_cache")
)
def _empty_cache(
    schemas: tuple[LayerCacheSchema, ...],
    budget: tuple[tuple[AttentionType, int], ...],
    *,
    table_shape: tuple[int, int],
    has_own_blocks: bool,
    split_cache: bool,
) -> ModelCache:
    """All arrays by one program, which compiles faster than one for each of them.

    Args:
      schemas: of the layers.
      budget: physical blocks, by attention type.
      table_shape: NS, LB.
      has_own_blocks: every slot has a full context of its own, else none.
      split_cache: as in `ModelCache`.
    """
    max_requests, width = table_shape
    table = jnp.full(table_shape, -1, jnp.int32)
    if has_own_blocks:
        table = jnp.arange(max_requests * width, dtype=jnp.int32).reshape(table_shape)
    state, paged = {}, {}
    for attn in AttentionType:
        family = [schema for schema in schemas if schema.attn_type == attn]
        if not family:
            continue
        shared = same_sizes(family[0])
        state[attn.value] = init_state_pool(shared, max_requests, num_layers=len(family))
        if attn != AttentionType.SWA:
            blocks = dict(budget)[attn]
            paged[attn.value] = init_paged_pool(shared, blocks, num_layers=len(family))
    return ModelCache(
        state=state,
        paged=paged,
        length_tokens=jnp.zeros(max_requests, jnp.int32),
        block_table=table,
        schemas=schemas,
        split_cache=split_cache,
    )


def _init_on_mesh(
    mesh: AnyMesh,
    config: DSV4Config,
    *,
    max_requests: int,
    max_context_tokens: int,
    num_blocks: int | None,
    split_cache: bool,
    **sizes: Any,
) -> ModelCache:
    """Each device makes its own part; arguments as of `init_cache`."""
    checks.instance("config", config, DSV4Config)
    shards, parts = mesh_sizes(mesh)
    parts = parts if split_cache else 1
    max_requests = checks.integer("max_requests", max_requests, 1)
    max_context_tokens = checks.integer("max_context_tokens", max_context_tokens, 1)
    check_divides(mesh, {"max_requests": max_requests}, (DATA,))
    if num_blocks is not None:
        num_blocks = checks.integer("num_blocks", num_blocks, 1)
        check_divides(mesh, {"num_blocks": num_blocks}, AXES if split_cache else (DATA,))
    slots = max_requests // shards
    of_slot = -(-blocks_of(config, max_context_tokens) // parts)
    checks.integer("max_requests", max_requests, high=checks.INT32_MAX // (of_slot * parts))

    def build() -> ModelCache:
        cache = init_cache(
            config,
            max_requests=max_requests,
            max_context_tokens=max_context_tokens,
            num_blocks=max_requests * parts * of_slot if num_blocks is None else num_blocks,
            split_cache=split_cache,
            **sizes,
        )
        if num_blocks is not None:
            return cache
        slot = (jnp.arange(max_requests, dtype=jnp.int32) % slots)[:, None]
        logical = jnp.arange(cache.block_table.shape[1], dtype=jnp.int32)[None]
        table = (logical % parts * slots + slot) * of_slot + logical // parts
        return dataclasses.replace(cache, block_table=table)

    return jax.jit(build, out_shardings=shardings_of(jax.eval_shape(build), mesh))()


@on_mesh("cache")
def update_slots(
    cache: ModelCache, slots: jax.Array, length_tokens: jax.Array, block_table: jax.Array
) -> ModelCache:
    """Sets lengths and tables of some slots: admit, extend, hit, release. Between steps.

    Args:
      cache: the cache.
      slots: i32[U]; -1 changes nothing.
      length_tokens: i32[U], tokens that each slot holds from now on.
      block_table: i32[U, LB], -1 where there is no block.

    Raises:
      ValueError: a shape is wrong; outside jit also, a slot is not there or stands there twice, a
        block is beyond the pool, or a length beyond the context.
    """
    checks.instance("cache", cache, ModelCache)
    check_rows(cache, slots, length_tokens, block_table)
    dropped = jnp.where(jnp.asarray(slots) < 0, cache.max_requests, slots)
    return dataclasses.replace(
        cache,
        length_tokens=cache.length_tokens.at[dropped].set(length_tokens, mode="drop"),
        block_table=cache.block_table.at[dropped].set(block_table, mode="drop"),
    )


def check_rows(
    cache: ModelCache, slots: jax.Array, length_tokens: jax.Array, block_table: jax.Array
) -> None:
    """Refuses what `update_slots` cannot set; arguments and errors as there."""
    checks.array("slots", slots, (None,))
    checks.array("length_tokens", length_tokens, (None,))
    checks.array("block_table", block_table, (None, None))
    if block_table.shape != (slots.shape[0], cache.block_table.shape[1]):
        raise ValueError(
            f"block_table must have shape {(slots.shape[0], cache.block_table.shape[1])}, "
            f"got {block_table.shape=}"
        )
    if length_tokens.shape != slots.shape:
        raise ValueError(
            f"slots and length_tokens must agree, got {slots.shape=} and {length_tokens.shape=}"
        )
    changed = checks.known_values(slots)
    if changed is not None:
        checks.in_range("slots", changed, -1, cache.max_requests)
        checks.no_slot_twice("slots", changed)
        live = changed >= 0
        high = cache.max_context_tokens + 1
        checks.in_range("length_tokens", length_tokens, 0, high, where=live)
        checks.in_range("block_table", block_table, -1, cache.num_blocks, where=live[:, None])


@on_mesh("cache")
def reset_slots(cache: ModelCache, slots: jax.Array) -> ModelCache:
    """Empties slots i32[U] (-1 for none): length 0, rings and states as new; tables stay.

    Raises:
      ValueError: `slots` is no such array or, outside jit, holds a slot that is not there.
    """
    checks.instance("cache", cache, ModelCache)
    checks.array("slots", slots, (None,))
    checks.in_range("slots", slots, -1, cache.max_requests)
    slots = jnp.asarray(slots, jnp.int32)
    dropped = jnp.where(slots < 0, cache.max_requests, slots)
    return dataclasses.replace(
        cache,
        state={attn: pool.reset_slots(slots) for attn, pool in cache.state.items()},
        length_tokens=cache.length_tokens.at[dropped].set(0, mode="drop"),
    )


def cache_shapes(
    config: DSV4Config,
    *,
    max_requests: int,
    max_context_tokens: int,
    cache_format: FormatName | None = None,
    split_cache: bool = False,
) -> ModelCache:
    """What `init_cache` would allocate, as `jax.ShapeDtypeStruct`; nothing is allocated."""

    def build() -> ModelCache:
        return init_cache(
            config,
            max_requests=max_requests,
            max_context_tokens=max_context_tokens,
            cache_format=cache_format,
            split_cache=split_cache,
        )

    return jax.eval_shape(build)


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def family_bytes(cache: ModelCache) -> dict[str, int]:
    """Bytes of each family of arrays."""
    checks.instance("cache", cache, ModelCache)
    pools = [*cache.paged.items(), *cache.state.items()]
    return {
        f"{attn} {name}": tree_bytes(arrays)
        for attn, pool in pools
        for name, arrays in pool.families().items()
    }
