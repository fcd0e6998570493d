"""A call's projected queries and window entries: normed, rotated and, the entries, encoded."""

from __future__ import annotations

import jax

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_floats,
    check_indices,
    check_is_codec,
    check_norm_rope,
    check_rank,
    check_same_length,
    check_shape,
)
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.norm_rope import NormRope
from pallas_kernels.encode_tokens import reference, triton_gpu

_ENCODE = {
    Backend.REFERENCE: reference.encode_tokens,
    Backend.TRITON_GPU: triton_gpu.encode_tokens,
}


def encode_tokens(
    queries: jax.Array | None,
    kv: jax.Array,
    norm_rope: NormRope,
    positions: jax.Array,
    *,
    codec: Codec,
    backend: Backend | None = None,
) -> tuple[jax.Array | None, Planes]:
    """Applies norm and RoPE to a call's queries and window entries, and encodes the latter.

    In plain JAX, but for the dtype that each step rounds to:

        def norm(x):
            return x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm_rope.eps)

        def rope(x):                                                        # of [T, ..., C]
            a, b = jnp.moveaxis(x[..., -R:].reshape(*x.shape[:-1], R // 2, 2), -1, 0)
            angle = jnp.expand_dims(positions, range(1, x.ndim)) * norm_rope.frequencies
            turned = jax.lax.complex(a, b) * jnp.exp(1j * angle)
            turned = jnp.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], R)
            return jnp.concatenate([x[..., :-R], turned], axis=-1)

        rotated = rope(norm(queries))                                       # [T, H, C]
        rows = codec.encode(rope(norm(kv) * norm_rope.weight), R)           # planes [T, ...]

    Args:
      queries: [T, H, C], as projected; each head is normed without a weight, if `norm_rope`
        says so. None leaves them to `sparse_attention`.
      kv: [T, C], as projected, in the same dtype, that of activations.
      norm_rope: norm of the entries, and the RoPE of both; its `eps` is that of the queries' norm
        too.
      positions: i32[T].
      codec: how window entries are stored.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The queries, [T, H, C] in their dtype, or None; and the entries as the ring will keep them,
      planes [T, ...] of the codec. Norm and rotation each round to the dtype of activations.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 1.3, steps 3 to 6, and section 4.
    """
    check_rank(2, kv=kv)
    check_tokens(kv[:, None] if queries is None else queries, kv, norm_rope, positions)
    check_is_codec("codec", codec)
    return resolve("encode_tokens", backend, _ENCODE)(
        *jax_arrays(queries, kv, norm_rope, positions), codec=codec
    )


def check_tokens(
    queries: jax.Array, kv: jax.Array, norm_rope: NormRope, positions: jax.Array
) -> None:
    """A call's projected queries and entries, their norm and their RoPE fit each other."""
    check_rank(3, queries=queries)
    check_rank(1, positions=positions)
    check_floats(queries=queries, kv=kv)
    num_tokens = check_same_length("T", queries=queries, kv=kv, positions=positions)
    check_indices(positions=positions)
    dim = queries.shape[2]
    check_shape("kv", kv, (num_tokens, dim), "T, C")
    if kv.dtype != queries.dtype:
        raise ValueError(f"queries and kv must agree, got {queries.dtype} and {kv.dtype}")
    check_norm_rope(norm_rope, dim)
