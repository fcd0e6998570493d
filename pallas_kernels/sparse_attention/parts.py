"""One attention whose keys lie on several devices: each attends to its own, and results are joined.

    part of a device    m[h] = max l[h, i],  t[h] = sum exp(l[h, i] - m[h]),
                        s[h] = sum exp(l[h, i] - m[h]) k_i            over its own keys i
    all parts           o[h] = sum s[h] exp(m[h] - M) / (sum t[h] exp(m[h] - M) + exp(sink[h] - M))

with M the largest of all m[h] and of the sink, which is counted here, once. The window is counted
by one device: where positions are -1, a token has none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import (
    check_float_dtype,
    check_floats,
    check_frequencies,
    check_indices,
    check_instance,
    check_rank,
    check_shape,
)
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.sparse_attention import combine_triton, op, reference
from pallas_kernels.sparse_attention.reference import Arguments, AttentionPart, JoinArguments


def _run_kernel(arguments: Arguments) -> AttentionPart:
    return op.choose_kernel().sparse_attention(arguments, in_parts=True)


_ATTEND = {Backend.REFERENCE: reference.attend_in_part, Backend.MOSAIC_GPU: _run_kernel}
_JOIN = {Backend.REFERENCE: reference.join_parts, Backend.TRITON_GPU: combine_triton.combine}


def attend_in_part(
    queries: jax.Array,
    ring: LayerPlanes,
    rows: Planes,
    pool: LayerPlanes,
    selected: jax.Array,
    call: CallIndices,
    *,
    scale: float,
    apart: bool = False,
    backend: Backend | None = None,
) -> AttentionPart:
    """Attends to some of the keys of each token, for `join_parts`.

    In plain JAX, with keys and logits as of `sparse_attention`:

        largest = jnp.max(logits, axis=-1)                                  # f32[T, H]
        weights = jnp.exp(logits - largest[..., None])                      # f32[T, H, S]
        sums = jnp.einsum("thk,tkc->thc", weights, keys)                    # f32[T, H, C]
        statistics = jnp.stack([largest / jnp.log(2.0), jnp.sum(weights, axis=-1)], axis=1)

    Args:
      queries: [T, H, C], normed and rotated.
      ring: as in `sparse_attention`.
      rows: as there.
      pool: planes [L, NB, EB, ...], the blocks that are here.
      selected: i32[T, K], entries of `pool` that each query attends to, -1 for none.
      call: as there, with the table of the blocks that are here. A token whose position is -1 has
        no window.
      scale: factor of the logits.
      apart: as in `sparse_attention`.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The part of those keys.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not at these sizes.
    """
    check_rank(3, queries=queries)
    no_sink = jnp.zeros(queries.shape[1], jnp.float32)  # `join_parts` has it
    arguments = Arguments(
        queries=queries,
        sink=no_sink,
        ring=ring,
        rows=rows,
        pool=pool,
        selected=selected,
        call=call,
        scale=scale,
        apart=apart,
    )
    return op.run("attend_in_part", backend, _ATTEND, arguments)


def join_parts(
    parts: AttentionPart,
    sink: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array | None = None,
    *,
    dtype: DTypeLike,
    backend: Backend | None = None,
) -> jax.Array:
    """What attention to all keys gives, from parts that have each key once.

    In plain JAX, without the inverse RoPE:

        largest, total = parts.statistics[:, :, 0], parts.statistics[:, :, 1]   # f32[n, T, H]
        share = jnp.exp2(largest)                                           # f32[n, T, H]
        whole = jnp.sum(share * total, axis=0) + jnp.exp(sink)              # f32[T, H]
        joined = jnp.sum(share[..., None] * parts.sums, axis=0) / whole[..., None]

    Args:
      parts: of n devices, stacked: sums f32[n, T, H, C], statistics f32[n, T, 2, H].
      sink: f32[H], a logit that adds to the denominator only.
      positions: i32[T], for inverse RoPE.
      frequencies: f32[R / 2], radians per position, for inverse RoPE of the output; None leaves it
        out.
      dtype: dtype of the output.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      [T, H, C]; zeros where there is neither a key nor a sink.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.
    """
    check_instance("parts", parts, AttentionPart)
    sums, statistics = parts
    check_rank(4, sums=sums, statistics=statistics)
    check_floats(sums=sums, statistics=statistics, sink=sink)
    check_rank(1, positions=positions)
    check_indices(positions=positions)
    num_parts, num_tokens, num_heads, dim = sums.shape
    if statistics.shape != (num_parts, num_tokens, 2, num_heads):
        raise ValueError(
            "statistics must be f32[n, T, 2, H] of sums f32[n, T, H, C], got "
            f"{statistics.shape=} and {sums.shape=}"
        )
    if sink.shape != (num_heads,):
        raise ValueError(f"sums and sink must agree on H, got {sums.shape=} and {sink.shape=}")
    check_shape("positions", positions, (num_tokens,), "T")
    if frequencies is not None:
        check_frequencies("frequencies", frequencies, dim)
    dtype = check_float_dtype("dtype", dtype)
    implementation = resolve("join_parts", backend, _JOIN, arguments={"sums": sums})
    return implementation(jax_arrays(JoinArguments(parts, sink, positions, frequencies, dtype)))
