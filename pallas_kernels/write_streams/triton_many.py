"""Many tokens' `write_streams`: a Triton kernel writes the streams, which are multiplied then.

    some columns of a token's output and streams     -> the same columns of all streams after it
    the streams, times fn in three terms in bf16     -> parts of each product

The terms of fn add up to it, and products of bf16 are exact in f32. Up to 256 tokens are multiplied
by `gpu.triton_products`, more by cuBLAS.

Bytes: the output and the streams in, the streams out; the streams once more for the product.
Measurements: docs/kernels/write_streams.md.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.pending import Output
from pallas_kernels.gpu import triton, triton_products
from pallas_kernels.write_streams.reference import Arguments
from pallas_kernels.write_streams.triton_outputs import load_output, operand_of

Ref = Any
_COLUMNS = 1024
_NUM_WARPS = 4
_FN_TERMS = 3
"""Terms of 8 bits each, which hold all 24 of an f32."""
_MOST_OF_KERNEL, _KERNEL_PARTS = 256, 64
"""Tokens that Triton multiplies, and the parts of their products."""
_SUMS = 16
"""Sums of a product: tensor cores cut off what a long sum has no bits for."""


def write_streams(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """See `op.write_streams`; streams are bf16."""
    written = _write(arguments.streams, arguments.output, arguments.post, arguments.comb)
    if written.shape[0] <= _MOST_OF_KERNEL:
        return written, multiply(written, arguments.fn)
    return written, _products(arguments.fn, written)


def multiply(streams: jax.Array, fn: jax.Array) -> jax.Array:
    """bf16[T, S, D] times f32[R, S * D] -> f32[T, P, R], in 64 parts or fewer."""
    # All streams of a token are one row of the product.
    rows = streams.reshape(streams.shape[0], -1)
    return triton_products.multiply(
        rows, fn, parts=_KERNEL_PARTS, outputs=fn.shape[0], name="multiply_streams"
    )


def _write(streams: jax.Array, output: Output, post: jax.Array, comb: jax.Array) -> jax.Array:
    count, num, dim = streams.shape
    is_sum = not isinstance(output, jax.Array)

    def kernel(inputs: list[Ref], written_ref: Ref) -> None:
        streams, output, post, comb = inputs
        token = pl.program_id(0)
        column = pl.program_id(1) * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32)
        # Whole runs of columns have a mask that is constant, which the compiler drops.
        inside = column < dim if dim % _COLUMNS else jnp.ones(_COLUMNS, jnp.bool_)
        y = load_output(output, token, column, inside, is_sum=is_sum, dtype=jnp.bfloat16)
        # All streams are read once, for all that are written.
        rows = [
            triton.load_where(streams, (token, jnp.int32(j), column), inside).astype(jnp.float32)
            for j in range(num)
        ]
        for k in range(num):
            written = post[token, jnp.int32(k)] * y
            for j, x in enumerate(rows):
                written = written + comb[token, jnp.int32(j), jnp.int32(k)] * x
            # Rounded once, when all terms are in.
            written = triton.round_to_bf16(written).astype(jnp.bfloat16)
            triton.store_where(written_ref, (token, jnp.int32(k), column), written, inside)

    return triton.launch(
        kernel,
        grid=(count, pl.cdiv(dim, _COLUMNS)),
        inputs=[streams, operand_of(output), post, comb],
        outputs=jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        num_warps=_NUM_WARPS,
        name="write_streams",
    )


def _products(fn: jax.Array, streams: jax.Array) -> jax.Array:
    """f32[R, S * D] times bf16[T, S, D] -> f32[T, P, R]."""
    (num_rows, length), count = fn.shape, streams.shape[0]
    sums = math.gcd(length, _SUMS)
    terms, rest = [], fn
    for _ in range(_FN_TERMS):
        # Not a conversion to bf16 and back, which XLA may leave out.
        terms.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - terms[-1]
    weight = jnp.concatenate(terms).astype(jnp.bfloat16).reshape(-1, sums, length // sums)
    # Short sums, 16 of each product, which the reader adds up in f32.
    products = jnp.einsum(
        "tsc,rsc->tsr",
        streams.reshape(count, sums, length // sums),
        weight,
        preferred_element_type=jnp.float32,
    )
    return products.reshape(count, sums * _FN_TERMS, num_rows)
