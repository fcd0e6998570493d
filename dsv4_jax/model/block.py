"""One decoder block: hyper-connection, norm and sublayer, twice.

`run_block` runs it on a cache; `block` takes any attention, for whole sequences and for checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.csa import csa_attention
from dsv4_jax.attention.hca import hca_attention
from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import Output
from dsv4_jax.attention.shared import make_shared_entries, shared_attention
from dsv4_jax.attention.swa import swa_attention
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.new_tokens import NewTokens, Projections
from dsv4_jax.collectives import join_rows
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.hyper_connections import Residual, read_streams
from dsv4_jax.model.layer_params import HyperConnectionParams, LayerParams, MoEParams
from dsv4_jax.model.moe import mixture_of_experts
from dsv4_jax.peers import PeerBuffers, using
from pallas_kernels.common.backend import Backend

_CACHED_ATTENTION = {
    AttentionType.SWA: swa_attention,
    AttentionType.CSA: csa_attention,
    AttentionType.HCA: hca_attention,
}


def run_block(
    params: LayerParams,
    residual: Residual,
    token_ids: jax.Array,
    handle: LayerCacheHandle,
    config: DSV4Config,
    peers: PeerBuffers | None = None,
) -> tuple[LayerCacheHandle, NewTokens | None, Residual]:
    """One decoder block on the cache.

    Its sublayers are traced and lowered once for all layers that have them alike: attention for
    each type, the experts for each router. XLA inlines them into the step.

    Args:
      params: parameters of the layer.
      residual: streams [T, S, D], and what is still to be written to them; on a mesh of those rows
        that this device has (`rows_of_a_device`).
      token_ids: i32[T].
      handle: the layer's cache in this call.
      config: the model.
      peers: what the layer's collectives go through on a mesh.

    Returns:
      The handle after attention, what is still to be committed, and the residual.
    """
    attention = params.hc_attn, params.attn_norm, params.attn
    (handle, new), residual = _run_attention(
        *attention, residual, handle, peers, num_rows=token_ids.shape[0], config=config
    )
    experts = params.hc_ffn, params.ffn_norm, params.ffn
    residual = _run_experts(
        *experts, residual, token_ids, handle.call.segment_ids, peers, config=config
    )
    return handle, new, residual


def make_block_entries(
    params: LayerParams,
    residual: Residual,
    handle: LayerCacheHandle,
    config: DSV4Config,
    *,
    num_rows: int,
) -> tuple[LayerCacheHandle, Projections | None]:
    """The entries that a block makes of a call's tokens, without the rest of it.

    Args:
      params: parameters of a layer that makes entries which others read too.
      residual: as in `run_block`.
      handle: the layer's cache in this call.
      config: the model.
      num_rows: T.

    Returns:
      The handle, and what tokens of open windows leave, still to be committed; None where none do.
    """
    mix = read_streams(params.hc_attn, params.attn_norm, residual, config, "entries_hc")
    return make_shared_entries(params.attn, join_rows(mix.normed, num_rows), handle, config)


@functools.partial(jax.jit, static_argnames=("num_rows", "config"))
def _run_attention(
    hc: HyperConnectionParams,
    norm: jax.Array,
    params: AttentionParams,
    residual: Residual,
    handle: LayerCacheHandle,
    peers: PeerBuffers | None,
    *,
    num_rows: int,
    config: DSV4Config,
) -> tuple[tuple[LayerCacheHandle, NewTokens | None], Residual]:
    def attention(
        params: AttentionParams, x: jax.Array
    ) -> tuple[tuple[LayerCacheHandle, NewTokens | None], Output]:
        attend = _CACHED_ATTENTION[handle.schema.attn_type]
        if handle.schema.shares and handle.schema.ratio:
            attend = shared_attention
        new_handle, new, y = attend(params, x, handle, config)
        # Rings and states are read before and written after: unordered, XLA would copy them whole.
        return jax.lax.optimization_barrier(((new_handle, new), y))

    with using(peers):
        return _attention_sublayer(hc, norm, params, residual, num_rows, config, attention)


@functools.partial(jax.jit, static_argnames="config")
def _run_experts(
    hc: HyperConnectionParams,
    norm: jax.Array,
    params: MoEParams,
    residual: Residual,
    token_ids: jax.Array,
    segment_ids: jax.Array,
    peers: PeerBuffers | None,
    *,
    config: DSV4Config,
) -> Residual:
    with using(peers):
        return _experts_sublayer(
            hc, norm, params, residual, token_ids, config, segment_ids=segment_ids
        )


def block[State](
    params: LayerParams,
    residual: Residual,
    token_ids: jax.Array,
    config: DSV4Config,
    attention: Callable[[AttentionParams, jax.Array], tuple[State, Output]],
    *,
    segment_ids: jax.Array | None = None,
    backend: Backend | None = None,
) -> tuple[State, Residual]:
    """One decoder block.

    Args:
      params: parameters of the layer.
      residual: streams [..., S, D], and what is still to be written to them; on a mesh as of
        `run_block`.
      token_ids: i32[...].
      config: the model.
      attention: the attention sublayer, from its parameters and normed input [..., D] to what it
        changes (a cache, say) and its output [..., D].
      segment_ids: i32[T] of rows [T, S, D], -1 of padding, which picks no expert; None has none.
      backend: implementation of the hyper-connections and of routing; only the reference can be
        differentiated.

    Returns:
      What attention changed, and the residual.
    """
    checkpoint_name(residual.written(), "in")
    changed, residual = _attention_sublayer(
        params.hc_attn,
        params.attn_norm,
        params.attn,
        residual,
        token_ids.shape[0],
        config,
        attention,
        backend=backend,
    )
    residual = _experts_sublayer(
        params.hc_ffn,
        params.ffn_norm,
        params.ffn,
        residual,
        token_ids,
        config,
        segment_ids=segment_ids,
        backend=backend,
    )
    checkpoint_name(residual.written(), "out")
    return changed, residual


def _attention_sublayer[State](
    hc: HyperConnectionParams,
    norm: jax.Array,
    params: AttentionParams,
    residual: Residual,
    num_rows: int,
    config: DSV4Config,
    attention: Callable[[AttentionParams, jax.Array], tuple[State, Output]],
    *,
    backend: Backend | None = None,
) -> tuple[State, Residual]:
    mix = read_streams(hc, norm, residual, config, "attn_hc", backend=backend)
    x = join_rows(checkpoint_name(mix.normed, "attn_in"), num_rows)
    changed, y = attention(params, x)
    return changed, mix.write(y)


def _experts_sublayer(
    hc: HyperConnectionParams,
    norm: jax.Array,
    params: MoEParams,
    residual: Residual,
    token_ids: jax.Array,
    config: DSV4Config,
    *,
    segment_ids: jax.Array | None = None,
    backend: Backend | None = None,
) -> Residual:
    mix = read_streams(hc, norm, residual, config, "ffn_hc", backend=backend)
    x = join_rows(checkpoint_name(mix.normed, "mlp_in"), token_ids.shape[0])
    y = mixture_of_experts(params, x, token_ids, config, segment_ids=segment_ids, backend=backend)
    return mix.write(y)
