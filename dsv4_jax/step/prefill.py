"""Fills a cache from prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dsv4_jax import checks
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import DATA, MODEL, on_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.step import check_call, mask_rows, run_step, trunk_logits
from pallas_kernels.common.weights import with_activations


@on_mesh(("cache", P(DATA, MODEL)))
def prefill(
    params: DSV4Params,
    cache: ModelCache,
    step_input: StepInput,
    *,
    config: DSV4Config,
    all_logits: bool = False,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, jax.Array]:
    """Appends any ragged mix of tokens: whole prompts, chunks of them, single tokens.

    Args:
      params: model parameters.
      cache: the cache before the call.
      step_input: the tokens.
      config: the model.
      all_logits: logits of every token instead of each row's last.
      activations: as in `decode_step`.

    Returns:
      The cache, and f32[B, V], zeros for rows without tokens; or f32[T, V], zeros for padding.

    Raises:
      ValueError: a field of `step_input` has a wrong shape or dtype, a value is out of range, or
        there are no such activations.
    """
    check_call(params, cache, step_input, config, activations)
    all_logits = checks.flag("all_logits", all_logits)
    params = with_activations(params, activations)
    num_rows = step_input.token_ids.shape[0] if all_logits else step_input.request_slots.shape[0]
    cache, call, streams = run_step(params, cache, step_input, config)
    live = call.segment_ids >= 0
    if not all_logits:
        last = call.row_offsets + call.row_counts - 1
        streams, live = streams[jnp.maximum(last, 0)], call.row_counts > 0
    return cache, trunk_logits(params, mask_rows(streams, live), config)[:num_rows]


jit_prefill = jax.jit(
    prefill,
    static_argnames=("config", "all_logits", "activations"),
    donate_argnames="cache",
)
"""`prefill`, jitted; the old cache is gone."""
