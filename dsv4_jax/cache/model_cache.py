"""ModelCache: all layers' pools, lengths and block tables; the value that a step donates."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.paged_cache import PagedKVPool
from dsv4_jax.cache.schema import Families, FamilyKind, LayerCacheSchema, same_sizes
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.cache.step_input import StepInput, check_room, check_step_input, index_call
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.mesh import on_mesh
from pallas_kernels.common.addressing import drop_absent
from pallas_kernels.common.call import CallIndices


@flax.struct.dataclass(kw_only=True)
class ModelCache:
    """The hybrid cache of a whole model, layers stacked by attention type.

    Attributes:
      state: by family, the slots of all its layers: of each attention type that has layers and,
        where layers share entries, of pending tokens (`state_cache.py`).
      paged: by family, the blocks of all its layers: of each attention type that has entries or,
        where layers share them, of each ratio, such as "csa2", the layers that make some.
      length_tokens: i32[NS], tokens of each slot's request; 0 in a free slot.
      block_table: i32[NS, LB], physical block of each logical one; -1 where there is none. One
        table for both compressed types.
      schemas: schemas of every layer in order, those of the draft last.
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

    def check_input(
        self, step_input: StepInput, *, vocab_size: int | None, num_steps: int = 1
    ) -> None:
        """Refuses a call that a step would take otherwise than it is written.

        Shapes and dtypes, and outside jit values too: ids and slots that are not there, tokens
        that a slot has no room for.

        Args:
          step_input: the call.
          vocab_size: V; None where it is not known.
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
        schema: LayerCacheSchema | None = None,
        entry_idx: jax.Array | int | None = None,
    ) -> LayerCacheHandle:
        """The handle of one layer of an attention type, for one call.

        Args:
          attn: attention type.
          family_idx: place among the layers of that type.
          call: the call.
          in_place: as of the handle.
          schema: of that layer, or one alike; None looks it up where `family_idx` is static.
          entry_idx: place of the layer's entries in their family; None is that of the schema.
        """
        state = self.state[attn]
        layer = jnp.asarray(family_idx, jnp.int32)
        if state.schema.shares and schema is None:
            own = (s for s in self.schemas if s.attn_type == attn)
            schema = next(s for s in own if s.family_idx == int(family_idx))
        if schema is None or not schema.shares:
            schema, entry_layer = state.schema, None  # which is the same number
        else:
            entry_idx = schema.entry_idx if entry_idx is None else entry_idx
            entry_layer = jnp.asarray(entry_idx, jnp.int32) if schema.ratio else None
        return LayerCacheHandle(
            paged=self.paged.get(schema.entry_family),
            state=state,
            layer=layer,
            entry_layer=entry_layer,
            waiting=self.state[schema.entry_family] if schema.pending_tokens else None,
            call=call,
            schema=same_sizes(schema),
            in_place=in_place,
            split_cache=self.split_cache,
        )

    def with_layer(self, handle: LayerCacheHandle) -> ModelCache:
        """The cache with what a handle has written.

        Raises:
          ValueError: it is no handle of this cache, or one from before another handle of the same
            attention type was put back, whose writing would be lost.
        """
        checks.instance("handle", handle, LayerCacheHandle)
        attn, entries = handle.schema.attn_type, handle.schema.entry_family
        if attn not in self.state or handle.state.schema != self.state[attn].schema:
            checks.refuse("handle", "a handle of this cache", handle.schema, "it has no such layer")
        pools = {"state": self.state[attn], "paged": self.paged.get(entries)}
        found = {"state": handle.state, "paged": handle.paged}
        checks.same_arrays("handle", found, pools, "this cache")
        checks.not_deleted("handle", found)
        if not handle.is_from(self.state[attn]):
            raise ValueError(
                "handle must be a handle of this cache as it is, got one of another cache, or of "
                f"this one before its {attn.upper()} layers were written; acquire it anew"
            )
        paged = self.paged if handle.paged is None else {**self.paged, entries: handle.paged}
        return dataclasses.replace(self, state={**self.state, attn: handle.state}, paged=paged)


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
    dropped = drop_absent(jnp.asarray(slots), cache.max_requests)
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
    dropped = drop_absent(slots, cache.max_requests)
    return dataclasses.replace(
        cache,
        state={attn: pool.reset_slots(slots) for attn, pool in cache.state.items()},
        length_tokens=cache.length_tokens.at[dropped].set(0, mode="drop"),
    )


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def family_bytes(cache: ModelCache) -> dict[str, int]:
    """Bytes of each family of arrays."""
    return {name: tree_bytes(arrays) for name, (_, arrays) in _families(cache).items()}


def family_kinds(cache: ModelCache) -> dict[str, FamilyKind]:
    """The kind of each family of arrays, by the names of `family_bytes`."""
    return {name: kind for name, (kind, _) in _families(cache).items()}


def _families(cache: ModelCache) -> Families:
    checks.instance("cache", cache, ModelCache)
    pools = [*cache.paged.items(), *cache.state.items()]
    return {
        f"{attn} {name}": family for attn, pool in pools for name, family in pool.families().items()
    }
