"""Where every array of a cache, a staged step and a snapshot store lies on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from dsv4_jax.cache.commit import Staged
from dsv4_jax.cache.empty_cache import cache_shapes
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.schema import FormatName
from dsv4_jax.cache.snapshots import SnapshotStore
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import BY_BLOCK, BY_ROW, BY_SLOT, AnyMesh, mesh_sizes, shardings_of, specs_of


def cache_shardings(
    config: DSV4Config,
    mesh: AnyMesh,
    *,
    cache_format: FormatName | None = None,
    split_cache: bool = False,
) -> ModelCache:
    """Where every array of a cache lies on a mesh, whatever its sizes.

    Slots and blocks are split over `data`, in equal parts; ids in block tables are those within a
    part. Over `model` the cache is replicated, but for blocks where it is split.

    Args:
      config: the model.
      mesh: with the axes `data` and `model`, as `make_mesh` gives it.
      cache_format: as in `init_cache`.
      split_cache: as in `init_cache`.

    Returns:
      A `NamedSharding` for every leaf, in a tree of a cache's structure.

    Raises:
      ValueError: the mesh has other axes, or there is no such format.
    """
    mesh_sizes(mesh)
    sizes = {"max_requests": 1, "max_context_tokens": 1, "split_cache": split_cache}
    shapes = cache_shapes(config, cache_format=cache_format, **sizes)
    return shardings_of(shapes, mesh)


@specs_of.register
def _cache_specs(cache: ModelCache) -> Any:
    paged = BY_BLOCK if cache.split_cache else BY_SLOT
    arrays: dict[str, Any] = {"state": BY_SLOT, "paged": paged}
    tables: dict[str, Any] = {"length_tokens": BY_ROW, "block_table": BY_ROW}
    return dataclasses.replace(cache, **arrays, **tables)


@specs_of.register
def _store_specs(store: SnapshotStore) -> Any:
    return jax.tree.map(lambda _: BY_SLOT, store)


@specs_of.register
def _staged_specs(staged: Staged) -> Any:
    del staged
    return STAGED


STAGED: Any = Staged(new_tokens=BY_SLOT, call=BY_ROW)  # type: ignore[arg-type]
"""The call's tokens, stacked by layer, and its rows, over `data`."""
