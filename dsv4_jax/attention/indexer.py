"""The query side of the indexer, which selects the entries of a CSA layer.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.params import IndexerParams
from dsv4_jax.config import DSV4Config
from dsv4_jax.linear import linear


def project_index_queries(
    params: IndexerParams, latent: jax.Array, config: DSV4Config
) -> jax.Array:
    """Index queries before RoPE, [..., ql] -> [..., IH, IC]; no norm follows."""
    return split_index_heads(linear(latent, params.wq_b), config)


def split_index_heads(heads: jax.Array, config: DSV4Config) -> jax.Array:
    """[..., IH * IC] -> [..., IH, IC]."""
    return heads.reshape(*heads.shape[:-1], config.indexer_num_heads, config.indexer_head_dim)


def index_weights(params: IndexerParams, x: jax.Array) -> jax.Array:
    """The weight of each index head, [..., D] -> f32[..., IH]; `index_scores` scales it."""
    return checkpoint_name(linear(x, params.weights_proj, dtype=jnp.float32), "idx/weights")
