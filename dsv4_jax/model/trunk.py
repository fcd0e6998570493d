"""From token ids to logits: embedding, every layer's block, head.

`run_layers` runs the blocks on a cache; `forward.py` runs them over whole sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.selection import selected_width
from dsv4_jax.cache.commit import commit_tokens
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, NewTokens, put_layer
from dsv4_jax.collectives import join_rows, rows_of_a_device, sum_over_model, take_rows
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, Segment, layer_schedule, split_into_segments
from dsv4_jax.linear import linear
from dsv4_jax.mesh import MODEL, axis_size, place_on
from dsv4_jax.model.block import run_block
from dsv4_jax.model.hyper_connections import Residual, collapse_streams
from dsv4_jax.model.layer_params import HyperConnectionParams, layer_of
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.peers import using
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.norm_rope import rms_norm


def embed(params: DSV4Params, token_ids: jax.Array, config: DSV4Config) -> jax.Array:
    """i32[...] -> [..., S, D]: the embedding, once per stream."""
    with using(params.peers):
        embedded = checkpoint_name(look_up(params.embed, token_ids), "embed")
    return jnp.broadcast_to(
        embedded[..., None, :], (*token_ids.shape, config.hc_mult, config.hidden_size)
    )


def look_up(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows of the embedding [V, D] by token id; on a mesh `table` is this device's part of it."""
    if axis_size(MODEL) == 1:
        return table[token_ids]
    own = token_ids - place_on(MODEL) * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    rows = table[jnp.clip(own, 0, table.shape[0] - 1)]
    return sum_over_model(jnp.where(is_own[..., None], rows, 0))


class TrunkOutput(NamedTuple):
    """What the trunk gives for a call.

    Attributes:
      cache: the cache after the call; lengths are not advanced.
      staged: tokens that are still to be committed, by attention type; None if there are none.
      streams: [T, S, D], residual streams before the head.
      means: [T, K, D], the streams' means after each target layer; None without targets.
    """

    cache: ModelCache
    staged: Mapping[str, Family] | None
    streams: jax.Array
    means: jax.Array | None


def run_layers(
    params: DSV4Params,
    cache: ModelCache,
    token_ids: jax.Array,
    call: CallIndices,
    staged: Mapping[str, Family] | None,
    config: DSV4Config,
    *,
    targets: tuple[int, ...] = (),
) -> TrunkOutput:
    """The trunk on a cache: every layer appends, selects and attends.

    Layers of a repeating pattern are scanned, with the cache in the carry; layers that have arrays
    of their own (`unstack_layers`) are unrolled.

    Args:
      params: model parameters.
      cache: the cache before the call.
      token_ids: i32[T].
      call: the call's indices.
      staged: None commits the call's tokens layer by layer. Else it receives them, by attention
        type, and rings and states stay as they were; layers may be separate where all are unrolled.
      config: the model.
      targets: layers, ascending, after which a DSpark draft reads the streams.
    """
    selected = None
    if config.index_reuse:
        max_entries = cache.max_context_tokens // config.csa_compression_ratio
        width = selected_width(max_entries, config)
        selected = jnp.zeros((token_ids.shape[0], width), jnp.int32)
    carry = (cache, staged, start_residual(embed(params, token_ids, config)), selected)
    means = []
    for segment in _segments(layer_schedule(config), targets):
        carry = _run_segment(segment, params, token_ids, call, config, carry)
        if segment.pattern[-1].layer_idx in targets and segment.repeats == 1:
            means.append(mean_of_streams(carry[2].written()))
    cache, staged, residual, _ = carry
    num_rows = token_ids.shape[0]
    with using(params.peers):
        joined = join_rows(jnp.stack(means, axis=1), num_rows) if means else None
        return TrunkOutput(cache, staged, join_rows(residual.written(), num_rows), joined)


def mean_of_streams(streams: jax.Array) -> jax.Array:
    """[..., S, D] -> [..., D], summed in f32."""
    return jnp.mean(streams, axis=-2, dtype=jnp.float32).astype(streams.dtype)


def _segments(schedule: tuple[LayerSpec, ...], targets: tuple[int, ...]) -> tuple[Segment, ...]:
    """Segments of the trunk, each target layer in one of its own."""
    cuts = sorted({0, len(schedule), *targets, *(target + 1 for target in targets)})
    parts = (schedule[start:end] for start, end in itertools.pairwise(cuts))
    return tuple(segment for part in parts for segment in split_into_segments(part))


def start_residual(streams: jax.Array) -> Residual:
    """Of [T, S, D] those rows that this device has between sublayers; nothing is to be written."""
    return Residual.start(take_rows(streams, rows_of_a_device(streams.shape[0])))


Carry = tuple[ModelCache, Mapping[str, Family] | None, Residual, jax.Array | None]
"""Cache, staged rows, residual and, with `index_reuse`, what the last CSA layer selected."""


def _run_segment(
    segment: Segment,
    params: DSV4Params,
    token_ids: jax.Array,
    call: CallIndices,
    config: DSV4Config,
    carry: Carry,
) -> Carry:
    stacked = not any(isinstance(params.layers[spec.kind], tuple) for spec in segment.pattern)

    def run_pattern(carry: Carry, copy: jax.Array | int) -> tuple[Carry, None]:
        for spec in segment.pattern:
            kind_idx = spec.kind_idx + copy * segment.kind_stride(spec)
            family_idx = spec.family_idx + copy * segment.family_stride(spec)
            layer = layer_of(params.layers[spec.kind], kind_idx)
            cache, staged, residual, selected = carry
            in_place = staged is None and call.max_row_tokens == 1
            handle = cache.layer(spec.attn, family_idx, call, in_place=in_place)
            if spec.index_source is not None:
                handle = dataclasses.replace(handle, selected=selected)
            with jax.named_scope(spec.kind):
                handle, new, residual = run_block(
                    layer, residual, token_ids, handle, config, params.peers
                )
            if handle.selected is not None:
                selected = handle.selected
            carry = (*keep(cache, staged, handle, new, family_idx), residual, selected)
        return carry, None

    if segment.repeats == 1 or not stacked:
        for copy in range(segment.repeats):
            carry = run_pattern(carry, copy)[0]
        return carry
    return jax.lax.scan(run_pattern, carry, jnp.arange(segment.repeats))[0]


def keep(
    cache: ModelCache,
    staged: Mapping[str, Family] | None,
    handle: LayerCacheHandle,
    new: NewTokens | None,
    layer: jax.Array | int | None = None,
) -> tuple[ModelCache, Mapping[str, Family] | None]:
    """Commits a layer's new tokens, or stages them for a later commit; None has nothing to keep.

    `layer` is the handle's, static where tokens of layers are staged apart; None takes it as it is.
    """
    if new is None:
        return cache.with_layer(handle), staged
    if staged is None:
        state = commit_tokens(handle.state, new, handle.call, layer=handle.layer)
        return cache.with_layer(dataclasses.replace(handle, state=state)), None
    attn, index = handle.schema.attn_type, handle.layer if layer is None else layer
    return cache.with_layer(handle), {**staged, attn: put_layer(staged[attn], index, new)}


def head(
    hc_head: HyperConnectionParams | None,
    norm: jax.Array,
    weight: jax.Array,
    streams: jax.Array,
    config: DSV4Config,
) -> jax.Array:
    """[..., S, D] -> f32[..., V]; on a mesh of this device's part of the vocabulary.

    Raises:
      NotImplementedError: the model has no hyper-connections before its head.
    """
    if hc_head is None:
        raise NotImplementedError(
            "hc_head is missing: the streams of a DeepSeek-V4.1 model are collapsed with what its "
            "last sublayer computed, as forward does; nothing else runs such a model yet"
        )
    collapsed = collapse_streams(hc_head, streams, config)
    return head_of_collapsed(norm, weight, collapsed, config)


def head_of_collapsed(
    norm: jax.Array, weight: jax.Array, collapsed: jax.Array, config: DSV4Config
) -> jax.Array:
    """[..., D] -> f32[..., V]; see `head`."""
    collapsed = checkpoint_name(collapsed, "head/collapsed")
    normed = checkpoint_name(rms_norm(collapsed, norm, eps=config.rms_norm_eps), "head/normed")
    return checkpoint_name(linear(normed, weight, dtype=jnp.float32), "logits")
