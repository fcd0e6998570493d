"""Fills a cache with random, valid contents up to a context, without running the model."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench.noise import uniform
from dsv4_jax.cache.empty_cache import init_cache
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.paged_cache import PagedKVPool
from dsv4_jax.cache.schema import blocks_of
from dsv4_jax.cache.state_cache import StateCachePool
from dsv4_jax.config import DSV4Config
from pallas_kernels.common.codecs import Codec, Planes

_CHUNK_ELEMENTS = 2**26  # f32 elements encoded at once: 256 MiB


def filled_cache(
    config: DSV4Config,
    *,
    length_tokens: np.ndarray,
    max_context_tokens: int,
    cache_format: str,
    seed: int = 0,
    block_parts: int = 1,
) -> ModelCache:
    """Makes a cache that holds `length_tokens` random tokens of each request.

    Entries and index keys are random vectors encoded by the cache format, so that no code is a NaN
    and scales fit their codes. The block table is a random permutation of the pool, or where blocks
    are dealt over devices, the same one of the blocks of each device.

    Args:
      config: the model.
      length_tokens: i32[NS], number of tokens of each slot.
      max_context_tokens: longest context of a request, in tokens.
      cache_format: name of the storage format.
      seed: seed of all draws.
      block_parts: devices that a request's blocks are dealt over (`block_split.py`). With several,
        the pools are those of one of them, and the cache is for a mesh of them alone.

    Raises:
      ValueError: a length is below 0 or above `max_context_tokens`.
    """
    lengths = np.asarray(length_tokens, np.int32)
    if lengths.ndim != 1 or lengths.min() < 0 or lengths.max() > max_context_tokens:
        raise ValueError(
            f"length_tokens must be i32[NS] in 0..{max_context_tokens}, got {length_tokens}"
        )
    sizes = {"max_requests": lengths.shape[0], "cache_format": cache_format}
    width = blocks_of(config, max_context_tokens)
    of_device = -(-width // block_parts)
    cache = init_cache(config, max_context_tokens=of_device * config.block_tokens, **sizes)
    own = np.random.default_rng(seed).permutation(cache.block_table.size)
    own, logical = own.reshape(cache.block_table.shape), np.arange(width)
    table = logical % block_parts * own.size + own[:, logical // block_parts]
    state = {attn: _fill_state(pool, np.uint32(seed)) for attn, pool in cache.state.items()}
    paged = {attn: _fill_paged(pool, np.uint32(seed)) for attn, pool in cache.paged.items()}
    return dataclasses.replace(
        cache,
        state=state,
        paged=paged,
        length_tokens=jnp.asarray(lengths),
        block_table=jnp.asarray(table, jnp.int32),
        split_cache=block_parts > 1,
    )


@functools.partial(jax.jit, donate_argnums=0)
def _fill_paged(pool: PagedKVPool, seed: jax.Array) -> PagedKVPool:
    schema = pool.schema
    fmt = schema.format
    entries = _fill_planes(
        pool.entries, fmt.entry, schema.entry_head_dim, schema.rope_dim, seed + np.uint32(1)
    )
    index_keys = pool.index_keys
    if index_keys is not None:
        index_keys = _fill_planes(
            index_keys, fmt.index_key, schema.indexer_head_dim, 0, seed + np.uint32(2)
        )
    return dataclasses.replace(pool, entries=entries, index_keys=index_keys)


@functools.partial(jax.jit, donate_argnums=0)
def _fill_state(pool: StateCachePool, seed: jax.Array) -> StateCachePool:
    schema, window = pool.schema, pool.window
    if window and "ids" not in window:  # which are numbers of tokens, and -1 before the first
        window = _fill_planes(
            window,
            schema.format.ring,
            schema.entry_head_dim,
            schema.rope_dim,
            seed + np.uint32(3),
        )

    def fill(array: jax.Array) -> jax.Array:
        return uniform(array.shape, seed + np.uint32(array.shape[-1]))

    tails = jax.tree.map(fill, (pool.tail, pool.index_tail))
    pending = jax.tree.map(fill, pool.pending)
    running = pool.running
    if running is not None:  # largest score, sum of exponentials (1 or more), sum times a value
        largest, total, value = (fill(running[:, :, row]) for row in range(3))
        total = 1 + jnp.abs(total)
        running = jnp.stack([largest, total, total * value], axis=2)
    return dataclasses.replace(
        pool,
        window=window,
        tail=tails[0],
        index_tail=tails[1],
        running=running,
        pending=pending,
    )


def _fill_planes(planes: Planes, codec: Codec, dim: int, rope_dim: int, seed: jax.Array) -> Planes:
    """Fills planes [L, A, B, ...] with random vectors in place, a chunk of A at a time."""
    num_layers, count, rows = jax.tree.leaves(planes)[0].shape[:3]
    chunk = max(1, min(count, _CHUNK_ELEMENTS // (rows * dim)))
    num_chunks = -(-count // chunk)

    def body(i: jax.Array, planes: Planes) -> Planes:
        layer, first = i // num_chunks, i % num_chunks * chunk
        vectors = uniform((chunk, rows, dim), seed * np.uint32(31) + i.astype(jnp.uint32))
        encoded = codec.encode(vectors, rope_dim)

        def write(plane: jax.Array, new: jax.Array) -> jax.Array:
            start = (layer, jnp.minimum(first, count - chunk), *[0] * (plane.ndim - 2))
            return jax.lax.dynamic_update_slice(plane, new[None].astype(plane.dtype), start)

        return {name: write(plane, encoded[name]) for name, plane in planes.items()}

    return jax.lax.fori_loop(0, num_layers * num_chunks, body, planes)
