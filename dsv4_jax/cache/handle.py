"""LayerCacheHandle: one layer's pools with this call's indices, the only thing attention sees."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax.cache.call_rows import CallRows, Projections, commit_rows
from dsv4_jax.cache.paged_cache import PagedKVPool
from dsv4_jax.cache.schema import LayerCacheSchema
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.cache.step_input import CallIndices
from dsv4_jax.cache.views import ClassicalView, IndexerView, SWAView
from pallas_kernels.codecs import FP4KeyCodec, Planes


@flax.struct.dataclass(kw_only=True)
class LayerCacheHandle:
    """One layer of the cache in one call; every method returns a new handle or plain arrays.

    `write_swa` takes the call's tokens, `flush_compression` writes the entries they complete, the
    gathers see both, and `commit` moves the tokens into the ring and the compressor states. Until
    then those stay as they were, which a token in the middle of a call still needs.
    `append_and_flush` does the first two from what a layer projects, and `in_place` all three.

    Attributes:
      paged: the family's blocks, None for SWA.
      state: the family's slots.
      layer: i32[], index into the family's stacked arrays.
      call: where the call's tokens belong.
      rows: the call's tokens, None before `write_swa` and after `commit`.
      schema: sizes of this layer.
      is_committed: ring and states hold the call's tokens.
      in_place: no row has more than one token and the call is not staged, so that tokens may be
        written before they are attended to.
      selected: i32[T, K], entries that an earlier CSA layer selected for this one; else None.
    """

    paged: PagedKVPool | None
    state: StateCachePool
    layer: jax.Array
    call: CallIndices
    rows: CallRows | None
    selected: jax.Array | None = None
    schema: LayerCacheSchema = flax.struct.field(pytree_node=False)
    is_committed: bool = flax.struct.field(pytree_node=False, default=False)
    in_place: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def num_query_heads(self) -> int:
        """H."""
        return self.schema.num_query_heads

    @property
    def head_dim(self) -> int:
        """C."""
        return self.schema.entry_head_dim

    @property
    def request_slots(self) -> jax.Array:
        """i32[B], -1 where idle."""
        return self.call.row_slots

    @property
    def request_ids(self) -> jax.Array:
        """i32[T], -1 for padding."""
        return self.call.request_ids

    @property
    def positions(self) -> jax.Array:
        """i32[T]."""
        return self.call.positions

    @property
    def block_table(self) -> jax.Array | None:
        """i32[B, LB]; None for SWA."""
        return None if self.paged is None else self.call.block_table

    @property
    def block_lens(self) -> jax.Array:
        """i32[B], blocks of each row that hold tokens, this call's included."""
        tokens = self.call.row_lengths + self.call.row_counts
        return -(-tokens // self.schema.block_tokens)

    @property
    def tail_len(self) -> jax.Array:
        """i32[B], tokens of each row's open window before the call."""
        return self.call.row_lengths % self.schema.compression_ratio

    @property
    def visible_entries(self) -> jax.Array:
        """i32[T], entries each token may see: (p + 1) // M; 0 for padding and for SWA."""
        if self.paged is None:
            return jnp.zeros_like(self.call.positions)
        visible = (self.call.positions + 1) // self.schema.compression_ratio
        return jnp.where(self.call.request_ids >= 0, visible, 0)

    def write_swa(
        self,
        kv: jax.Array,
        compressor: Projections | None = None,
        indexer: Projections | None = None,
    ) -> LayerCacheHandle:
        """Takes the call's tokens.

        Args:
          kv: [T, C], window entries, normed and rotated; they are rounded to the cache format.
          compressor: projections [T, width] of a CSA or HCA layer.
          indexer: projections [T, 2 * IC] of a CSA layer.

        Raises:
          ValueError: a shape is wrong, or projections are missing or not wanted.
        """
        num_tokens, dim = self.call.positions.shape[0], self.schema.entry_head_dim
        if kv.shape != (num_tokens, dim):
            raise ValueError(f"kv must have shape {(num_tokens, dim)}, got {kv.shape=}")
        for name, given, width in (
            ("compressor", compressor, self._widths()[0]),
            ("indexer", indexer, self._widths()[1]),
        ):
            if (given is None) != (width == 0):
                need = f"must be projections [T, {width}]" if width else "must be None"
                raise ValueError(f"{name} {need} on a layer of type {self.schema.attn_type}")
            if given is not None and given.values.shape != (num_tokens, width):
                raise ValueError(
                    f"{name} must hold projections {(num_tokens, width)}, got {given.values.shape}"
                )
        window = self.schema.format.entry.encode(kv, self.schema.rope_dim)
        return self.with_rows(CallRows(window=window, compressor=compressor, indexer=indexer))

    def with_rows(self, rows: CallRows) -> LayerCacheHandle:
        """Holds the call's tokens as they are kept.

        What this call reads must be what a later call finds stored, to the bit: without the
        barrier, XLA may compute a row twice and round it differently.
        """
        return dataclasses.replace(self, rows=jax.lax.optimization_barrier(rows))

    def flush_compression(
        self,
        compressed: jax.Array,
        indexer_keys: jax.Array | None = None,
    ) -> LayerCacheHandle:
        """Writes the entries of the windows that this call closes.

        Args:
          compressed: [n, C], one per `call.closing_tokens(M)`, in that order; normed and rotated.
          indexer_keys: [n, IC] on a CSA layer.

        Raises:
          ValueError: a shape is wrong, or the layer has no entries.
        """
        paged = self._paged()
        closing = self.call.closing_tokens(self.schema.compression_ratio)
        if compressed.shape != (closing.shape[0], self.head_dim):
            raise ValueError(
                f"compressed must have shape {(closing.shape[0], self.head_dim)}, one row per "
                f"closing token, got {compressed.shape=}"
            )
        if (indexer_keys is None) != (paged.index_keys is None):
            raise ValueError("indexer_keys go with a CSA layer, and only with one")
        token = jnp.maximum(closing, 0)
        rows = jnp.where(closing >= 0, self.call.request_ids[token], -1)
        entries = self.call.positions[token] // self.schema.compression_ratio
        fmt = self.schema.format

        def write(pool: Planes, encoded: Planes) -> Planes:
            return pk.flush_write(
                pool, encoded, self.call.block_table, rows, entries, layer=self.layer
            )

        written = write(paged.entries, fmt.entry.encode(compressed, self.schema.rope_dim))
        index_keys = paged.index_keys
        if index_keys is not None and indexer_keys is not None:
            index_keys = write(index_keys, fmt.index_key.encode(indexer_keys, 0))
        return dataclasses.replace(
            self, paged=dataclasses.replace(paged, entries=written, index_keys=index_keys)
        )

    def commit(self) -> LayerCacheHandle:
        """Moves the call's tokens into the ring and the compressor states, unless they are there.

        Raises:
          ValueError: `write_swa` has not been called.
        """
        rows, state = self._rows(), self.state
        if not self.is_committed:
            state = commit_rows(state, rows, self.call, layer=self.layer)
        return dataclasses.replace(self, state=state, rows=None, is_committed=True)

    def gather_compressed_kv(self, selected: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Entries by logical number, for each token.

        Args:
          selected: i32[T, K], -1 selects nothing.

        Returns:
          f32[T, K, C], K and V in one, zeros where there is none; bool[T, K].
        """
        return pk.gather_entries(
            self._paged().entries,
            self.call.block_table,
            self.call.request_ids,
            selected,
            layer=self.layer,
            codec=self.schema.format.entry,
            dim=self.head_dim,
        )

    def gather_all_compressed_kv(self) -> tuple[jax.Array, jax.Array]:
        """All entries that each token may see: f32[T, E, C] and bool[T, E], E = LB * EB."""
        return self.gather_compressed_kv(self.all_visible())

    def gather_swa_kv(self) -> tuple[jax.Array, jax.Array]:
        """The window of each token: f32[T, W, C] in the order of ring rows, and bool[T, W]."""
        return pk.gather_window(
            self.state.window,
            self._rows().window,
            self.call.slots,
            self.call.positions,
            self.call.lengths,
            layer=self.layer,
            codec=self.schema.format.entry,
            dim=self.head_dim,
        )

    def all_visible(self) -> jax.Array:
        """i32[T, E], the entries that each token may see, ascending, then -1; E = LB * EB."""
        width = self.call.block_table.shape[1] * self.schema.entries_per_block
        everything = jnp.arange(width, dtype=jnp.int32)[None]
        return jnp.where(everything < self.visible_entries[:, None], everything, -1)

    def select_entries(self, queries: jax.Array, weights: jax.Array) -> jax.Array:
        """The entries that each query of a CSA layer attends to.

        Args:
          queries: f32[T, IH, IC], rotated and rounded as the keys are.
          weights: f32[T, IH].

        Returns:
          i32[T, K], ascending, then -1.
        """
        index_keys = self._paged().index_keys
        if index_keys is None:
            raise ValueError(f"a layer of type {self.schema.attn_type} has no indexer")
        return pk.index_topk(
            queries,
            weights,
            index_keys,
            self.call.block_table,
            request_ids=self.call.request_ids,
            visible=self.visible_entries,
            layer=self.layer,
            codec=self.schema.format.index_key,
            k=self.schema.indexer_top_k,
        )

    def attend(
        self,
        queries: jax.Array,
        sink: jax.Array,
        selected: jax.Array | None,
        frequencies: jax.Array | None = None,
    ) -> jax.Array:
        """Attends to the window and to the selected entries, read in place.

        Args:
          queries: [T, H, C].
          sink: f32[H].
          selected: i32[T, K] as `select_entries` and `all_visible` give it: of a token that sees n
            entries only the first n may be one, and -1 follows. None is the window alone.
          frequencies: f32[R / 2], to turn the result back by each query's position; None leaves it.

        Returns:
          [T, H, C] in the dtype of `queries`.
        """
        return pk.sparse_attention(
            queries,
            sink,
            self.state.window,
            self._rows().window,
            None if selected is None else self._paged().entries,
            self.call.block_table,
            selected,
            visible=None if selected is None else self.visible_entries,
            request_ids=self.call.request_ids,
            slots=self.call.slots,
            positions=self.call.positions,
            lengths=self.call.lengths,
            layer=self.layer,
            codec=self.schema.format.entry,
            scale=self.head_dim**-0.5,
            frequencies=frequencies,
        )

    def read_swa_view(self) -> SWAView:
        """The ring as stored, tokens of this call not included before `commit`."""
        planes = {name: plane[self.layer] for name, plane in self.state.window.items()}
        length = self.call.row_lengths + (self.call.row_counts if self.is_committed else 0)
        window = self.schema.swa_window_size
        age = (length[:, None] - 1 - jnp.arange(window)[None]) % window
        position = length[:, None] - 1 - age
        return SWAView(
            fp8=planes.get("nope"),
            rope=planes.get("rope"),
            inv_scale=planes.get("inv_scale"),
            positions=jnp.where(position >= 0, position, -1),
            head=length % window,
            slots=self.call.row_slots,
            planes=planes,
        )

    def read_classical_view(self) -> ClassicalView:
        """The entries as stored."""
        planes = {name: plane[self.layer] for name, plane in self._paged().entries.items()}
        return ClassicalView(
            entries_fp8=planes.get("nope"),
            entries_rope=planes.get("rope"),
            inv_scale=planes.get("inv_scale"),
            block_table=self.call.block_table,
            block_lens=self.block_lens,
            planes=planes,
        )

    def read_indexer_view(self) -> IndexerView:
        """The index keys as stored, and FP4 ones as published pairs too."""
        index_keys = self._paged().index_keys
        if index_keys is None:
            raise ValueError(f"a layer of type {self.schema.attn_type} has no indexer")
        planes = {name: plane[self.layer] for name, plane in index_keys.items()}
        codec = self.schema.format.index_key
        ones = jnp.ones(self._paged().num_blocks, jnp.float32)
        return IndexerView(
            keys_fp4=codec.to_pairs(planes["codes"]) if isinstance(codec, FP4KeyCodec) else None,
            scale=planes.get("scale"),
            global_scale=ones if self.schema.needs_inv_scale else None,
            block_table=self.call.block_table,
            block_lens=self.block_lens,
            planes=planes,
        )

    def empty_rows(self, num_tokens: int) -> CallRows:
        """Zeroed rows of `num_tokens` tokens, in the shapes that `write_swa` makes."""
        shapes = self.schema.format.entry.plane_shapes(self.head_dim, self.schema.rope_dim)

        def projections(width: int) -> Projections | None:
            if not width:
                return None
            zeros = jnp.zeros((num_tokens, width), jnp.float32)
            return Projections(values=zeros, scores=zeros)

        width, index_width = self._widths()
        return CallRows(
            window={k: jnp.zeros((num_tokens, *s.shape), s.dtype) for k, s in shapes.items()},
            compressor=projections(width),
            indexer=projections(index_width),
        )

    def _widths(self) -> tuple[int, int]:
        """Widths of the projections of both compressors; 0 where there is none."""
        streams = 2 if self.schema.tail_buffer_size_b else 1
        width = streams * self.head_dim if self.schema.tail_buffer_size_a else 0
        return width, 2 * self.schema.indexer_head_dim

    def _paged(self) -> PagedKVPool:
        if self.paged is None:
            raise ValueError(f"a layer of type {self.schema.attn_type} has no entries")
        return self.paged

    def _rows(self) -> CallRows:
        if self.rows is None:
            raise ValueError("the call's tokens are not there yet; call write_swa first")
        return self.rows
