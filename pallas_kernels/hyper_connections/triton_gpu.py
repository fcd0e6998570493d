"""Triton kernel of `hyper_connections`: a token per CTA, its Sinkhorn in registers.

A CTA loads the streams of its token once, sums their squares and weighs them, and stores the
collapsed and the normed row. The Sinkhorn iterations are some forty small sums of one 4 x 4 tile.

Bytes: the streams in, once; the collapsed and the normed row out. The launch and the chain of
divisions bound it. It compiles for Blackwell and has not run there. Measurements and roads not
taken: docs/kernels/hyper_connections.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton
from pallas_kernels.hyper_connections.arguments import Arguments
from pallas_kernels.hyper_connections.reference import Reading

Ref = Any
_NUM_WARPS = 8
_LEAST = -1e30
"""Below any logit, and finite."""


def hyper_connections(arguments: Arguments) -> Reading:
    """See `op.hyper_connections`."""
    products, scale, base, streams, norm, iters, eps, norm_eps = arguments
    count, num, dim = streams.shape
    width = 1 << (dim - 1).bit_length()
    side = 1 << (num - 1).bit_length()
    dtype = streams.dtype

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        products, scale, base, streams, norm = inputs
        collapsed_ref, normed_ref, post_ref, comb_ref = stored
        token = pl.program_id(0)

        rows, squares = [], jnp.float32(0)
        for j in range(num):
            row = triton.load_row(streams, (token, j), start=0, count=dim, width=width)
            rows.append(row)
            squares += jnp.sum(jnp.square(row.astype(jnp.float32)))
        inverse_rms = jax.lax.rsqrt(squares / (num * dim) + norm_eps)

        def logits(place: jax.Array, part: int, live: jax.Array) -> jax.Array:
            """Scaled logits at these places of the token's, zeros where not live."""
            mix = jnp.zeros(place.shape, jnp.float32)
            for number in range(products.shape[1]):
                where = (token, jnp.int32(number), place)
                mix = mix + triton.load_where(products, where, live)
            return mix * inverse_rms * scale[part] + triton.load_where(base, (place,), live)

        lane = jnp.arange(side, dtype=jnp.int32)
        inside = lane < num
        pre = jax.nn.sigmoid(logits(lane, 0, inside)) + eps
        collapsed = jnp.zeros(width, jnp.float32)
        for j, row in enumerate(rows):
            weight = jnp.sum(jnp.where(lane == j, pre, 0.0))
            collapsed = collapsed + row.astype(jnp.float32) * weight
        collapsed = _round_in_f32(collapsed, dtype)
        mean_square = jnp.sum(collapsed * collapsed) / dim
        weight = triton.load_row(norm, (), start=0, count=dim, width=width)
        normed = collapsed * jax.lax.rsqrt(mean_square + norm_eps) * weight.astype(jnp.float32)
        for ref, row in ((collapsed_ref, collapsed), (normed_ref, _round_in_f32(normed, dtype))):
            triton.store_row(ref, (token,), row.astype(dtype), first=0, count=dim)
        post = 2 * jax.nn.sigmoid(logits(num + lane, 1, inside))
        triton.store_where(post_ref, (token, lane), post, inside)
        row, column = lane[:, None], lane[None]
        square = (row < num) & (column < num)
        comb = logits(2 * num + row * num + column, 2, square)
        comb = _sinkhorn(comb, square, iters=iters, eps=eps)
        triton.store_where(comb_ref, (token, row * num + column), comb, square)

    collapsed, normed, post, comb = triton.launch(
        kernel,
        grid=(count,),
        inputs=[products, scale, base, streams, norm],
        outputs=[
            jax.ShapeDtypeStruct((count, dim), dtype),
            jax.ShapeDtypeStruct((count, dim), dtype),
            jax.ShapeDtypeStruct((count, num), jnp.float32),
            jax.ShapeDtypeStruct((count, num * num), jnp.float32),
        ],
        num_warps=_NUM_WARPS,
        name="hyper_connections",
    )
    return Reading(collapsed, normed, post, comb.reshape(count, num, num))


def _sinkhorn(logits: jax.Array, live: jax.Array, *, iters: int, eps: float) -> jax.Array:
    """`reference.sinkhorn` of one tile [S, S]; what is not live stays 0 and adds nothing."""

    def normalise(p: jax.Array, total: jax.Array) -> jax.Array:
        return triton.exact_quotient(p, jnp.broadcast_to(total, p.shape))

    def columns(p: jax.Array) -> jax.Array:
        return normalise(p, jnp.sum(p, axis=0, keepdims=True) + eps)

    def rows_then_columns(_: jax.Array, p: jax.Array) -> jax.Array:
        return columns(normalise(p, jnp.sum(p, axis=1, keepdims=True) + eps))

    largest = jnp.max(jnp.where(live, logits, -jnp.inf), axis=1, keepdims=True)
    weights = jnp.where(live, jnp.exp(logits - jnp.maximum(largest, _LEAST)), 0.0)
    total = jnp.sum(weights, axis=1, keepdims=True)
    softmax = normalise(weights, jnp.where(total > 0, total, 1.0))
    start = columns(jnp.where(live, softmax + eps, 0.0))
    return jax.lax.fori_loop(0, iters - 1, rows_then_columns, start)


def _round_in_f32(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values of another dtype, as f32."""
    return triton.round_to_bf16(x) if dtype == jnp.bfloat16 else x
