"""DeepSeek-V4 inference in JAX: the hybrid KV cache as a value, one jitted decode step.

`__all__` is what most programs need. The rest is in the packages: `ds.cache`, `ds.allocator`,
`ds.serving` and so on. Names are imported when they are first used, so that `import dsv4_jax` is
quick.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_jax import allocator as allocator
    from dsv4_jax import attention as attention
    from dsv4_jax import cache as cache
    from dsv4_jax import checkpoint as checkpoint
    from dsv4_jax import config as config
    from dsv4_jax import hosts as hosts
    from dsv4_jax import model as model
    from dsv4_jax import peers as peers
    from dsv4_jax import research as research
    from dsv4_jax import runtime as runtime
    from dsv4_jax import serving as serving
    from dsv4_jax import step as step
    from dsv4_jax.allocator.manager import KVCacheManager as KVCacheManager
    from dsv4_jax.cache.commit import commit
    from dsv4_jax.cache.empty_cache import init_cache
    from dsv4_jax.cache.handle import LayerCacheHandle as LayerCacheHandle
    from dsv4_jax.cache.model_cache import ModelCache, reset_slots, update_slots
    from dsv4_jax.cache.original import maybe_flush_csa as maybe_flush_csa
    from dsv4_jax.cache.original import maybe_flush_hca as maybe_flush_hca
    from dsv4_jax.cache.paged_cache import PagedKVPool as PagedKVPool
    from dsv4_jax.cache.schema import BLOCK_SIZE_ORIGINAL_TOKENS as BLOCK_SIZE_ORIGINAL_TOKENS
    from dsv4_jax.cache.schema import LayerCacheSchema as LayerCacheSchema
    from dsv4_jax.cache.schema import build_schema as build_schema
    from dsv4_jax.cache.schema import compute_block_budget as compute_block_budget
    from dsv4_jax.cache.shardings import cache_shardings
    from dsv4_jax.cache.state_cache import StateCachePool as StateCachePool
    from dsv4_jax.cache.step_input import StepInput
    from dsv4_jax.cache.views import ClassicalView as ClassicalView
    from dsv4_jax.cache.views import IndexerView as IndexerView
    from dsv4_jax.cache.views import SWAView as SWAView
    from dsv4_jax.checkpoint.load import SHIPPED_CHECKPOINT, load_checkpoint
    from dsv4_jax.checkpoint.save import save_checkpoint
    from dsv4_jax.config.layer_schedule import LayerSpec as LayerSpec
    from dsv4_jax.config.layer_schedule import draft_layers as draft_layers
    from dsv4_jax.config.layer_schedule import layer_schedule as layer_schedule
    from dsv4_jax.config.layer_types import AttentionType as AttentionType
    from dsv4_jax.config.layer_types import RouterType as RouterType
    from dsv4_jax.config.model_config import DSV4Config
    from dsv4_jax.config.model_config import YarnScaling as YarnScaling
    from dsv4_jax.inspection.inspect import inspect
    from dsv4_jax.mesh import make_mesh
    from dsv4_jax.model.forward import forward
    from dsv4_jax.model.params import init_params, unstack_layers
    from dsv4_jax.model.shardings import param_shardings
    from dsv4_jax.runtime import set_xla_flags, use_compilation_cache
    from dsv4_jax.serving.engine import Engine
    from dsv4_jax.serving.requests.request import Completion
    from dsv4_jax.step.decode import decode_loop, decode_step, jit_decode_loop, jit_decode_step
    from dsv4_jax.step.draws import sample
    from dsv4_jax.step.prefill import jit_prefill, prefill
    from dsv4_jax.step.sampling import Sampling, SamplingParams, make_sampling
    from dsv4_jax.step.step import stage_step

__version__ = "0.4.0"

__all__ = [
    "SHIPPED_CHECKPOINT",
    "Completion",
    "DSV4Config",
    "Engine",
    "ModelCache",
    "Sampling",
    "SamplingParams",
    "StepInput",
    "cache_shardings",
    "commit",
    "decode_loop",
    "decode_step",
    "forward",
    "init_cache",
    "init_params",
    "inspect",
    "jit_decode_loop",
    "jit_decode_step",
    "jit_prefill",
    "load_checkpoint",
    "make_mesh",
    "make_sampling",
    "param_shardings",
    "prefill",
    "reset_slots",
    "sample",
    "save_checkpoint",
    "set_xla_flags",
    "stage_step",
    "unstack_layers",
    "update_slots",
    "use_compilation_cache",
]

_PACKAGES = (
    "allocator",
    "attention",
    "cache",
    "checkpoint",
    "config",
    "hosts",
    "model",
    "peers",
    "research",
    "runtime",
    "serving",
    "step",
)

_NAMES_BY_MODULE = {
    "cache.commit": "commit",
    "cache.empty_cache": "init_cache",
    "cache.model_cache": "ModelCache reset_slots update_slots",
    "cache.shardings": "cache_shardings",
    "cache.step_input": "StepInput",
    "checkpoint.load": "SHIPPED_CHECKPOINT load_checkpoint",
    "checkpoint.save": "save_checkpoint",
    "config.model_config": "DSV4Config YarnScaling",
    "inspection.inspect": "inspect",
    "mesh": "make_mesh",
    "model.forward": "forward",
    "model.params": "init_params unstack_layers",
    "model.shardings": "param_shardings",
    "runtime": "set_xla_flags use_compilation_cache",
    "serving.engine": "Engine",
    "serving.requests.request": "Completion",
    "step.decode": "decode_loop decode_step jit_decode_loop jit_decode_step",
    "step.prefill": "jit_prefill prefill",
    "step.draws": "sample",
    "step.sampling": "Sampling SamplingParams make_sampling",
    "step.step": "stage_step",
    # The original cache's classes and functions, and the layers that they are made for.
    "allocator.manager": "KVCacheManager",
    "cache.handle": "LayerCacheHandle",
    "cache.original": "maybe_flush_csa maybe_flush_hca",
    "cache.paged_cache": "PagedKVPool",
    "cache.schema": (
        "BLOCK_SIZE_ORIGINAL_TOKENS LayerCacheSchema build_schema compute_block_budget"
    ),
    "cache.state_cache": "StateCachePool",
    "cache.views": "ClassicalView IndexerView SWAView",
    "config.layer_schedule": "LayerSpec draft_layers layer_schedule",
    "config.layer_types": "AttentionType RouterType",
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports a public name, or a package, on first use (PEP 562).

    Where there is no NVIDIA driver JAX is kept from CUDA's plugin before it starts: with the
    extra `aot` a program would begin with a traceback about cuDNN.
    """
    if name not in _PACKAGES and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _leave_out_cuda()
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


@functools.cache
def _leave_out_cuda() -> None:
    from dsv4_jax.runtime import look_for_no_gpu

    with contextlib.suppress(ValueError):  # JAX says what is wrong with JAX_PLATFORMS
        look_for_no_gpu()


def __dir__() -> list[str]:
    """The public names and the packages."""
    return sorted({*__all__, *_PACKAGES})
