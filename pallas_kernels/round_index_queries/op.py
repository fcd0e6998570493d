"""A call's projected index queries: rotated, and rounded as the index keys are."""

from __future__ import annotations

import jax

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_floats,
    check_frequencies,
    check_indices,
    check_is_codec,
    check_rank,
    check_same_length,
)
from pallas_kernels.common.codecs import Codec
from pallas_kernels.round_index_queries import reference, triton_gpu

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.round_index_queries,
    Backend.TRITON_GPU: triton_gpu.round_index_queries,
}


def round_index_queries(
    queries: jax.Array,
    frequencies: jax.Array,
    positions: jax.Array,
    *,
    codec: Codec,
    backend: Backend | None = None,
) -> jax.Array:
    """Rotates a call's index queries and rounds them as index keys are rounded.

    In plain JAX, with `rope` as in `encode_tokens`:

        rotated = rope(queries).astype(queries.dtype)                       # [T, IH, IC]
        rounded = codec.decode(codec.encode(rotated, 0), IC)                # f32[T, IH, IC]

    Args:
      queries: [T, IH, IC], as projected, in the dtype of activations.
      frequencies: f32[R / 2], radians per position; the last R dims rotate.
      positions: i32[T].
      codec: how index keys are stored.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      [T, IH, IC] in the dtype of `queries`, as the codec would give them back, which BF16 holds
      exactly. The rotation rounds to the dtype of activations before the codec, which may rotate by
      a Hadamard matrix, sees them.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 3, steps 1 to 3, and section 4.3.
    """
    check_index_queries("queries", queries, frequencies, codec)
    check_rank(1, positions=positions)
    check_same_length("T", queries=queries, positions=positions)
    check_indices(positions=positions)
    return resolve("round_index_queries", backend, _IMPLEMENTATIONS)(
        *jax_arrays(queries, frequencies, positions), codec=codec
    )


def check_index_queries(
    name: str, queries: jax.Array, frequencies: jax.Array, codec: Codec
) -> None:
    """Index queries [T, IH, IC] that the frequencies rotate and the codec can round."""
    check_rank(3, **{name: queries})
    check_floats(**{name: queries})
    check_is_codec("codec", codec)
    dim = queries.shape[2]
    check_frequencies("frequencies", frequencies, dim)
    if codec.rotated and dim & (dim - 1):
        raise ValueError(
            f"{name} must have a power of two of dims for a codec that rotates them by a Hadamard "
            f"matrix, got {name}.shape={queries.shape}"
        )
