"""Triton kernel of the streams' products with `fn`, left in parts for who reads them.

A program has sixteen tokens and a run of inputs, on tensor cores. `fn` is a megabyte or two: the
runs are what makes enough programs to read it at once. A token's bits do not depend on those beside
it.

Bytes: `fn`, once for each sixteen tokens, out of L2. Measurements: docs/kernels/write_streams.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton

Ref = Any
_TOKENS, _INPUTS = 16, 128
"""Of a tile; tokens are the fewest that tensor cores take."""
_LEAST_OUTPUTS = 16
_PARTS = 64
_FN_PARTS = 3
"""Parts of 8 bits each, which hold all 24 of an f32."""
_NUM_WARPS, _NUM_STAGES = 4, 4


def multiply(streams: jax.Array, fn: jax.Array) -> jax.Array:
    """bf16[T, S, D] times f32[R, S * D] -> f32[T, P, R], in 64 parts or fewer."""
    (num_rows, dim), count = fn.shape, streams.shape[0]
    runs = -(-dim // _INPUTS)
    of_part = -(-runs // _PARTS)
    parts = -(-runs // of_part)
    width = max(_LEAST_OUTPUTS, 1 << (num_rows - 1).bit_length())

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        streams, fn = inputs
        part = pl.program_id(1)
        token = pl.program_id(0) * _TOKENS + jnp.arange(_TOKENS, dtype=jnp.int32)
        row = jnp.arange(width, dtype=jnp.int32)
        is_token, is_row = (token < count)[:, None], (row < num_rows)[:, None]

        def add_run(run: jax.Array, total: jax.Array) -> jax.Array:
            column = (part * of_part + run) * _INPUTS + jnp.arange(_INPUTS, dtype=jnp.int32)
            inside = (column < dim)[None]
            values = triton.load_where(streams, (token[:, None], column[None]), is_token & inside)
            tile = triton.load_where(fn, (row[:, None], column[None]), is_row & inside)
            return total + _multiply(values, tile)

        zeros = jnp.zeros((_TOKENS, width), jnp.float32)
        total = jax.lax.fori_loop(0, of_part, add_run, zeros)
        live = is_token & (row < num_rows)[None]
        triton.store_where(outputs[0], (token[:, None], part, row[None]), total, live)

    return triton.launch(
        kernel,
        grid=(-(-count // _TOKENS), parts),
        inputs=[streams.reshape(count, dim), fn],
        outputs=[jax.ShapeDtypeStruct((count, parts, num_rows), jnp.float32)],
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        name="multiply_streams",
    )[0]


def _multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """bf16[T, in] times f32[R, in] -> f32[T, R]; products of bf16 are exact in f32."""
    products, rest, over_inputs = [], weight, (((1,), (1,)), ((), ()))
    for _ in range(_FN_PARTS):
        rounded = triton.round_to_bf16(rest)
        products.append(
            jax.lax.dot_general(
                x, rounded.astype(jnp.bfloat16), over_inputs, preferred_element_type=jnp.float32
            )
        )
        rest = rest - rounded
    first, second, third = products
    return (third + second) + first
