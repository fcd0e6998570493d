"""The hybrid cache: pytrees, and pure functions on them.

    schema          sizes of a layer's cache and of the pools
    paged_cache     entries and index keys, by physical block
    state_cache     ring and compressor states, by slot
    model_cache     both of all layers, block tables and lengths: the value that a step donates
    step_input      the input of a step, and the indices of its call
    handle          one layer in one call, all that attention sees: `append`, `select`, `attend`
    append          a call's tokens into a layer: in place, or as `new_tokens` to be committed
    draft_blocks    attention of blocks of drafts, to rings and inside the block
    commit          those into rings, states and lengths
    slot_changes    what the allocator changes between two steps
    snapshots       what resumes a request at a block boundary
    packed_rows     slots, blocks and snapshots as bytes, for the host
    row_sums        checksums of those

`empty_cache` makes one of arrays that are `filled`, `shardings` and `block_split` lay it over a
mesh, `poison` fills what nobody may read, and `original` and `views` have the original cache's
interface.
"""

from dsv4_jax.cache.commit import Staged
from dsv4_jax.cache.empty_cache import cache_shapes, init_cache
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache, family_bytes, reset_slots, update_slots
from dsv4_jax.cache.new_tokens import NewTokens, Projections
from dsv4_jax.cache.original import OriginalHandle, maybe_flush_csa, maybe_flush_hca
from dsv4_jax.cache.paged_cache import PagedKVPool, init_paged_pool
from dsv4_jax.cache.schema import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    DEFAULT_CACHE_FORMAT,
    LayerCacheSchema,
    build_schema,
    compute_block_budget,
)
from dsv4_jax.cache.shardings import cache_shardings
from dsv4_jax.cache.slot_changes import SlotChanges, apply_changes
from dsv4_jax.cache.snapshots import (
    SnapshotPlan,
    SnapshotStore,
    init_snapshot_store,
    load_snapshots,
    save_snapshots,
)
from dsv4_jax.cache.state_cache import StateCachePool, init_state_pool
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.cache.views import ClassicalView, IndexerView, SWAView

__all__ = [
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "DEFAULT_CACHE_FORMAT",
    "ClassicalView",
    "IndexerView",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "ModelCache",
    "NewTokens",
    "OriginalHandle",
    "PagedKVPool",
    "Projections",
    "SWAView",
    "SlotChanges",
    "SnapshotPlan",
    "SnapshotStore",
    "Staged",
    "StateCachePool",
    "StepInput",
    "apply_changes",
    "build_schema",
    "cache_shapes",
    "cache_shardings",
    "compute_block_budget",
    "family_bytes",
    "init_cache",
    "init_paged_pool",
    "init_snapshot_store",
    "init_state_pool",
    "load_snapshots",
    "maybe_flush_csa",
    "maybe_flush_hca",
    "reset_slots",
    "save_snapshots",
    "update_slots",
]
