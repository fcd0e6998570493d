"""The projections that feed a compressor's tail.

Source: deepseek_v4.md section 2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.params import CompressorParams
from dsv4_jax.attention.projections import linear
from dsv4_jax.cache.call_rows import Projections


def project(
    params: CompressorParams, x: jax.Array, positions: jax.Array, name: str = "comp"
) -> Projections:
    """A token's value and score for the window it lies in, and on CSA layers for the next one.

    Args:
      params: of the compressor.
      x: [..., D].
      positions: i32[...]; row `position % M` of the position bias is added to the score.
      name: what a capture of intermediates calls this compressor.

    Returns:
      f32[..., width] each: on CSA layers the b-stream, then the a-stream.
    """
    values = checkpoint_name(linear(x, params.wkv, dtype=jnp.float32), f"{name}/kv")
    scores = checkpoint_name(linear(x, params.wgate, dtype=jnp.float32), f"{name}/gate")
    return Projections(values=values, scores=scores + params.ape[positions % params.ape.shape[0]])
