"""Triton kernel of products with a small weight, left in parts for who reads them.

A program has sixteen rows, some outputs and a run of inputs, on tensor cores. The weight is a
megabyte or two: the runs are what makes enough programs to read it at once. A row's bits do not
depend on those beside it.

Bytes: the weight, once for each sixteen rows, out of L2. Measurements:
docs/kernels/write_streams.md and docs/kernels/pick_experts.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton

Ref = Any
ROWS, _INPUTS = 16, 128
"""Of a tile; rows are the fewest that tensor cores take."""
_LEAST_OUTPUTS = 16
_F32_TERMS = 3
"""Terms of 8 bits each, which hold all 24 of an f32."""
_NUM_WARPS, _NUM_STAGES = 4, 4


def multiply(x: jax.Array, weight: jax.Array, *, parts: int, outputs: int, name: str) -> jax.Array:
    """Products of a few rows, whose inputs are cut into runs.

    Args:
      x: bf16[T, in].
      weight: [out, in], f32 or bf16.
      parts: runs of inputs, at most.
      outputs: of a program, at most, up to the next power of two.
      name: of the kernel in a profile.

    Returns:
      f32[T, P, out], in P parts that add up to the products.
    """
    (num_outputs, dim), count = weight.shape, x.shape[0]
    runs = pl.cdiv(dim, _INPUTS)
    of_part = pl.cdiv(runs, parts)
    parts = pl.cdiv(runs, of_part)
    width = max(_LEAST_OUTPUTS, pl.next_power_of_2(min(outputs, num_outputs)))

    def kernel(inputs: tuple[Ref, Ref], products: Ref) -> None:
        x, weight = inputs
        part = pl.program_id(1)
        row = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        output = pl.program_id(2) * width + jnp.arange(width, dtype=jnp.int32)
        is_row, is_output = (row < count)[:, None], (output < num_outputs)[:, None]

        def add_run(run: jax.Array, total: jax.Array) -> jax.Array:
            column = (part * of_part + run) * _INPUTS + jnp.arange(_INPUTS, dtype=jnp.int32)
            inside = (column < dim)[None]
            # Beyond the last input both are zeros, and add nothing.
            values = triton.load_where(x, (row[:, None], column[None]), is_row & inside)
            tile = triton.load_where(weight, (output[:, None], column[None]), is_output & inside)
            return total + _multiply(values, tile)  # f32[ROWS, width]

        zeros = jnp.zeros((ROWS, width), jnp.float32)
        total = jax.lax.fori_loop(0, of_part, add_run, zeros)
        # Rows beyond the last were zeros, so that tensor cores have their 16; they are not stored.
        live = is_row & (output < num_outputs)[None]
        triton.store_where(products, (row[:, None], part, output[None]), total, live)

    return triton.launch(
        kernel,
        grid=(pl.cdiv(count, ROWS), parts, pl.cdiv(num_outputs, width)),
        inputs=(x, weight),
        outputs=jax.ShapeDtypeStruct((count, parts, num_outputs), jnp.float32),
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        name=name,
    )


def _multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """bf16[T, in] times f32 or bf16[out, in] -> f32[T, out]; products of bf16 are exact in f32."""
    over_inputs = ((1,), (1,)), ((), ())

    def multiply_bf16(some: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, some, over_inputs, preferred_element_type=jnp.float32)

    if weight.dtype == jnp.bfloat16:
        return multiply_bf16(weight)
    products, rest = [], weight
    for _ in range(_F32_TERMS):
        # Eight bits of what is left; the difference is exact.
        rounded = triton.round_to_bf16(rest)
        products.append(multiply_bf16(rounded.astype(jnp.bfloat16)))
        rest = rest - rounded
    first, second, third = products
    # The smallest first, so that the largest does not swallow them.
    return (third + second) + first
