"""Triton kernels of `joined_linears`: some outputs of one of the weights per program.

    one or two rows     eight outputs, a run of inputs at a time, each times every row of x
                        -> partial sums in registers -> sums over lanes
    up to 64 in bf16    16 or 32 outputs, on tensor cores (`triton_matrices`)

Of block FP8, whose rows are one or two, each program rounds the rows of x that it reads.

Bytes: the weights, once. XLA makes a launch of each product, and one of each bias. Measurements:
docs/kernels/joined_linears.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common import numbers, rows
from pallas_kernels.common.weights import FP8_BLOCK, BlockFP8, Weight, is_quantized
from pallas_kernels.gpu import triton
from pallas_kernels.joined_linears import triton_matrices
from pallas_kernels.joined_linears.reference import Arguments

Ref = Any
FEW_ROWS = 2
_MAX_ROWS_OF_LANES = 8
_OUTPUTS = 8
_INPUTS_OF_RUN = 512
"""So few that an SM has registers for three programs of one row."""
_NUM_WARPS = 8


def max_rows(x: jax.Array, weights: Sequence[Weight]) -> int:
    """Rows up to which these kernels are faster than XLA: those of f32 are few."""
    return triton_matrices.MAX_ROWS if _are_bf16(x, weights) else _MAX_ROWS_OF_LANES


def find_obstacle(x: jax.Array, weights: Sequence[Weight]) -> str | None:
    """Why the kernel can't serve a call, as the rest of a sentence; None where it can."""
    for weight in weights:
        if not is_quantized(weight):
            continue
        block = weight.block if isinstance(weight, BlockFP8) else FP8_BLOCK
        if not isinstance(weight, BlockFP8) or any(size % block for size in weight.shape):
            return f"takes block FP8 of multiples of {block} x {block}, got {weight.shape}"
        if x.shape[0] > FEW_ROWS:
            return f"takes block FP8 for at most {FEW_ROWS} rows, got {x.shape[0]}"
    return None


def _are_bf16(x: jax.Array, weights: Sequence[Weight]) -> bool:
    arrays = [x, *weights]
    return all(isinstance(a, jax.Array) and a.dtype == jnp.bfloat16 for a in arrays)


def joined_linears(arguments: Arguments) -> list[jax.Array]:
    """See `op.joined_linears`."""
    x, weights = arguments.x, arguments.weights
    num_rows, dim = x.shape
    is_matrix = num_rows > FEW_ROWS and _are_bf16(x, weights)
    num_outputs = triton_matrices.outputs_of_program(num_rows) if is_matrix else _OUTPUTS
    programs = [pl.cdiv(weight.shape[0], num_outputs) for weight in weights]
    firsts = [0, *itertools.accumulate(programs)]
    arrays, tree = jax.tree.flatten((x, arguments.positions, weights, arguments.biases))

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        x, positions, weights, biases = jax.tree.unflatten(tree, inputs)
        for number, result in enumerate(outputs):
            # Programs are numbered through all weights; each compares its number with the run of
            # every weight, for which the kernel has code of its own.
            program = pl.program_id(0) - firsts[number]
            out = program * num_outputs + jnp.arange(num_outputs, dtype=jnp.int32)

            @pl.when((program >= 0) & (program < programs[number]))
            def _(number: int = number, result: Ref = result, out: jax.Array = out) -> None:
                if is_matrix:
                    weight, bias = weights[number], biases[number]
                    triton_matrices.multiply(x, weight, bias, positions, result, out)
                else:
                    multiply(x, weights[number], biases[number], positions, result, out)

    def multiply(
        x: Ref, weight: Any, bias: Ref | None, positions: Ref, result: Ref, out: jax.Array
    ) -> None:
        exists = out < weight.shape[0]
        codes = weight.codes if isinstance(weight, BlockFP8) else weight
        # A partial sum for each lane, of every 512th input: lanes are added up once, at the end.
        sums = [jnp.zeros((_OUTPUTS, _INPUTS_OF_RUN), jnp.float32) for _ in range(num_rows)]
        for first in range(0, dim, _INPUTS_OF_RUN):
            column = first + jnp.arange(_INPUTS_OF_RUN, dtype=jnp.int32)
            inside = column < dim
            here = exists[:, None] & inside[None]
            # [8, 512], read once for all rows of x, and by no other program.
            tile = triton.load_where(codes, (out[:, None], column[None]), here)
            tile = tile.astype(jnp.float32)
            for row in range(num_rows):
                values = triton.load_where(x, (jnp.int32(row), column), inside)
                values = values.astype(jnp.float32)
                if isinstance(weight, BlockFP8):
                    # The codes' scales go into x, a factor for each block of inputs: fewer products
                    # than one for each code.
                    values = _scaled(values, weight, out, first)
                sums[row] = sums[row] + tile * values[None]
        for row in range(num_rows):
            total = jnp.sum(sums[row], axis=1)
            if bias is not None:
                # The table recurs along the sequence.
                bias_row = positions[jnp.int32(row)] % bias.shape[0]
                total = total + triton.load_where(bias, (bias_row, out), exists)
            triton.store_where(result, (jnp.int32(row), out), total.astype(result.dtype), exists)

    return triton.launch(
        kernel,
        grid=(sum(programs),),
        inputs=arrays,
        outputs=[
            jax.ShapeDtypeStruct((num_rows, weight.shape[0]), dtype)
            for weight, dtype in zip(weights, arguments.dtypes, strict=True)
        ],
        num_warps=triton_matrices.num_warps(num_rows) if is_matrix else _NUM_WARPS,
        num_stages=triton_matrices.NUM_STAGES if is_matrix else None,
        name="joined_linears",
    )


def _scaled(values: jax.Array, weight: BlockFP8, out: jax.Array, first: int) -> jax.Array:
    """A run of a row, f32[n], as the codes of a weight take it: rounded, times the run's scales."""
    groups = values.reshape(-1, weight.block)
    block = first // weight.block + jnp.arange(groups.shape[0], dtype=jnp.int32)
    # Eight outputs of a program, at a multiple of eight, lie in one block.
    row = jnp.full(block.shape, jnp.min(out) // weight.block, jnp.int32)
    scale = triton.load_where(weight.scale, (row, block), block < weight.scale.shape[1])
    if scale.dtype == jnp.uint8:
        scale = numbers.decode_ue8m0(scale)
    if weight.activations == "fp8":
        # Rounded to E4M3 and back: the run is multiplied in f32, by codes as they are.
        exponent = numbers.encode_ue8m0(rows.group_maximum(groups) * numbers.INV_448)
        codes = triton.encode_e4m3(groups * numbers.invert_ue8m0(exponent)[:, None])
        groups = numbers.decode_e4m3(codes)
        scale = scale * numbers.decode_ue8m0(exponent)
    return (groups * scale[:, None]).reshape(-1)
