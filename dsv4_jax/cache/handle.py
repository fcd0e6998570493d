"""LayerCacheHandle: one layer's pools with this call's indices, the only thing attention sees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax import checks
from dsv4_jax.cache import block_split
from dsv4_jax.cache.append import (
    Appended,
    LayerNorms,
    LayerTokens,
    append_in_place,
    append_uncommitted,
)
from dsv4_jax.cache.paged_cache import PagedKVPool
from dsv4_jax.cache.schema import LayerCacheSchema
from dsv4_jax.cache.split_attention import attend_in_parts, own_call
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.collectives import (
    gather_in_one,
    join_rows,
    rows_of_a_device,
    take_rows,
)
from dsv4_jax.mesh import MODEL, axis_size
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import check_queries
from pallas_kernels.common.chunks import map_tokens
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gather_entries.reference import gather_entries
from pallas_kernels.select_top_k.reference import select_all

_OF_TOKENS = ("segment_ids", "slots", "positions", "lengths", "visible")
"""Fields of a call that have a value for each token."""
_MANY_TOKENS = 1024
"""Whose queries are normed by the attention, which is then bound by their keys, not by latency."""


@flax.struct.dataclass(kw_only=True)
class LayerCacheHandle:
    """One layer of the cache in one call: a layer appends its tokens, selects entries and attends.

    Every method returns a new handle or plain arrays. The original cache's methods (`write_swa`,
    the gathers, the views) are those of `OriginalHandle`.

    Attributes:
      paged: the blocks of the layer's entries, its own or another layer's; None for SWA.
      state: the family's slots.
      layer: i32[], index into the family's stacked arrays.
      entry_layer: i32[], index into those of the blocks; None is `layer`.
      waiting: the slots of tokens that wait for others of their entry, as they were before the
        call; None where none do.
      call: where the call's tokens belong.
      window: planes [T, ...], the call's own window entries; None before `append`.
      selected: i32[T, K], entries that an earlier CSA layer selected for this one; else None.
      candidates: i32[T, n], blocks of entries that an earlier layer left for this one's selection,
        ascending, then -1; None where all entries may be selected.
      schema: sizes of this layer.
      in_place: no row has more than one token and the call is not staged, so that tokens may be
        written before they are attended to.
      query_eps: floor of the norm that the appended queries still want; None if they are normed.
      split_cache: a request's blocks are dealt over the devices of `model`, and `call` numbers them
        through all of these.
    """

    paged: PagedKVPool | None
    state: StateCachePool
    layer: jax.Array
    call: CallIndices
    entry_layer: jax.Array | None = None
    waiting: StateCachePool | None = None
    window: Planes | None = None
    selected: jax.Array | None = None
    candidates: jax.Array | None = None
    schema: LayerCacheSchema = flax.struct.field(pytree_node=False)
    in_place: bool = flax.struct.field(pytree_node=False, default=False)
    query_eps: float | None = flax.struct.field(pytree_node=False, default=None)
    split_cache: bool = flax.struct.field(pytree_node=False, default=False)

    def is_from(self, state: StateCachePool) -> bool:
        """Whether it may have been made of these slots; see `OriginalHandle`."""
        del state
        return True

    @property
    def is_split(self) -> bool:
        """Whether other devices hold some of its blocks."""
        return self.split_cache and self.paged is not None and axis_size(MODEL) > 1

    @property
    def positions(self) -> jax.Array:
        """i32[T]."""
        return self.call.positions

    @property
    def visible_entries(self) -> jax.Array:
        """i32[T], entries each token may see: (p + 1) // M; 0 for padding and for SWA."""
        if self.paged is None:
            return jnp.zeros_like(self.call.positions)
        visible = (self.call.positions + 1) // self.schema.compression_ratio
        return jnp.where(self.call.segment_ids >= 0, visible, 0)

    @property
    def blocks(self) -> PagedKVPool:
        """The family's blocks.

        Raises:
          ValueError: it is a window layer, which has none.
        """
        if self.paged is None:
            raise ValueError(f"a layer of type {self.schema.attn_type} has no entries")
        return self.paged

    @property
    def own_window(self) -> Planes:
        """Planes [T, ...], the call's own window entries.

        Raises:
          ValueError: the call's tokens have not been appended.
        """
        if self.window is None:
            raise ValueError(
                "the call's tokens are not there yet; append them first (write_swa in the "
                "original interface)"
            )
        return self.window

    def append(
        self, tokens: LayerTokens, norms: LayerNorms, *, attends_next: bool = False
    ) -> tuple[LayerCacheHandle, Appended]:
        """Takes a call's tokens, and writes the entries of the windows that they close.

        Args:
          tokens: the call's tokens as projected.
          norms: norms of the layer.
          attends_next: whether nothing but `attend` reads `Appended.queries`. Those of many tokens
            are then left as projected, and `attend` norms and rotates them: a pass less through
            memory.

        Returns:
          The handle, which can be attended through, and what was appended. Where
          `Appended.new_tokens` is not None, a commit still has to bring it into ring and states.

        Raises:
          ValueError: an argument is of another type.

        Source: deepseek_v4.md sections 1.3, 2, 3 and 4.
        """
        checks.instance("tokens", tokens, LayerTokens)
        checks.instance("norms", norms, LayerNorms)
        call, query_eps, write = self.call, None, append_in_place
        # Tokens that wait for others of their entry are committed apart.
        waits = self.schema.shares and tokens.compressor is not None
        if not self.in_place or waits:
            is_many = tokens.queries.shape[0] >= _MANY_TOKENS
            leaves = attends_next and is_many and norms.norms_queries
            query_eps = norms.eps if leaves and not self.is_split else None
            write = functools.partial(append_uncommitted, norms_queries=query_eps is None)
        if self.is_split:  # a block that lies elsewhere is written there
            table = block_split.own_blocks(call.block_table, self.blocks.num_blocks)
            call = dataclasses.replace(call, block_table=table)
        own = None if self.schema.shares else self.paged  # others are written apart
        (state, paged), appended = write((self.state, own), tokens, norms, call, layer=self.layer)
        paged = self.paged if own is None else paged
        handle = dataclasses.replace(
            self, state=state, paged=paged, window=appended.window, query_eps=query_eps
        )
        return handle, appended

    def select(self, queries: jax.Array, weights: jax.Array) -> jax.Array:
        """The entries that each query of a CSA layer attends to.

        Args:
          queries: [T, IH, IC], rotated and rounded as the keys are.
          weights: f32[T, IH].

        Returns:
          i32[T, K], ascending, then -1.

        Raises:
          ValueError: the layer has no indexer.
        """
        selected, _ = self.select_for((), queries, weights)
        return block_split.ascending(selected) if self.is_split else selected

    def select_for(
        self, heads: tuple[jax.Array, ...], queries: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """`select`, beside what will attend.

        Args:
          heads: the queries of the attention, [T, H, C], or nothing.
          queries: as of `select`.
          weights: likewise.

        Returns:
          What `select` gives, and `heads`. Where blocks are split entries are in any order, and the
          heads are those of all devices: one collective brings them with what each has found best.

        Raises:
          ValueError: the layer has no indexer.
        """
        if not self.is_split:
            return self._select_by_rows(queries, weights), heads
        k, (pool, _) = self.schema.indexer_top_k, self._index_keys()
        if self.max_entries <= k:
            spare = ((0, 0), (0, k - self.max_entries))
            return jnp.pad(self.all_visible(), spare, constant_values=-1), heads
        call = own_call(self, self.visible_entries)
        assert call.visible is not None
        scores = pk.index_scores(queries, weights, pool, call)
        best = pk.select_top_k(scores, call.visible, min(k, scores.shape[1]))
        values = jnp.take_along_axis(scores, jnp.maximum(best, 0), axis=1)
        numbers = block_split.logical_entries(best, self.schema.entries_per_block)
        values, numbers, *parts = gather_in_one(values, numbers, *heads)
        return block_split.best_of_all(values, numbers, k), tuple(
            map(block_split.join_heads, parts)
        )

    def _select_by_rows(self, queries: jax.Array, weights: jax.Array) -> jax.Array:
        """`select`; where rows are dealt each device of a data shard selects for its own."""
        pool, call = self._index_keys()
        check_queries(queries, weights, pool, call)
        num_rows, k = queries.shape[0], self.schema.indexer_top_k
        is_all = self.max_entries <= k  # and no scores are needed
        own = num_rows if is_all else rows_of_a_device(num_rows)
        tokens = {name: take_rows(getattr(call, name), own) for name in _OF_TOKENS}
        call = dataclasses.replace(call, **tokens)
        queries, weights = take_rows(queries, own), take_rows(weights, own)
        return join_rows(pk.index_topk(queries, weights, pool, call, k=k), num_rows)

    def scores(self, queries: jax.Array, weights: jax.Array) -> jax.Array:
        """f32[T, E], index scores of a CSA layer; arbitrary where a token does not see the entry.

        Args:
          queries: as of `select`.
          weights: likewise.

        Raises:
          ValueError: the layer has no indexer.
        """
        return pk.index_scores(queries, weights, *self._index_keys())

    def _index_keys(self) -> tuple[LayerPlanes, CallIndices]:
        return self.stored_index_keys, dataclasses.replace(self.call, visible=self.visible_entries)

    @property
    def stored_index_keys(self) -> LayerPlanes:
        """The index keys that the layer selects by.

        Raises:
          ValueError: the layer has no indexer.
        """
        index_keys = self.blocks.index_keys
        if index_keys is None:
            raise ValueError(f"a layer of type {self.schema.attn_type} has no indexer")
        return LayerPlanes(index_keys, self._entry_layer, self.schema.format.index_key)

    def map_entries(
        self,
        function: Callable[[dict[str, jax.Array], jax.Array], jax.Array],
        arrays: dict[str, jax.Array],
    ) -> jax.Array:
        """Runs a function of each token's entries, some tokens at a time.

        Entries that it does not use are not read.

        Args:
          function: from arrays [n, ...] and entries f32[n, E, C] of n tokens, zeros where a token
            sees none, to [n, ...]; token by token.
          arrays: [T, ...] each.
        """
        seen, dim = self.all_visible(), self.schema.entry_head_dim
        pool = self.stored_entries

        def run(some: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
            call = dataclasses.replace(self.call, segment_ids=self.call.segment_ids[tokens])
            entries, _ = gather_entries(pool, call, seen[tokens], dim=dim, dtype=jnp.float32)
            return function(some, entries)

        return map_tokens(run, arrays, elements_per_token=self.max_entries * dim)

    @property
    def max_entries(self) -> int:
        """E, entries that a row of the block table can address: LB * EB."""
        return self.call.block_table.shape[1] * self.schema.entries_per_block

    def all_visible(self) -> jax.Array:
        """i32[T, E], the entries that each token may see, ascending, then -1."""
        everything = jnp.arange(self.max_entries, dtype=jnp.int32)[None]
        return jnp.where(everything < self.visible_entries[:, None], everything, -1)

    def attend(
        self,
        queries: jax.Array,
        sink: jax.Array,
        selected: jax.Array | None,
        frequencies: jax.Array | None = None,
    ) -> jax.Array:
        """Attends to the window and to the selected entries, read in place.

        Args:
          queries: [T, H, C]; where blocks are split also those of all devices, as `select` gives
            them.
          sink: f32[H].
          selected: i32[T, K] as `select_for` and `all_visible` give it: of a token that sees n
            entries only the first n may be one, and -1 follows. None is the window alone.
          frequencies: f32[R / 2], for inverse RoPE of the result by each query's position; None
            leaves it out.

        Returns:
          [T, H, C] in the dtype of `queries`.

        Raises:
          ValueError: the call's tokens have not been appended.
        """
        if self.is_split and selected is not None:
            own, count = block_split.gather_own(selected, self.schema.entries_per_block)
            return attend_in_parts(self, queries, sink, own, count, frequencies)
        pool, visible = None, None
        if selected is not None:
            pool = self.stored_entries
            visible = self.visible_entries
        return pk.sparse_attention(
            queries,
            sink,
            self.ring,
            self.own_window,
            pool,
            selected,
            dataclasses.replace(self.call, visible=visible),
            scale=self.schema.entry_head_dim**-0.5,
            frequencies=frequencies,
            query_eps=self.query_eps,
            apart=self.is_apart,
        )

    @property
    def ring(self) -> LayerPlanes:
        """The layer's window entries as stored."""
        return LayerPlanes(self.state.window, self.layer, self.schema.format.ring)

    @property
    def stored_entries(self) -> LayerPlanes:
        """The entries that the layer reads, as stored."""
        return LayerPlanes(self.blocks.entries, self._entry_layer, self.schema.format.entry)

    @property
    def _entry_layer(self) -> jax.Array:
        return self.layer if self.entry_layer is None else self.entry_layer

    @property
    def is_apart(self) -> bool:
        """Whether entries lie otherwise than the window does."""
        return self.entry_layer is not None or self.schema.format.window is not None

    def attend_to_all(
        self, queries: jax.Array, sink: jax.Array, frequencies: jax.Array | None = None
    ) -> jax.Array:
        """`attend` to the window and to every entry that a token sees."""
        if not self.is_split:
            return self.attend(queries, sink, self.all_visible(), frequencies)
        per_block = self.schema.entries_per_block
        count = block_split.count_own(self.visible_entries, per_block)
        width = -(-self.call.block_table.shape[1] // axis_size(MODEL)) * per_block
        own = select_all(count, width)
        return attend_in_parts(self, queries, sink, own, count, frequencies)
