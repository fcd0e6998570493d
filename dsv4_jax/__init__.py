"""DeepSeek-V4 inference in JAX: the hybrid KV cache as a value, one jitted decode step."""

from dsv4_jax.allocator.ledger import Ledger
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.pool_plan import PoolPlan, plan_pools
from dsv4_jax.allocator.verify import Problem, Report, Seals, verify_cache
from dsv4_jax.attention.full_sequence import Selection, Selector, select_by_score
from dsv4_jax.cache.commit import Staged, commit
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import (
    ModelCache,
    cache_shapes,
    init_cache,
    reset_slots,
    update_slots,
)
from dsv4_jax.cache.new_tokens import Projections
from dsv4_jax.cache.original import maybe_flush_csa, maybe_flush_hca
from dsv4_jax.cache.paged_cache import PagedKVPool, init_paged_pool
from dsv4_jax.cache.poison import poison
from dsv4_jax.cache.schema import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    LayerCacheSchema,
    build_schema,
    compute_block_budget,
)
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
from dsv4_jax.checkpoint.load import SHIPPED_CHECKPOINT, load_checkpoint
from dsv4_jax.checkpoint.save import save_checkpoint
from dsv4_jax.config import DSV4Config, YarnScaling
from dsv4_jax.config.layer_schedule import LayerSpec, draft_layer, layer_schedule
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.model.draft import forward_draft
from dsv4_jax.model.forward import forward, forward_streams
from dsv4_jax.model.params import DSV4Params, init_params, param_shapes, unstack_layers
from dsv4_jax.runtime import XLA_GPU_FLAGS, claim_memory, set_xla_flags, use_compilation_cache
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.loop import CacheError
from dsv4_jax.serving.metrics import Histogram, Metrics, MetricsCollector
from dsv4_jax.serving.request import Completion, Token
from dsv4_jax.step.decode import decode_loop, decode_step, jit_decode_loop, jit_decode_step
from dsv4_jax.step.prefill import jit_prefill, prefill
from dsv4_jax.step.sampling import Sampling, make_sampling, sample
from dsv4_jax.step.serve_step import ServeInput, ServeOutput, serve_step, verify_drafts
from dsv4_jax.step.step import stage_step
from pallas_kernels.common.call import CallIndices

__all__ = [
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "SHIPPED_CHECKPOINT",
    "XLA_GPU_FLAGS",
    "AttentionType",
    "CacheError",
    "CallIndices",
    "ClassicalView",
    "Completion",
    "DSV4Config",
    "DSV4Params",
    "Engine",
    "Histogram",
    "IndexerView",
    "KVCacheManager",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerSpec",
    "Ledger",
    "Metrics",
    "MetricsCollector",
    "ModelCache",
    "PagedKVPool",
    "PoolPlan",
    "Problem",
    "Projections",
    "Report",
    "RouterType",
    "SWAView",
    "Sampling",
    "Seals",
    "Selection",
    "Selector",
    "ServeInput",
    "ServeOutput",
    "SlotChanges",
    "SnapshotPlan",
    "SnapshotStore",
    "Staged",
    "StateCachePool",
    "StepInput",
    "Token",
    "YarnScaling",
    "apply_changes",
    "build_schema",
    "cache_shapes",
    "claim_memory",
    "commit",
    "compute_block_budget",
    "decode_loop",
    "decode_step",
    "draft_layer",
    "forward",
    "forward_draft",
    "forward_streams",
    "init_cache",
    "init_paged_pool",
    "init_params",
    "init_snapshot_store",
    "init_state_pool",
    "jit_decode_loop",
    "jit_decode_step",
    "jit_prefill",
    "layer_schedule",
    "load_checkpoint",
    "load_snapshots",
    "make_sampling",
    "maybe_flush_csa",
    "maybe_flush_hca",
    "param_shapes",
    "plan_pools",
    "poison",
    "prefill",
    "reset_slots",
    "sample",
    "save_checkpoint",
    "save_snapshots",
    "select_by_score",
    "serve_step",
    "set_xla_flags",
    "stage_step",
    "unstack_layers",
    "update_slots",
    "use_compilation_cache",
    "verify_cache",
    "verify_drafts",
]
