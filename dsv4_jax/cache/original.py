"""The interface of the original cache, as thin functions over this one.

`KVCacheManager.acquire` gives an `OriginalHandle`. Its calls follow one another so:

    handle = handle.write_swa(kv, compressor, indexer)        the call's tokens
    handle = maybe_flush_csa(handle, schema, m, ...)          the entries that they complete
    ... handle.gather_swa_kv(), handle.gather_compressed_kv(selected) ...
    cache = cache.with_layer(handle.commit())                 tokens into ring and states

Source: original_cache.md.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax import checks
from dsv4_jax.cache import views
from dsv4_jax.cache.append import LayerNorms, flush_windows, hold
from dsv4_jax.cache.commit import commit_tokens
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import NewTokens, Projections, projection_widths
from dsv4_jax.cache.schema import LayerCacheSchema, same_sizes
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.mesh import find_mesh
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes


@flax.struct.dataclass(kw_only=True)
class OriginalHandle(LayerCacheHandle):
    """A `LayerCacheHandle` with the methods of the original cache.

    Attributes:
      new_tokens: the call's tokens between `write_swa` and `commit`; else None.
      is_committed: ring and states hold the call's tokens.
    """

    new_tokens: NewTokens | None = None
    is_committed: bool = flax.struct.field(pytree_node=False, default=False)

    _source = None
    """A weak reference to the slots that it was acquired from, so that `with_layer` can tell caches
    of equal sizes apart. It is no field: where a handle goes through `jit`, JAX drops it, and
    nothing is known."""

    def is_from(self, state: StateCachePool) -> bool:
        """Whether it was acquired from these slots, or that is not known."""
        return self._source is None or self._source() is state

    def _with(self, **changes: Any) -> OriginalHandle:
        """The same handle with other fields."""
        new = dataclasses.replace(self, **changes)
        object.__setattr__(new, "_source", self._source)
        return new

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
        """i32[T], row of each token in the call; -1 for padding."""
        return self.call.segment_ids

    @property
    def block_table(self) -> jax.Array | None:
        """i32[B, LB]; None for SWA."""
        return None if self.paged is None else self.call.block_table

    @property
    def block_lens(self) -> jax.Array:
        """i32[B], blocks of each row that hold tokens, this call's included."""
        return views.block_lens(self)

    @property
    def tail_len(self) -> jax.Array:
        """i32[B], tokens of each row's open window before the call."""
        return self.call.row_lengths % self.schema.compression_ratio

    def write_swa(
        self,
        kv: jax.Array,
        compressor: Projections | None = None,
        indexer: Projections | None = None,
    ) -> OriginalHandle:
        """Takes the call's tokens.

        Args:
          kv: [T, C], window entries, normed and rotated; they are rounded to the cache format.
          compressor: projections [T, width] of a CSA or HCA layer.
          indexer: projections [T, 2 * IC] of a CSA layer.

        Raises:
          ValueError: a shape is wrong, projections are missing or not wanted, or the handle has
            been committed.
        """
        if self.is_committed:
            raise ValueError(
                "the call's tokens are committed already; acquire a handle for the next call"
            )
        num_tokens, dim = self.call.positions.shape[0], self.head_dim
        checks.array("kv", kv, (num_tokens, dim), "f")
        widths = projection_widths(self.schema)
        for name, given, width in zip(
            ("compressor", "indexer"), (compressor, indexer), widths, strict=True
        ):
            if (given is None) != (width == 0):
                need = f"must be projections [T, {width}]" if width else "must be None"
                raise ValueError(
                    f"{name} {need} on a layer of type {self.schema.attn_type}, got "
                    f"{checks.shown(given)}"
                )
            if given is not None:
                checks.instance(name, given, Projections)
                for field, array in given.planes.items():
                    checks.array(f"{name}.{field}", array, (num_tokens, width), "f")
        window = self.schema.format.ring.encode(kv, self.schema.rope_dim)
        new = hold(NewTokens(window=window, compressor=compressor, indexer=indexer))
        return self._with(window=new.window, new_tokens=new)

    def flush_compression(
        self, compressed: jax.Array, indexer_keys: jax.Array | None = None
    ) -> OriginalHandle:
        """Writes finished entries of the windows that this call closes.

        Args:
          compressed: [n, C], one per `call.closing_tokens(M)`, in that order; normed and rotated.
          indexer_keys: [n, IC] on a CSA layer.

        Raises:
          ValueError: a shape is wrong, or the layer has no entries.
        """
        paged = self.blocks
        closing = self.call.closing_tokens(self.schema.compression_ratio)
        ndim = 2 if isinstance(compressed, type) else getattr(compressed, "ndim", 2)
        checks.array("compressed", compressed, (None,) * ndim, "f")
        if indexer_keys is not None:
            width = self.schema.indexer_head_dim or None
            checks.array("indexer_keys", indexer_keys, (None, width), "f")
        if compressed.shape != (closing.shape[0], self.head_dim):
            raise ValueError(
                f"compressed must have shape {(closing.shape[0], self.head_dim)}, one row per "
                f"closing token, got {checks.shown(compressed)}"
            )
        if (indexer_keys is None) != (paged.index_keys is None):
            raise ValueError(
                "indexer_keys go with a CSA layer, and only with one, got "
                f"{checks.shown(indexer_keys)}"
            )
        token = jnp.maximum(closing, 0)
        segments = jnp.where(closing >= 0, self.call.segment_ids[token], -1)
        entries = self.call.positions[token] // self.schema.compression_ratio
        fmt = self.schema.format

        def write(pool: Planes, encoded: Planes) -> Planes:
            return pk.flush_write(
                pool, encoded, self.call.block_table, segments, entries, layer=self.layer
            )

        written = write(paged.entries, fmt.entry.encode(compressed, self.schema.rope_dim))
        index_keys = paged.index_keys
        if index_keys is not None and indexer_keys is not None:
            index_keys = write(index_keys, fmt.index_key.encode(indexer_keys, 0))
        return self._with(paged=dataclasses.replace(paged, entries=written, index_keys=index_keys))

    def commit(self) -> OriginalHandle:
        """Moves the call's tokens into the ring and the compressor states.

        Raises:
          ValueError: `write_swa` has not been called.
        """
        state = commit_tokens(self.state, _written(self), self.call, layer=self.layer)
        return self._with(state=state, window=None, new_tokens=None, is_committed=True)

    def gather_compressed_kv(self, selected: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Entries by logical number, for each token.

        Args:
          selected: i32[T, K], -1 selects nothing.

        Returns:
          f32[T, K, C], K and V in one, zeros where there is none; bool[T, K].

        Raises:
          ValueError: the layer has no entries.
        """
        checks.array("selected", selected, (self.call.positions.shape[0], None))
        pool = LayerPlanes(self.blocks.entries, self.layer, self.schema.format.entry)
        return pk.gather_entries(pool, self.call, selected, dim=self.head_dim)

    def gather_all_compressed_kv(self) -> tuple[jax.Array, jax.Array]:
        """All entries that each token may see: f32[T, E, C] and bool[T, E], E = LB * EB."""
        return self.gather_compressed_kv(self.all_visible())

    def gather_swa_kv(self) -> tuple[jax.Array, jax.Array]:
        """The window of each token: f32[T, W, C] in the order of ring rows, and bool[T, W].

        Raises:
          ValueError: `write_swa` has not been called.
        """
        ring = LayerPlanes(self.state.window, self.layer, self.schema.format.ring)
        return pk.gather_window(ring, self.own_window, self.call, dim=self.head_dim)

    def read_swa_view(self) -> views.SWAView:
        """The ring as stored, tokens of this call not included before `commit`."""
        return views.read_swa_view(self, counts_call=self.is_committed)

    def read_classical_view(self) -> views.ClassicalView:
        """The entries as stored."""
        return views.read_classical_view(self)

    def read_indexer_view(self) -> views.IndexerView:
        """The index keys as stored, and FP4 ones as published pairs too."""
        return views.read_indexer_view(self)


def acquire(cache: ModelCache, call: CallIndices, *, layer_idx: int) -> OriginalHandle:
    """The handle of one layer in one call; pure, for use inside a traced step.

    Raises:
      ValueError: there is no such layer, the call is another cache's, or the cache is split or
        lies on a mesh.
    """
    check_acquirable(cache)
    checks.instance("call", call, CallIndices)
    checks.array("call.block_table", call.block_table, (None, cache.block_table.shape[1]))
    last = len(cache.schemas) - 1
    layer_idx = checks.integer("layer_idx", layer_idx, 0, last, rule=f"0..{last}")
    schema = cache.schemas[layer_idx]
    handle = cache.layer(schema.attn_type, schema.family_idx, call)
    fields = {field.name: getattr(handle, field.name) for field in dataclasses.fields(handle)}
    acquired = OriginalHandle(**fields)
    object.__setattr__(acquired, "_source", weakref.ref(cache.state[schema.attn_type]))
    return acquired


def check_acquirable(cache: ModelCache) -> None:
    """Refuses what is no cache, and one of which a device holds but a part.

    Raises:
      ValueError: it is no cache, its arrays are gone, or it is split or lies on a mesh.
      NotImplementedError: its layers share entries.
    """
    checks.instance("cache", cache, ModelCache)
    checks.not_deleted("cache", cache)
    if cache.schemas[0].shares:
        raise NotImplementedError(
            "the original interface reads layers that make their own entries, and those of a "
            "DeepSeek-V4.1 model share them; use ModelCache.layer"
        )
    if cache.split_cache:
        raise ValueError(
            "the original interface reads whole requests; build it without split_cache"
        )
    if find_mesh(cache) is not None:
        raise ValueError(
            "the original interface numbers slots and blocks of one device, and cache lies on a "
            "mesh; build it without one"
        )


def maybe_flush_csa(
    handle: OriginalHandle,
    schema: LayerCacheSchema,
    m: int,
    *,
    norm: jax.Array,
    indexer_norm: jax.Array,
    frequencies: jax.Array,
    eps: float,
) -> OriginalHandle:
    """Writes the entry and the index key of every CSA window that closes in this call.

    Called in every forward with the same call sequence, whether a window closes or not.

    Args:
      handle: after `write_swa`.
      schema: of the layer.
      m: tokens per window; must be the schema's.
      norm: [C], norm weight of the compressor.
      indexer_norm: [IC], norm weight of the indexer's compressor.
      frequencies: f32[R / 2], of the compress table.
      eps: floor of the norms.

    Returns:
      The handle with the entries written; `commit` still has to follow.

    Raises:
      ValueError: the layer is of another type or compression ratio, a norm or the frequencies
        have another shape, or `write_swa` has not been called.

    Source: deepseek_v4.md sections 2.2 and 3.
    """
    _check(handle, schema, m, AttentionType.CSA)
    checks.array("indexer_norm", indexer_norm, (schema.indexer_head_dim,), "f")
    eps = _check_norms(schema, norm, frequencies, eps)
    norms = LayerNorms(
        kv=norm, compressor=norm, indexer=indexer_norm, frequencies=frequencies, eps=eps
    )
    return _flush(handle, norms)


def maybe_flush_hca(
    handle: OriginalHandle,
    schema: LayerCacheSchema,
    m_prime: int,
    *,
    norm: jax.Array,
    frequencies: jax.Array,
    eps: float,
) -> OriginalHandle:
    """Writes the entry of every HCA window that closes in this call; see `maybe_flush_csa`."""
    _check(handle, schema, m_prime, AttentionType.HCA)
    eps = _check_norms(schema, norm, frequencies, eps)
    return _flush(handle, LayerNorms(kv=norm, compressor=norm, frequencies=frequencies, eps=eps))


def _flush(handle: OriginalHandle, norms: LayerNorms) -> OriginalHandle:
    new, pools = _written(handle), (handle.state, handle.blocks)
    own = handle.schema.attn_type
    if (handle.state.running is None) == (own == AttentionType.HCA):
        raise ValueError(
            f"the state pool was built for another type of layer than this {own.upper()} one"
        )
    paged = flush_windows(pools, new, norms, handle.call, layer=handle.layer)
    return handle._with(paged=paged)


def _written(handle: OriginalHandle) -> NewTokens:
    if handle.new_tokens is None:
        raise ValueError("the call's tokens are not there yet; call write_swa first")
    return handle.new_tokens


def _check_norms(
    schema: LayerCacheSchema, norm: jax.Array, frequencies: jax.Array, eps: float
) -> float:
    checks.array("norm", norm, (schema.entry_head_dim,), "f")
    checks.array("frequencies", frequencies, (schema.rope_dim // 2,), "f")
    return checks.number("eps", eps, 0)


def _check(
    handle: OriginalHandle, schema: LayerCacheSchema, compression_ratio: int, attn: AttentionType
) -> None:
    checks.instance("handle", handle, OriginalHandle)
    checks.instance("schema", schema, LayerCacheSchema)
    name = "m" if attn == AttentionType.CSA else "m_prime"
    compression_ratio = checks.integer(name, compression_ratio, 1)
    if schema.attn_type != attn:
        raise ValueError(f"layer {schema.layer_idx} is {schema.attn_type}, not {attn}")
    own = handle.schema
    if compression_ratio != own.compression_ratio or same_sizes(schema) != same_sizes(own):
        raise ValueError(
            f"schema and {name} must be the handle's, got {name}={compression_ratio} for a layer "
            f"that compresses {own.compression_ratio} tokens, and {schema} for {own}"
        )
