"""What both forms of the model share: embedding, decoder block, head."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.projections import linear
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.hyper_connections import collapse_streams, read_streams, write_streams
from dsv4_jax.model.moe import mixture_of_experts
from dsv4_jax.model.params import DSV4Params, HyperConnectionParams, LayerParams
from pallas_kernels.common.backend import Backend
from pallas_kernels.common.norm_rope import rms_norm


def embed(params: DSV4Params, token_ids: jax.Array, config: DSV4Config) -> jax.Array:
    """i32[...] -> [..., S, D]: the embedding, once per stream."""
    embedded = checkpoint_name(params.embed[token_ids], "embed")
    return jnp.broadcast_to(
        embedded[..., None, :], (*token_ids.shape, config.hc_mult, config.hidden_size)
    )


def block[State](
    params: LayerParams,
    streams: jax.Array,
    token_ids: jax.Array,
    config: DSV4Config,
    attention: Callable[[LayerParams, jax.Array], tuple[State, jax.Array]],
    *,
    backend: Backend | None = None,
) -> tuple[State, jax.Array]:
    """One decoder block.

    Args:
      params: parameters of the layer.
      streams: [..., S, D].
      token_ids: i32[...].
      config: the model.
      attention: the attention sublayer, from the layer and its normed input [..., D] to what it
        changes (a cache, say) and its output [..., D].
      backend: implementation of the hyper-connections; only the reference can be differentiated.

    Returns:
      What attention changed, and the streams [..., S, D].
    """
    streams = checkpoint_name(streams, "in")
    mix = read_streams(
        params.hc_attn, params.attn_norm, streams, config, "attn_hc", backend=backend
    )
    changed, y = attention(params, checkpoint_name(mix.normed, "attn_in"))
    streams = write_streams(mix, streams, y)
    mix = read_streams(params.hc_ffn, params.ffn_norm, streams, config, "ffn_hc", backend=backend)
    x = checkpoint_name(mix.normed, "mlp_in")
    y = mixture_of_experts(params.ffn, x, token_ids, config)
    return changed, checkpoint_name(write_streams(mix, streams, y), "out")


def head(
    hc_head: HyperConnectionParams,
    norm: jax.Array,
    weight: jax.Array,
    streams: jax.Array,
    config: DSV4Config,
) -> jax.Array:
    """[..., S, D] -> f32[..., V]."""
    collapsed = checkpoint_name(collapse_streams(hc_head, streams, config), "head/collapsed")
    normed = checkpoint_name(rms_norm(collapsed, norm, eps=config.rms_norm_eps), "head/normed")
    return checkpoint_name(linear(normed, weight, dtype=jnp.float32), "logits")
