"""Definition of index scores.

Source: deepseek_v4.md section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def index_scores(queries: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """score[e] = sum_h w[h] relu(q[h] . k[e]) / sqrt(IC * IH), in f32; leading axes broadcast.

    Args:
      queries: f32[..., IH, IC], rotated and rounded as the keys are.
      weights: f32[..., IH], may be negative.
      keys: f32[..., E, IC].

    Returns:
      f32[..., E].
    """
    highest = jax.lax.Precision.HIGHEST
    num_heads, dim = queries.shape[-2:]
    products = jax.nn.relu(jnp.matmul(keys, queries.mT, precision=highest))
    scaled = weights * np.float32((num_heads * dim) ** -0.5)
    return jnp.sum(products * scaled[..., None, :], axis=-1)
