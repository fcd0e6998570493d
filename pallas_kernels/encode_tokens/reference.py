"""Definition of `encode_tokens`."""

from __future__ import annotations

import jax

from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.norm_rope import NormRope, rms_norm_by_pairs, rotate


def encode_tokens(
    queries: jax.Array | None,
    kv: jax.Array,
    norm_rope: NormRope,
    positions: jax.Array,
    *,
    codec: Codec,
) -> tuple[jax.Array | None, Planes]:
    """Norm, then rotation, each rounded to the dtype of activations; then the codec.

    The norm adds neighbours, so that an entry's bits depend on its token alone.
    """
    frequencies, eps = norm_rope.frequencies, norm_rope.eps
    # [T, C], each step rounded to the dtype of activations.
    entries = rotate(rms_norm_by_pairs(kv, norm_rope.weight, eps=eps), positions, frequencies)
    planes = codec.encode(entries, 2 * frequencies.shape[0])  # planes [T, ...]
    if queries is None:
        return None, planes
    # [T, H, C], a norm without a weight.
    heads = rms_norm_by_pairs(queries, None, eps=eps) if norm_rope.norms_queries else queries
    return rotate(heads, positions[:, None], frequencies), planes
