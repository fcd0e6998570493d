"""From a token's streams to what its sublayer reads and how it will write."""

from __future__ import annotations

import jax

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_floats,
    check_integer,
    check_number,
    check_rank,
    check_same_length,
    check_shape,
)
from pallas_kernels.hyper_connections import reference, triton_gpu
from pallas_kernels.hyper_connections.reference import Arguments, Reading

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.hyper_connections,
    Backend.TRITON_GPU: triton_gpu.hyper_connections,
}


def hyper_connections(
    products: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    streams: jax.Array,
    norm: jax.Array,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    weights: jax.Array | None = None,
    backend: Backend | None = None,
) -> Reading:
    """Reads the residual streams of a hyper-connection, and norms what the sublayer reads.

    The matrix product comes before it: `products` are its parts.

    In plain JAX:

        def rms(x):
            return jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm_eps)

        mix = jnp.sum(products, axis=1) / rms(streams.reshape(T, S * D))    # f32[T, (2 + S) * S]
        mix = mix * jnp.repeat(scale, jnp.array([S, S, S * S])) + base
        pre, post, comb = jnp.split(mix, [S, 2 * S], axis=1)
        pre, post = jax.nn.sigmoid(pre) + eps, 2 * jax.nn.sigmoid(post)     # f32[T, S] each
        comb = jax.nn.softmax(comb.reshape(T, S, S)) + eps
        for i in range(iters):
            if i > 0:
                comb = comb / (jnp.sum(comb, axis=2, keepdims=True) + eps)
            comb = comb / (jnp.sum(comb, axis=1, keepdims=True) + eps)
        used = pre if weights is None else weights
        collapsed = jnp.einsum("ts,tsd->td", used, streams)                 # [T, D]
        normed = collapsed / rms(collapsed) * norm                          # [T, D]

    Args:
      products: f32[T, P, (2 + S) * S], the matrix `hc_fn` times the streams as one vector, in P
        parts that are added here: logits of pre, of post, and of comb, row by row, before they are
        divided by that vector's RMS.
      scale: f32[3], scale of each of the three kinds of logits.
      base: f32[(2 + S) * S], added to the scaled logits.
      streams: [T, S, D].
      norm: [D], norm weight of the sublayer, in the dtype of `streams`.
      iters: Sinkhorn iterations of comb.
      eps: floor of pre and of the Sinkhorn sums.
      norm_eps: floor inside the RMS of the streams and of the norm.
      weights: f32[T, S], weights of the streams in what the sublayer reads, as of shifted
        hyper-connections, whose `pre` is for the next one; None is `pre`.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      `Reading`. Only the reference can be differentiated.

    Raises:
      ValueError: a shape is wrong, or `iters` is below 1.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md section 1.2, deepseek_v41.md section 5.
    """
    check_rank(3, products=products, streams=streams)
    num, dim = streams.shape[1:]
    count = check_same_length("T", products=products, streams=streams)
    parts = products.shape[1]
    check_shape("products", products, (count, parts, (2 + num) * num), "T, P, (2 + S) * S")
    check_shape("base", base, ((2 + num) * num,), "(2 + S) * S")
    check_shape("scale", scale, (3,), "3")
    check_shape("norm", norm, (dim,), "D")
    check_floats(products=products, base=base, scale=scale, norm=norm, streams=streams)
    if weights is not None:
        check_shape("weights", weights, (count, num), "T, S")
        check_floats(weights=weights)
    iters = check_integer("iters", iters, 1)
    eps, norm_eps = check_number("eps", eps, 0), check_number("norm_eps", norm_eps, 0)
    # XLA takes 80 launches, most of them in a loop that the host drives.
    implementation = resolve(
        "hyper_connections", backend, _IMPLEMENTATIONS, arguments={"streams": streams}
    )
    arguments = Arguments(products, scale, base, streams, norm, iters, eps, norm_eps, weights)
    return implementation(jax_arrays(arguments))
