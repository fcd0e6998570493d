"""From token ids to logits: embed, layers, head; over a whole history, and on a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.csa import csa_attention
from dsv4_jax.attention.hca import hca_attention
from dsv4_jax.attention.history import Selection, Selector, history_attention, select_by_score
from dsv4_jax.attention.projections import linear
from dsv4_jax.attention.swa import swa_attention
from dsv4_jax.cache.call_rows import CallRows
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.step_input import CallIndices
from dsv4_jax.config import DSV4Config
from dsv4_jax.layer_schedule import (
    AttentionType,
    LayerSpec,
    Segment,
    layer_schedule,
    split_into_segments,
)
from dsv4_jax.model.layers import collapse_streams, read_streams, write_streams
from dsv4_jax.model.moe import mixture_of_experts
from dsv4_jax.model.params import DSV4Params, LayerParams, StreamMixParams, layer_of
from pallas_kernels.backend import Backend
from pallas_kernels.formats import get_cache_format
from pallas_kernels.rotary import rms_norm

_CACHED_ATTENTION = {
    AttentionType.SWA: swa_attention,
    AttentionType.CSA: csa_attention,
    AttentionType.HCA: hca_attention,
}


def forward(
    params: DSV4Params,
    token_ids: jax.Array,
    *,
    config: DSV4Config,
    cache_format: str = "f32",
    selector: Selector = select_by_score,
) -> jax.Array:
    """Logits of a whole history, without a cache.

    Args:
      params: of the model.
      token_ids: i32[B, T].
      config: the model.
      cache_format: rounds what a cache of that format would round.
      selector: picks the entries that CSA layers attend to.

    Returns:
      f32[B, T, V].

    Raises:
      ValueError: `token_ids` has another rank or dtype, or there is no such format.

    Source: deepseek_v4.md section 1.1.
    """
    streams = forward_streams(
        params, token_ids, config=config, cache_format=cache_format, selector=selector
    )
    return head(params.hc_head, params.norm, params.head, streams, config)


def forward_streams(
    params: DSV4Params,
    token_ids: jax.Array,
    *,
    config: DSV4Config,
    cache_format: str = "f32",
    selector: Selector = select_by_score,
) -> jax.Array:
    """The residual streams [B, T, S, D] before the head; arguments as in `forward`."""
    if token_ids.ndim != 2 or not jnp.issubdtype(token_ids.dtype, jnp.integer):
        raise ValueError(
            f"token_ids must be i32[B, T], got {token_ids.dtype}{list(token_ids.shape)}; "
            "add a batch axis"
        )
    fmt = get_cache_format(cache_format)
    streams = embed(params, token_ids, config)
    masks: list[jax.Array] = []  # of the last CSA layer that selected
    for spec in layer_schedule(config):

        def select(selection: Selection, spec: LayerSpec = spec) -> jax.Array:
            if spec.index_source is None:
                masks[:] = [selector(selection)]
            return masks[0]

        def attention(
            layer: LayerParams,
            x: jax.Array,
            attn: AttentionType = spec.attn,
            select: Selector = select,
        ) -> jax.Array:
            return history_attention(layer.attn, x, attn, config, fmt, select)

        streams = block(
            params.layer(spec), streams, token_ids, config, attention, backend=Backend.REFERENCE
        )
    return streams


def embed(params: DSV4Params, token_ids: jax.Array, config: DSV4Config) -> jax.Array:
    """i32[...] -> [..., S, D]: the embedding, once per stream."""
    embedded = checkpoint_name(params.embed[token_ids], "embed")
    return jnp.broadcast_to(
        embedded[..., None, :], (*token_ids.shape, config.hc_mult, config.hidden_size)
    )


def block(
    params: LayerParams,
    streams: jax.Array,
    token_ids: jax.Array,
    config: DSV4Config,
    attention: Callable[[LayerParams, jax.Array], jax.Array],
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """One decoder block: [..., S, D] -> [..., S, D].

    Args:
      params: of the layer.
      streams: [..., S, D].
      token_ids: i32[...].
      config: the model.
      attention: the attention sublayer, from its normed input [..., D] to its output.
      backend: of stream mixing; only the reference can be differentiated.
    """
    streams = checkpoint_name(streams, "in")
    mix = read_streams(
        params.hc_attn, params.attn_norm, streams, config, "attn_hc", backend=backend
    )
    y = attention(params, checkpoint_name(mix.normed, "attn_in"))
    streams = write_streams(mix, streams, y)
    mix = read_streams(params.hc_ffn, params.ffn_norm, streams, config, "ffn_hc", backend=backend)
    x = checkpoint_name(mix.normed, "mlp_in")
    y = mixture_of_experts(params.ffn, x, token_ids, config)
    return checkpoint_name(write_streams(mix, streams, y), "out")


def head(
    hc_head: StreamMixParams,
    norm: jax.Array,
    weight: jax.Array,
    streams: jax.Array,
    config: DSV4Config,
) -> jax.Array:
    """[..., S, D] -> f32[..., V]."""
    collapsed = checkpoint_name(collapse_streams(hc_head, streams, config), "head/collapsed")
    normed = checkpoint_name(rms_norm(collapsed, norm, eps=config.rms_norm_eps), "head/normed")
    return checkpoint_name(linear(normed, weight, dtype=jnp.float32), "logits")


def run_layers(
    params: DSV4Params,
    cache: ModelCache,
    token_ids: jax.Array,
    call: CallIndices,
    staged: dict[str, CallRows] | None,
    config: DSV4Config,
) -> tuple[ModelCache, dict[str, CallRows] | None, jax.Array]:
    """The trunk on a cache: every layer appends, flushes and attends.

    Layers of a repeating pattern are scanned, with the cache in the carry; layers that have arrays
    of their own (`unstack_layers`) are unrolled.

    Args:
      params: of the model.
      cache: before the call.
      token_ids: i32[T].
      call: the call's indices.
      staged: None commits the call's tokens layer by layer. Else it receives them, by attention
        type, stacked [L, ...], and rings and states stay as they were.
      config: the model.

    Returns:
      The cache, `staged`, and the streams [T, S, D] before the head. Lengths are not advanced.
    """
    selected = None
    if config.index_reuse:
        selected = jnp.zeros((token_ids.shape[0], config.indexer_top_k), jnp.int32)
    carry = (cache, staged, embed(params, token_ids, config), selected)
    for segment in split_into_segments(layer_schedule(config)):
        carry = _run_segment(segment, params, token_ids, call, config, carry)
    return carry[:3]


Carry = tuple[ModelCache, dict[str, CallRows] | None, jax.Array, jax.Array | None]
"""Cache, staged rows, streams and, with `index_reuse`, what the last CSA layer selected."""


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
            cache, staged, streams, selected = carry
            in_place = staged is None and call.max_row_tokens == 1
            handle = cache.layer(spec.attn, family_idx, call, in_place=in_place)
            if spec.index_source is not None:
                handle = dataclasses.replace(handle, selected=selected)
            with jax.named_scope(spec.kind):
                handle, streams = jit_run_block(layer, streams, token_ids, handle, config)
            if handle.selected is not None:
                selected = handle.selected
            carry = (*keep(cache, staged, handle), streams, selected)
        return carry, None

    if segment.repeats == 1 or not stacked:
        for copy in range(segment.repeats):
            carry = run_pattern(carry, copy)[0]
        return carry
    return jax.lax.scan(run_pattern, carry, jnp.arange(segment.repeats))[0]


def run_block(
    params: LayerParams,
    streams: jax.Array,
    token_ids: jax.Array,
    handle: LayerCacheHandle,
    config: DSV4Config,
) -> tuple[LayerCacheHandle, jax.Array]:
    """One decoder block on the cache: the handle after attention, and [T, S, D]."""
    after: list[LayerCacheHandle] = []

    def attention(layer: LayerParams, x: jax.Array) -> jax.Array:
        new_handle, y = _CACHED_ATTENTION[handle.schema.attn_type](layer.attn, x, handle, config)
        # Rings and states are read before and written after: unordered, XLA would copy them whole.
        new_handle, y = jax.lax.optimization_barrier((new_handle, y))
        after.append(new_handle)
        return y

    streams = block(params, streams, token_ids, config, attention)
    return after[0], streams


jit_run_block = jax.jit(run_block, static_argnames="config")
"""`run_block`, traced and lowered once for all layers of a kind; XLA inlines it into the step."""


def keep(
    cache: ModelCache, staged: dict[str, CallRows] | None, handle: LayerCacheHandle
) -> tuple[ModelCache, dict[str, CallRows] | None]:
    """Commits a layer's tokens, or stages them for a later commit."""
    if staged is None:
        return cache.with_layer(handle.commit()), None
    attn = handle.schema.attn_type
    family = jax.tree.map(
        lambda stack, rows: stack.at[handle.layer].set(rows), staged[attn], handle.rows
    )
    handle = dataclasses.replace(handle, rows=None)
    return cache.with_layer(handle), {**staged, attn: family}
