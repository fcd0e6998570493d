"""What a DSpark draft adds to a step, as programs of their own."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.attention.block_attention import Blocks
from dsv4_jax.bench.tagged import PICKED, tagged
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, empty_staged
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.dspark import Guesses, run_blocks
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import run_layers
from dsv4_jax.step.propose import propose_block, stage_context
from dsv4_jax.step.sampling import Sampling
from dsv4_jax.step.serve_values import ServeInput, ServeOutput, fill_in
from dsv4_jax.step.step import pad_tokens
from pallas_kernels.common.weights import is_quantized, with_activations

_SWA = AttentionType.SWA.value
_CONTEXT = r"^mtp\.(main_proj|main_norm|stages\..*\.attn\.(wkv|kv_norm))$"
_PROPOSAL = r"^(embed|head|mtp\..*)$"


def context_params(params: DSV4Params) -> DSV4Params:
    """The weights that `context_part` reads; the others are None."""
    return _only(params, _CONTEXT)


def proposal_params(params: DSV4Params) -> DSV4Params:
    """The weights that `proposal_part` reads, and the few of the context; the others are None."""
    return _only(params, _PROPOSAL)


def window_cache(cache: ModelCache) -> ModelCache:
    """The rings of window layers alone, with lengths and tables."""
    return dataclasses.replace(cache, state={_SWA: cache.state[_SWA]}, paged={})


def context_part(
    params: DSV4Params,
    cache: ModelCache,
    new_tokens: dict[str, Family],
    step_input: StepInput,
    means: jax.Array,
    *,
    config: DSV4Config,
    activations: str,
) -> Family:
    """`stage_context` alone: what a call's tokens leave in the rings of the stages.

    Args:
      params: `context_params`.
      cache: `window_cache`.
      new_tokens: staged tokens of window layers.
      step_input: the call.
      means: [T, K, D].
      config: the model, with `dspark`.
      activations: as in `serve_step`.
    """
    params = with_activations(params, activations)
    call = cache.index(step_input)
    return stage_context(params, cache, new_tokens, call, means, config)[_SWA]


def proposal_part(
    params: DSV4Params,
    cache: ModelCache,
    anchor_ids: jax.Array,
    sampling: Sampling,
    *,
    config: DSV4Config,
    activations: str,
) -> jax.Array:
    """`propose_block` alone, after i32[B]; returns i32[B, N], all that a step takes of it."""
    params = with_activations(params, activations)
    slots = jnp.arange(anchor_ids.shape[0], dtype=jnp.int32)
    lengths = cache.length_tokens
    block = propose_block(params, cache, slots, lengths, anchor_ids, sampling, None, config=config)
    return block.token_ids


def pass_part(
    params: DSV4Params,
    cache: ModelCache,
    anchor_ids: jax.Array,
    *,
    config: DSV4Config,
    activations: str,
) -> Guesses:
    """The pass of a proposal, without its chain."""
    params = with_activations(params, activations)
    assert config.dspark is not None
    slots = jnp.arange(anchor_ids.shape[0], dtype=jnp.int32)
    blocks = Blocks(slots=slots, lengths=cache.length_tokens, size=config.dspark.block_size)
    return run_blocks(params, anchor_ids, blocks, cache.state[_SWA], config)


def picks_call(config: DSV4Config, activations: str) -> Any:
    """Jitted: parameters, cache, input and last output of a step -> i32[T, k] of each layer.

    They are the experts that the step's tokens pick.
    """

    def streams(
        params: DSV4Params, cache: ModelCache, serve_input: ServeInput, last: ServeOutput
    ) -> jax.Array:
        step_input = pad_tokens(fill_in(serve_input.step_input, last))
        call = cache.index(step_input)
        staged = empty_staged(cache.state, call.positions.shape[0])
        params = with_activations(params, activations)
        return run_layers(params, cache, step_input.token_ids, call, staged, config).streams

    return jax.jit(tagged(streams, PICKED))


def block_picks_call(config: DSV4Config, activations: str) -> Any:
    """Jitted: as `pass_part` -> i32[B * N, k] of each stage, the experts that a block picks."""
    run = functools.partial(pass_part, config=config, activations=activations)
    return jax.jit(tagged(run, PICKED))


_STATIC = ("config", "activations")
jit_proposal = jax.jit(proposal_part, static_argnames=_STATIC)
jit_pass = jax.jit(pass_part, static_argnames=_STATIC)


def context_call(config: DSV4Config, activations: str) -> Any:
    """`context_part` of arrays alone."""
    return functools.partial(context_part, config=config, activations=activations)


def _only(params: DSV4Params, wanted: str) -> DSV4Params:
    def keep(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return leaf if re.search(wanted, name) else None

    return jax.tree_util.tree_map_with_path(keep, params, is_leaf=is_quantized)
