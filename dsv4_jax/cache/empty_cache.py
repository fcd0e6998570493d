"""Empty caches: their sizes are checked, and all of their arrays are made by one program.

On a CPU there is no program, since NumPy fills arrays of small caches faster than one compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.cache.filled import filled, is_filled_on_host
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.paged_cache import init_paged_pool
from dsv4_jax.cache.schema import (
    FormatName,
    LayerCacheSchema,
    blocks_of,
    build_schema,
    check_selector,
    choose_cache_format,
    compute_block_budget,
    ring_sizes,
    same_sizes,
)
from dsv4_jax.cache.state_cache import (
    TOKEN_IDS,
    init_id_pool,
    init_pending_pool,
    init_state_pool,
)
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, draft_layers, layer_schedule
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.mesh import AXES, DATA, AnyMesh, check_divides, mesh_sizes, shardings_of


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
        idea, or the model's own: `fp8_ue8m0` of V4, `fp4_e4m3` of V4.1.
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
      NotImplementedError: layers share entries, and `split_cache` is set or the format rotates
        index keys.
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
    _check_deals(config, split_cache=split_cache)
    max_requests = checks.integer("max_requests", max_requests, 1)
    max_context_tokens = checks.integer("max_context_tokens", max_context_tokens, 1)
    cache_format = choose_cache_format(config, cache_format)
    schedule = _schedule(config)
    budget = compute_block_budget(config, schedule, max_context_tokens, max_requests, headroom=0.0)
    width = blocks_of(config, max_context_tokens)
    if num_blocks is not None:
        num_blocks = checks.integer("num_blocks", num_blocks, 1)
    if num_blocks is None:
        checks.integer("max_requests", max_requests, high=checks.INT32_MAX // width)
    else:
        budget = {attn: num_blocks if blocks else 0 for attn, blocks in budget.items()}
    build = _empty_cache if is_filled_on_host() else _compiled_empty_cache
    return build(
        _schemas(config, cache_format),
        tuple(budget.items()),
        table_shape=(max_requests, width),
        has_own_blocks=num_blocks is None,
        split_cache=split_cache,
        look_back=_look_back(config),
    )


def _check_deals(config: DSV4Config, *, split_cache: bool) -> None:
    """Refuses to deal blocks of entries that layers share."""
    if split_cache and config.sources is not None:
        raise NotImplementedError(
            "split_cache does not deal the blocks of a DeepSeek-V4.1 model, whose layers share "
            "entries, over devices yet; leave it out"
        )


def _look_back(config: DSV4Config) -> int:
    """Tokens before a token that its n-grams have; 0 of a model without Engram tables."""
    return 0 if config.engram is None else config.engram.max_ngram - 1


def _schedule(config: DSV4Config) -> tuple[LayerSpec, ...]:
    return *layer_schedule(config), *draft_layers(config)


@functools.lru_cache(maxsize=16)
def _schemas(config: DSV4Config, cache_format: FormatName) -> tuple[LayerCacheSchema, ...]:
    return tuple(build_schema(config, spec, cache_format) for spec in _schedule(config))


def check_cache(config: DSV4Config, cache: ModelCache) -> None:
    """Refuses what is no cache of a model; layers of the draft may be missing.

    Raises:
      ValueError: it is no cache, its arrays are gone, or a layer has another type or size.
    """
    checks.instance("cache", cache, ModelCache)
    checks.not_deleted("cache", cache)
    wanted = _schemas(config, cache.schemas[0].cache_format)
    if (TOKEN_IDS in cache.state) != (config.engram is not None):
        raise ValueError(
            "cache must be one that init_cache made for config, got one of a model "
            f"{'with' if config.engram is None else 'without'} Engram tables"
        )
    if cache.schemas not in (wanted, wanted[: len(layer_schedule(config))]):
        pairs = itertools.zip_longest(cache.schemas, wanted)
        layer = next(layer for layer, (given, own) in enumerate(pairs) if given != own)
        raise ValueError(
            "cache must be one that init_cache made for config, got one of "
            f"{len(cache.schemas)} layers of which layer {layer} is another than in the "
            f"{len(wanted)} of config"
        )


def _empty_cache(
    schemas: tuple[LayerCacheSchema, ...],
    budget: tuple[tuple[str, int], ...],
    *,
    table_shape: tuple[int, int],
    has_own_blocks: bool,
    split_cache: bool,
    look_back: int,
) -> ModelCache:
    """All arrays.

    Args:
      schemas: of the layers.
      budget: physical blocks, by family of entries.
      table_shape: NS, LB.
      has_own_blocks: every slot has a full context of its own, else none.
      split_cache: as in `ModelCache`.
      look_back: token ids that a slot keeps, or 0.
    """
    (max_requests, width), num_blocks = table_shape, dict(budget)
    if has_own_blocks:
        count = (np if is_filled_on_host() else jnp).arange(max_requests * width, dtype=jnp.int32)
        table = jnp.asarray(count.reshape(table_shape), jnp.int32)
    else:
        table = filled(table_shape, -1, jnp.int32)
    state, paged = {}, {}
    for attn in AttentionType:
        family = [schema for schema in schemas if schema.attn_type == attn]
        if family:
            sizes = ring_sizes(family[0])
            state[attn.value] = init_state_pool(sizes, max_requests, num_layers=len(family))
    for name, blocks in num_blocks.items():
        family = [schema for schema in schemas if schema.entry_family == name]
        if not family:
            continue
        count = 1 + max(schema.entry_idx for schema in family)
        sizes = same_sizes(family[0])  # which makes entries, whatever the others do
        paged[name] = init_paged_pool(sizes, blocks, num_layers=count)
        if sizes.pending_tokens:
            state[name] = init_pending_pool(sizes, max_requests, num_layers=count)
    if look_back:
        sizes = dataclasses.replace(ring_sizes(schemas[0]), swa_window_size=look_back)
        state[TOKEN_IDS] = init_id_pool(sizes, max_requests)
    return ModelCache(
        state=state,
        paged=paged,
        length_tokens=filled((max_requests,), 0, jnp.int32),
        block_table=table,
        schemas=schemas,
        split_cache=split_cache,
    )


_compiled_empty_cache = jax.jit(  # one program compiles faster than one for each array
    _empty_cache,
    static_argnames=(
        "schemas",
        "budget",
        "table_shape",
        "has_own_blocks",
        "split_cache",
        "look_back",
    ),
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
