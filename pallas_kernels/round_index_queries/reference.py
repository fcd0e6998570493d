"""Definition of `round_index_queries`."""

from __future__ import annotations

import jax

from pallas_kernels.common.codecs import Codec, round_through
from pallas_kernels.common.norm_rope import rotate


def round_index_queries(
    queries: jax.Array, frequencies: jax.Array, positions: jax.Array, *, codec: Codec
) -> jax.Array:
    """Rotation, rounded to the dtype of activations; then to codes of the index and back."""
    rotated = rotate(queries, positions[..., None], frequencies)  # [T, IH, IC]
    return round_through(codec, rotated).astype(queries.dtype)
