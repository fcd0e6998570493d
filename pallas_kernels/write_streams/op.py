"""Writes a sublayer's output to the residual streams, and multiplies them for the next one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_floats,
    check_rank,
    check_same_length,
    check_shape,
)
from pallas_kernels.common.pending import Output, PickedSums, SplitSums
from pallas_kernels.write_streams import reference, triton_gpu, triton_many
from pallas_kernels.write_streams.reference import Arguments


def _on_triton(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    return (triton_many if _is_many(arguments.streams) else triton_gpu).write_streams(arguments)


_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.write_streams,
    Backend.TRITON_GPU: _on_triton,
}


def write_streams(
    streams: jax.Array,
    output: Output,
    post: jax.Array,
    comb: jax.Array,
    fn: jax.Array,
    *,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Step 9 of a hyper-connection, and the matrix product that begins the next.

    In plain JAX, with an output and products that are not in parts:

        written = post[..., None] * output[:, None] + jnp.einsum("tjk,tjd->tkd", comb, streams)
        products = written.reshape(T, S * D) @ fn.T                         # f32[T, R]

    Args:
      streams: [T, S, D], what the sublayer read.
      output: [T, D], what it gave, in the dtype of `streams`; or in parts, as a product left it, or
        as rows that a mixture of experts left.
      post: f32[T, S], weight of the output in each stream.
      comb: f32[T, S, S], from stream to stream; summed over its first index.
      fn: f32[R, S * D], `hc_fn` of the next hyper-connection.
      backend: implementation to use; None picks the fastest one that runs here. Of more than 16
        tokens in f32 that is XLA's on a GPU too.

    Returns:
      [T, S, D], the streams after it, summed in f32 and rounded once; and f32[T, P, R], products
      with `fn` in P parts, for `hyper_connections`. Only the reference can be differentiated.

    Raises:
      ValueError: a shape is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 1.2.
    """
    check_rank(3, streams=streams, comb=comb)
    count = check_same_length("T", streams=streams, post=post, comb=comb)
    num, dim = streams.shape[1:]
    if not isinstance(output, SplitSums | PickedSums):
        check_floats(output=output)
    if output.shape != (count, dim):
        raise ValueError(f"output must be [T, D] = {[count, dim]}, got {output.shape=}")
    check_shape("post", post, (count, num), "T, S")
    check_shape("comb", comb, (count, num, num), "T, S, S")
    check_rank(2, fn=fn)
    check_shape("fn", fn, (fn.shape[0], num * dim), "R, S * D")
    check_floats(streams=streams, post=post, comb=comb, fn=fn)
    has_kernel = count <= triton_gpu.MAX_TOKENS or _is_many(streams)
    best = Backend.TRITON_GPU if has_kernel else Backend.REFERENCE
    implementation = resolve(
        "write_streams", backend, _IMPLEMENTATIONS, preferred=best, arguments={"streams": streams}
    )
    return implementation(jax_arrays(Arguments(streams, output, post, comb, fn)))


def _is_many(streams: jax.Array) -> bool:
    return streams.shape[0] > triton_gpu.MAX_TOKENS and streams.dtype == jnp.bfloat16
