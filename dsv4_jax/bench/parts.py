"""Parts of a decode step, for timing: the cache-dependent ops alone, and the layers of one kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.bench.noise import random_array
from dsv4_jax.cache.append import Appended, LayerNorms, LayerTokens
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Projections
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.params import LayerParams
from dsv4_jax.model.trunk import jit_run_block, keep


class AttentionInputs(NamedTuple):
    """What the projections of a layer hand to its cache-dependent ops, index queries unrounded.

    Attributes:
      queries: [B, H, C].
      kv: [B, C].
      values: f32[B, 2 * C], a CSA compressor's.
      scores: f32[B, 2 * C].
      hca_values: f32[B, C], an HCA compressor's.
      hca_scores: f32[B, C].
      index_values: f32[B, 2 * IC].
      index_scores: f32[B, 2 * IC].
      index_queries: [B, IH, IC].
      index_weights: f32[B, IH].
      kv_norm: [C].
      norm: [C], of the compressor.
      index_norm: [IC].
      sink: f32[H].
    """

    queries: jax.Array
    kv: jax.Array
    values: jax.Array
    scores: jax.Array
    hca_values: jax.Array
    hca_scores: jax.Array
    index_values: jax.Array
    index_scores: jax.Array
    index_queries: jax.Array
    index_weights: jax.Array
    kv_norm: jax.Array
    norm: jax.Array
    index_norm: jax.Array
    sink: jax.Array


def random_inputs(config: DSV4Config, batch: int, seed: int = 0) -> AttentionInputs:
    """Inputs of unit variance; activations in bf16."""
    heads, dim, index_dim = config.num_attention_heads, config.head_dim, config.indexer_head_dim
    index_heads = config.indexer_num_heads
    shapes = {
        "queries": (batch, heads, dim),
        "kv": (batch, dim),
        "values": (batch, 2 * dim),
        "scores": (batch, 2 * dim),
        "hca_values": (batch, dim),
        "hca_scores": (batch, dim),
        "index_values": (batch, 2 * index_dim),
        "index_scores": (batch, 2 * index_dim),
        "index_queries": (batch, index_heads, index_dim),
        "index_weights": (batch, index_heads),
        "kv_norm": (dim,),
        "norm": (dim,),
        "index_norm": (index_dim,),
        "sink": (heads,),
    }
    narrow = {"queries", "kv", "index_queries", "kv_norm", "norm", "index_norm"}
    return AttentionInputs(
        **{
            name: random_array(
                np.uint32(seed * 100 + number),
                np.float32(0),
                np.float32(1),
                shape=shape,
                dtype=jnp.bfloat16 if name in narrow else jnp.float32,
            )
            for number, (name, shape) in enumerate(shapes.items())
        }
    )


def one_token_each(config: DSV4Config, batch: int) -> StepInput:
    """A decode step's input: row r is slot r, with a random token."""
    rows = jnp.arange(batch, dtype=jnp.int32)
    tokens = np.random.default_rng(batch).integers(0, config.vocab_size, batch)
    return StepInput(token_ids=jnp.asarray(tokens, jnp.int32), request_ids=rows, request_slots=rows)


def cache_part(
    cache: ModelCache, inputs: AttentionInputs, step_input: StepInput, *, config: DSV4Config
) -> tuple[ModelCache, AttentionInputs]:
    """All layers of a decode step without what does not touch the cache.

    Each layer appends and flushes, index queries rotated and rounded along with that, selects and
    attends as the model's own layers do, but to given inputs. The result of a layer is the next
    one's queries, so that layers follow one another as in a step; no launch is spent on that.

    Args:
      cache: donate it.
      inputs: of every layer.
      step_input: as for `decode_step`.
      config: the model.

    Returns:
      The cache, lengths advanced, and inputs whose queries are the last layer's result.
    """
    call = cache.index(step_input, max_row_tokens=1)
    for spec in layer_schedule(config):
        handle = cache.layer(spec.attn, spec.family_idx, call, in_place=True)
        # Ties the inputs to the layer: equal ones would be encoded once for all.
        handle, inputs = jax.lax.optimization_barrier((handle, inputs))
        # All layers share the call, and what follows from it is computed once.
        handle = dataclasses.replace(handle, call=call)
        handle, attended = _jit_attend(handle, inputs, config)
        handle, attended = jax.lax.optimization_barrier((handle, attended))
        cache = cache.with_layer(handle)
        inputs = inputs._replace(queries=attended)
    slots = jnp.where(call.row_slots < 0, cache.max_requests, call.row_slots)
    lengths = cache.length_tokens.at[slots].add(call.row_counts, mode="drop")
    return dataclasses.replace(cache, length_tokens=lengths), inputs


def layers_of_kind(
    layers: Sequence[LayerParams],
    cache: ModelCache,
    streams: jax.Array,
    step_input: StepInput,
    *,
    kind: str,
    config: DSV4Config,
) -> tuple[ModelCache, jax.Array]:
    """The first layers of one kind, one after the other, as in a decode step.

    Args:
      layers: parameters of those layers, and of no others: passing a model's takes a while.
      cache: donate it; its lengths stay.
      streams: [B, S, D].
      step_input: as for `decode_step`.
      kind: as `LayerSpec.kind`.
      config: the model.

    Returns:
      The cache, and the streams after the last of them.
    """
    call = cache.index(step_input, max_row_tokens=1)
    specs = [spec for spec in layer_schedule(config) if spec.kind == kind]
    for spec, layer in zip(specs, layers, strict=False):
        handle = cache.layer(spec.attn, spec.family_idx, call, in_place=True)
        handle, new, streams = jit_run_block(layer, streams, step_input.token_ids, handle, config)
        cache, _ = keep(cache, None, handle, new)
    return cache, streams


def append(
    handle: LayerCacheHandle, inputs: AttentionInputs, config: DSV4Config
) -> tuple[LayerCacheHandle, Appended]:
    """Appends what a layer of the handle's type projects, index queries included."""
    attn = handle.schema.attn_type
    tokens = LayerTokens(queries=inputs.queries, kv=inputs.kv)
    norms = LayerNorms(
        kv=inputs.kv_norm,
        frequencies=rope_frequencies(config, attn),
        compressor=inputs.norm,
        indexer=inputs.index_norm,
        eps=config.rms_norm_eps,
    )
    if attn == AttentionType.HCA:
        rows = Projections(values=inputs.hca_values, scores=inputs.hca_scores)
        tokens = dataclasses.replace(tokens, compressor=rows)
    elif attn == AttentionType.CSA:
        tokens = dataclasses.replace(
            tokens,
            compressor=Projections(values=inputs.values, scores=inputs.scores),
            indexer=Projections(values=inputs.index_values, scores=inputs.index_scores),
            index_queries=inputs.index_queries,
        )
    return handle.append(tokens, norms)


def _attend(
    handle: LayerCacheHandle, inputs: AttentionInputs, config: DSV4Config
) -> tuple[LayerCacheHandle, jax.Array]:
    """One layer, from append to attention, as in `dsv4_jax.attention`."""
    handle, appended = append(handle, inputs, config)
    selected = None
    if handle.schema.attn_type == AttentionType.HCA:
        selected = handle.all_visible()
    elif appended.index_queries is not None:
        selected = handle.select(appended.index_queries, inputs.index_weights)
    return handle, handle.attend(appended.queries, inputs.sink, selected)


_jit_attend = jax.jit(_attend, static_argnames="config")
"""Traced and lowered once for all layers of a kind."""
