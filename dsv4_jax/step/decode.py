"""decode_step and decode_loop: one token per request, once or n times on the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dsv4_jax import checks
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import BY_ROW, DATA, MODEL, on_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.draws import guess
from dsv4_jax.step.sampling import Sampling
from dsv4_jax.step.step import check_call, mask_rows, run_step, trunk_logits
from pallas_kernels.common.weights import with_activations


@on_mesh(("cache", P(DATA, MODEL)))
def decode_step(
    params: DSV4Params,
    cache: ModelCache,
    step_input: StepInput,
    *,
    config: DSV4Config,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, jax.Array]:
    """Appends one token per request.

    Args:
      params: model parameters.
      cache: the cache before the call.
      step_input: T = B, and `request_ids[t]` is t, or -1 for an idle row.
      config: the model.
      activations: what multiplies quantised weights: "fp8" rounds rows to E4M3 first, as the
        release does, "bfloat16" takes them as they are; static. Dense weights ignore it.

    Returns:
      The cache, and f32[B, V], zeros for idle rows.

    Raises:
      ValueError: T is not B, a field has a wrong shape or dtype, a value is out of range, or there
        are no such activations.
    """
    check_call(params, cache, step_input, config, activations)
    params = with_activations(params, activations)
    num_tokens, num_rows = step_input.token_ids.shape[0], step_input.request_slots.shape[0]
    if num_tokens != num_rows:
        raise ValueError(
            f"decode_step takes one token per row, got {num_tokens} token_ids for {num_rows} "
            "request_slots; use prefill for several, and request_ids -1 for none"
        )
    ids = checks.known_values(step_input.request_ids)
    if ids is not None and np.any((ids >= 0) & (ids != np.arange(num_rows))):
        raise ValueError(f"request_ids[t] must be t or -1 in decode_step, got {ids}")
    cache, call, streams = run_step(params, cache, step_input, config, max_row_tokens=1)
    logits = trunk_logits(params, mask_rows(streams, call.segment_ids >= 0), config)
    return cache, logits[:num_rows]


jit_decode_step = jax.jit(
    decode_step, static_argnames=("config", "activations"), donate_argnames="cache"
)
"""`decode_step`, jitted: it traces once per shape and donates the cache. The old cache is gone.

A loop on GPUs should let go of a step's logits before it calls the next: where they are held, the
next ones lie elsewhere, and XLA writes its CUDA graphs anew.
"""


@on_mesh(("cache", BY_ROW))
def decode_loop(
    params: DSV4Params,
    cache: ModelCache,
    step_input: StepInput,
    sampling: Sampling,
    *,
    num_steps: int,
    config: DSV4Config,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, jax.Array]:
    """Decodes several tokens per request in one call, on the device.

    A row that draws one of its stop tokens goes idle: the stop token is returned, but neither it
    nor anything after it is appended to the cache.

    Args:
      params: model parameters.
      cache: the cache before the call; its tables hold blocks for `num_steps` more tokens.
      step_input: the last drawn token of each row, not in the cache yet; as in `decode_step`.
      sampling: settings of each row.
      num_steps: n, static.
      config: the model.
      activations: as in `decode_step`.

    Returns:
      The cache, and i32[B, n], the drawn tokens; -1 in idle rows and after a stop.

    Raises:
      ValueError: as in `decode_step`, or `num_steps` is below 1.
    """
    num_steps = checks.integer("num_steps", num_steps, 1)
    checks.instance("sampling", sampling, Sampling)
    check_call(params, cache, step_input, config, activations, num_steps=num_steps)

    def draw_next(
        carry: tuple[ModelCache, jax.Array, jax.Array], _: None
    ) -> tuple[tuple[ModelCache, jax.Array, jax.Array], jax.Array]:
        cache, token_ids, request_ids = carry
        step_input_now = dataclasses.replace(
            step_input, token_ids=token_ids, request_ids=request_ids, engram=None
        )
        cache, logits = decode_step(
            params, cache, step_input_now, config=config, activations=activations
        )
        slots = jnp.maximum(step_input.request_slots, 0)
        lengths = cache.length_tokens[slots]
        drawn = guess(logits, sampling, lengths, None, config.idea.sampler)
        live = (request_ids >= 0) & (step_input.request_slots >= 0)
        drawn = jnp.where(live, drawn, -1)
        stopped = jnp.any(drawn[:, None] == sampling.stop_token_ids, axis=1) | ~live
        carry = (cache, jnp.maximum(drawn, 0), jnp.where(stopped, -1, request_ids))
        return carry, drawn

    start = (cache, step_input.token_ids, step_input.request_ids)
    (cache, _, _), drawn = jax.lax.scan(draw_next, start, length=num_steps)
    return cache, drawn.T


jit_decode_loop = jax.jit(
    decode_loop,
    static_argnames=("config", "num_steps", "activations"),
    donate_argnames="cache",
)
"""`decode_loop`, jitted; the old cache is gone."""
