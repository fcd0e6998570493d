"""Triton kernel of `hyper_connections`: two programs a token, which both sum its squares.

    program 0    weighs the streams, stores the collapsed and the normed row
    program 1    post, and the Sinkhorn of comb: sixteen scalars, some forty times four sums

Bytes: the streams in, twice; the collapsed and the normed row out. The launch and the chain of
sums bound it. It compiles for Blackwell and has not run there. Measurements and roads not
taken: docs/kernels/hyper_connections.md.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton
from pallas_kernels.hyper_connections.arguments import Arguments
from pallas_kernels.hyper_connections.reference import Reading

Ref = Any
_NUM_WARPS = 4


def hyper_connections(arguments: Arguments) -> Reading:
    """See `op.hyper_connections`."""
    products, scale, base, streams, norm, iters, eps, norm_eps = arguments
    count, num, dim = streams.shape
    width = 1 << (dim - 1).bit_length()
    side = 1 << (num - 1).bit_length()
    dtype = streams.dtype

    parts = products.shape[1]

    def kernel(inputs: list[Ref], stored: list[Ref]) -> None:
        products, scale, base, streams, norm = inputs
        collapsed_ref, normed_ref, post_ref, comb_ref = stored
        token = pl.program_id(0)
        part = jnp.arange(1 << (parts - 1).bit_length(), dtype=jnp.int32)
        lane = jnp.arange(side, dtype=jnp.int32)
        inside = lane < num

        def logits(
            place: jax.Array, kind: int, live: jax.Array, inverse_rms: jax.Array
        ) -> jax.Array:
            """Scaled logits at these places of the token's, zeros where not live."""
            where = token, part[:, None], place[None]
            loaded = triton.load_where(products, where, (part < parts)[:, None] & live[None])
            mix = jnp.sum(loaded, axis=0) * inverse_rms
            return mix * scale[kind] + triton.load_where(base, (place,), live)

        rows, squares = [], jnp.float32(0)
        for j in range(num):
            row = triton.load_row(streams, (token, j), start=0, count=dim, width=width)
            rows.append(row)
            squares += jnp.sum(jnp.square(row.astype(jnp.float32)))
        inverse_rms = jax.lax.rsqrt(squares / (num * dim) + norm_eps)

        @pl.when(pl.program_id(1) == 0)
        def _read() -> None:
            pre = jax.nn.sigmoid(logits(lane, 0, inside, inverse_rms)) + eps
            collapsed = jnp.zeros(width, jnp.float32)
            for j, row in enumerate(rows):
                weight = jnp.sum(jnp.where(lane == j, pre, 0.0))
                collapsed = collapsed + row.astype(jnp.float32) * weight
            collapsed = _round_in_f32(collapsed, dtype)
            mean_square = jnp.sum(collapsed * collapsed) / dim
            weight = triton.load_row(norm, (), start=0, count=dim, width=width)
            normed = collapsed * jax.lax.rsqrt(mean_square + norm_eps) * weight.astype(jnp.float32)
            triton.store_row(collapsed_ref, (token,), collapsed.astype(dtype), first=0, count=dim)
            normed = _round_in_f32(normed, dtype).astype(dtype)
            triton.store_row(normed_ref, (token,), normed, first=0, count=dim)

        @pl.when(pl.program_id(1) == 1)
        def _connect() -> None:
            post = 2 * jax.nn.sigmoid(logits(num + lane, 1, inside, inverse_rms))
            triton.store_where(post_ref, (token, lane), post, inside)
            place = jnp.arange(side * side, dtype=jnp.int32)
            live = place < num * num
            flat = logits(2 * num + place, 2, live, inverse_rms)
            values = [[jnp.sum(jnp.where(place == j * num + k, flat, 0.0)) for k in range(num)]
                      for j in range(num)]  # fmt: skip
            for j, row in enumerate(_sinkhorn(values, iters=iters, eps=eps)):
                for k, value in enumerate(row):
                    comb_ref[token, jnp.int32(j * num + k)] = value

    collapsed, normed, post, comb = triton.launch(
        kernel,
        grid=(count, 2),
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


Square = list[list[jax.Array]]


def _sinkhorn(logits: Square, *, iters: int, eps: float) -> Square:
    """`reference.sinkhorn` of one matrix, whose elements are scalars: sums need no other thread.

    Each sum is inverted once, where the definition divides: a unit in the last place apart.
    """

    def columns(p: Square) -> Square:
        return _transposed(rows(_transposed(p)))

    def rows(p: Square) -> Square:
        inverse = [1 / (functools.reduce(jnp.add, row) + eps) for row in p]
        return [[x * i for x in row] for row, i in zip(p, inverse, strict=True)]

    def rows_then_columns(_: jax.Array, p: Square) -> Square:
        return columns(rows(p))

    weights = []
    for row in logits:
        largest = functools.reduce(jnp.maximum, row)
        shifted = [jnp.exp(x - largest) for x in row]
        total = functools.reduce(jnp.add, shifted)
        weights.append([x / total + eps for x in shifted])
    return jax.lax.fori_loop(0, iters - 1, rows_then_columns, columns(weights))


def _transposed(p: Square) -> Square:
    return [list(column) for column in zip(*p, strict=True)]


def _round_in_f32(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values of another dtype, as f32."""
    return triton.round_to_bf16(x) if dtype == jnp.bfloat16 else x
