"""DeepSeek-V4 inference in JAX: the hybrid KV cache as a value, one jitted decode step."""

from dsv4_jax.attention.history import Selection, Selector, select_by_score
from dsv4_jax.cache.call_rows import Projections
from dsv4_jax.cache.flush import maybe_flush_csa, maybe_flush_hca
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.manager import KVCacheManager
from dsv4_jax.cache.model_cache import (
    ModelCache,
    cache_shapes,
    init_cache,
    reset_slots,
    update_slots,
)
from dsv4_jax.cache.paged_cache import PagedKVPool, init_paged_pool
from dsv4_jax.cache.schema import (
    BLOCK_SIZE_ORIGINAL_TOKENS,
    LayerCacheSchema,
    build_schema,
    compute_block_budget,
)
from dsv4_jax.cache.state_cache import StateCachePool, init_state_pool
from dsv4_jax.cache.step_input import CallIndices, StepInput
from dsv4_jax.cache.views import ClassicalView, IndexerView, SWAView
from dsv4_jax.config import DSV4Config, YarnScaling
from dsv4_jax.engine.decode import decode_loop, decode_step, jit_decode_loop, jit_decode_step
from dsv4_jax.engine.engine import Completion, Engine
from dsv4_jax.engine.prefill import jit_prefill, prefill
from dsv4_jax.engine.sampling import Sampling, make_sampling, sample
from dsv4_jax.engine.step import Staged, commit, stage_step
from dsv4_jax.layer_schedule import (
    AttentionType,
    LayerSpec,
    RouterType,
    draft_layer,
    layer_schedule,
)
from dsv4_jax.model.checkpoint import SHIPPED_CHECKPOINT, load_checkpoint, save_checkpoint
from dsv4_jax.model.draft import forward_draft
from dsv4_jax.model.params import DSV4Params, init_params, param_shapes, unstack_layers
from dsv4_jax.model.transformer import forward, forward_streams
from dsv4_jax.runtime import XLA_GPU_FLAGS, set_xla_flags, use_compilation_cache

__all__ = [
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "SHIPPED_CHECKPOINT",
    "XLA_GPU_FLAGS",
    "AttentionType",
    "CallIndices",
    "ClassicalView",
    "Completion",
    "DSV4Config",
    "DSV4Params",
    "Engine",
    "IndexerView",
    "KVCacheManager",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerSpec",
    "ModelCache",
    "PagedKVPool",
    "Projections",
    "RouterType",
    "SWAView",
    "Sampling",
    "Selection",
    "Selector",
    "Staged",
    "StateCachePool",
    "StepInput",
    "YarnScaling",
    "build_schema",
    "cache_shapes",
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
    "init_state_pool",
    "jit_decode_loop",
    "jit_decode_step",
    "jit_prefill",
    "layer_schedule",
    "load_checkpoint",
    "make_sampling",
    "maybe_flush_csa",
    "maybe_flush_hca",
    "param_shapes",
    "prefill",
    "reset_slots",
    "sample",
    "save_checkpoint",
    "select_by_score",
    "set_xla_flags",
    "stage_step",
    "unstack_layers",
    "update_slots",
    "use_compilation_cache",
]
