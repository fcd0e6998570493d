"""Parts of a decode step to be timed: the cache-dependent ops alone, and the layers of one kind."""

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
from dsv4_jax.cache.commit import advance
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Projections
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.engram import GROUP
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.engram import EngramRows
from dsv4_jax.model.block import run_block
from dsv4_jax.model.hyper_connections import Residual
from dsv4_jax.model.layer_params import LayerParams
from dsv4_jax.model.trunk import keep

_E4M3_CODES = 127
"""Of numbers above 0; the next is NaN."""
_ENGRAM_SCALE = 119
"""2^-8, so that the largest values are below 2."""


class AttentionInputs(NamedTuple):
    """The projections of a layer that its cache-dependent ops take; index queries are not rounded.

    Attributes:
      queries: [B, H, C].
      kv: [B, C].
      values: f32[B, 2 * C], of the CSA compressor.
      scores: f32[B, 2 * C], of the CSA compressor.
      hca_values: f32[B, C], of the HCA compressor.
      hca_scores: f32[B, C], of the HCA compressor.
      index_values: f32[B, 2 * IC], of the indexer's compressor.
      index_scores: f32[B, 2 * IC], of the indexer's compressor.
      index_queries: [B, IH, IC].
      index_weights: f32[B, IH].
      kv_norm: [C], weights of the norm of `kv`.
      norm: [C], weights of the compressor's norm.
      index_norm: [IC], weights of the norm of the indexer's compressor.
      sink: f32[H], attention sinks.
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
    """Random inputs of unit variance."""
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


def one_token_each(config: DSV4Config, batch: int, shard: int = 0) -> StepInput:
    """The input of a decode step: segment r is slot r, with one random token.

    What a token reads of Engram tables is random too, of the formats of the release, on the device.
    Each data shard has tokens of its own, since equal ones pick the same experts.
    """
    rows = jnp.arange(batch, dtype=jnp.int32)
    rng = np.random.default_rng((batch, shard))
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, batch), jnp.int32)
    engram = random_rows(config, batch, rng)
    return StepInput(token_ids=tokens, request_ids=rows, request_slots=rows, engram=engram)


def random_rows(config: DSV4Config, num_tokens: int, rng: np.random.Generator) -> EngramRows | None:
    """What tokens read of Engram tables, drawn, on the device; None of a model without tables."""
    if (sizes := config.engram) is None:
        return None
    lead = num_tokens, len(sizes.layers), sizes.num_columns
    codes = rng.integers(0, _E4M3_CODES, (*lead, sizes.head_dim), dtype=np.uint8)
    scales = np.full((*lead, -(-sizes.head_dim // GROUP)), _ENGRAM_SCALE, np.uint8)
    return EngramRows(values=jnp.asarray(codes), scale=jnp.asarray(scales))


def cache_part(
    cache: ModelCache, inputs: AttentionInputs, step_input: StepInput, *, config: DSV4Config
) -> tuple[ModelCache, AttentionInputs]:
    """Runs the cache-dependent part of a decode step: all layers, each from append to attention.

    Each layer appends and flushes (which also rotates and rounds index queries), selects and
    attends as the model's layers do, but all take the given inputs. The result of a layer becomes
    the queries of the next, so that layers depend on each other as in a step, without a launch.

    Args:
      cache: the cache; donate it.
      inputs: inputs of every layer.
      step_input: see `decode_step`.
      config: the model.

    Returns:
      The cache with advanced lengths, and the inputs with the last layer's result as queries.
    """
    call = cache.index(step_input, max_row_tokens=1)
    for spec in layer_schedule(config):
        handle = cache.layer(spec.attn, spec.family_idx, call, in_place=True)
        # Ties the inputs to the layer; without it XLA would encode them once for all layers.
        handle, inputs = jax.lax.optimization_barrier((handle, inputs))
        # All layers share the call, so its derived indices are computed once.
        handle = dataclasses.replace(handle, call=call)
        handle, attended = _jit_attend(handle, inputs, config)
        handle, attended = jax.lax.optimization_barrier((handle, attended))
        cache = cache.with_layer(handle)
        inputs = inputs._replace(queries=attended)
    return advance(cache, call), inputs


def layers_of_kind(
    layers: Sequence[LayerParams],
    cache: ModelCache,
    streams: jax.Array,
    step_input: StepInput,
    *,
    kind: str,
    config: DSV4Config,
) -> tuple[ModelCache, jax.Array]:
    """Runs the first layers of one kind, one after the other, as a decode step does.

    Args:
      layers: parameters of those layers only; passing those of all layers takes long.
      cache: the cache; donate it. Its lengths do not change.
      streams: [B, S, D], the residual streams.
      step_input: see `decode_step`.
      kind: a `LayerSpec.kind`.
      config: the model.

    Returns:
      The cache, and the streams after the last layer.
    """
    call = cache.index(step_input, max_row_tokens=1)
    specs = [spec for spec in layer_schedule(config) if spec.kind == kind]
    residual = Residual.start(streams)
    for spec, layer in zip(specs, layers, strict=False):
        handle = cache.layer(spec.attn, spec.family_idx, call, in_place=True)
        handle, new, residual = run_block(layer, residual, step_input.token_ids, handle, config)
        cache, _ = keep(cache, None, handle, new)
    return cache, residual.written()


def append(
    handle: LayerCacheHandle, inputs: AttentionInputs, config: DSV4Config
) -> tuple[LayerCacheHandle, Appended]:
    """Appends the inputs that a layer of the handle's type projects, index queries included."""
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
    """Runs one layer from append to attention, as `dsv4_jax.attention` does."""
    handle, appended = append(handle, inputs, config)
    selected = None
    if handle.schema.attn_type == AttentionType.HCA:
        selected = handle.all_visible()
    elif appended.index_queries is not None:
        selected = handle.select(appended.index_queries, inputs.index_weights)
    return handle, handle.attend(appended.queries, inputs.sink, selected)


_jit_attend = jax.jit(_attend, static_argnames="config")
"""Jitted, so that layers of a kind share one trace."""
