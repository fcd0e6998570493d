"""Triton kernel of `dense_linears`: eight rows of one of the weights per program.

    run of inputs: the eight rows, each times every row of x    -> partial sums in registers
    sums over lanes, bias                                        -> eight results of each row of x

Bytes: the weights, once. XLA makes a launch of each product, and one of each bias. Measurements:
docs/kernels/dense_linears.md.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dense_linears.arguments import Arguments
from pallas_kernels.gpu import triton

Ref = Any
MAX_ROWS = 8
"""Beyond them tensor cores are faster."""
_OUTPUTS = 8
_FEW_ROWS = 2
_NUM_WARPS = 8


def dense_linears(arguments: Arguments) -> list[jax.Array]:
    """See `op.dense_linears`."""
    x, weights, biases, positions = arguments
    num_rows, dim = x.shape
    inputs_of_run = 1024 if num_rows <= _FEW_ROWS else 512
    programs = [-(-weight.shape[0] // _OUTPUTS) for weight in weights]
    firsts = [0, *itertools.accumulate(programs)]
    tables = [bias for bias in biases if bias is not None]

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        x, positions = inputs[0], inputs[1]
        weights, tables = inputs[2 : 2 + len(outputs)], iter(inputs[2 + len(outputs) :])
        for number, (weight, result) in enumerate(zip(weights, outputs, strict=True)):
            table = None if biases[number] is None else next(tables)
            program = pl.program_id(0) - firsts[number]

            @pl.when((program >= 0) & (program < programs[number]))
            def _(
                weight: Ref = weight, result: Ref = result, table: Ref = table, program=program
            ) -> None:
                multiply(x, weight, table, positions, result, program)

    def multiply(
        x: Ref, weight: Ref, table: Ref | None, positions: Ref, result: Ref, program: jax.Array
    ) -> None:
        out = program * _OUTPUTS + jnp.arange(_OUTPUTS, dtype=jnp.int32)
        exists = out < weight.shape[0]
        sums = [jnp.zeros((_OUTPUTS, inputs_of_run), jnp.float32) for _ in range(num_rows)]
        for first in range(0, dim, inputs_of_run):
            column = first + jnp.arange(inputs_of_run, dtype=jnp.int32)
            inside = column < dim
            here = exists[:, None] & inside[None]
            tile = triton.load_where(weight, (out[:, None], column[None]), here)
            tile = tile.astype(jnp.float32)
            for row in range(num_rows):
                values = triton.load_where(x, (jnp.int32(row), column), inside)
                sums[row] = sums[row] + tile * values.astype(jnp.float32)[None]
        for row in range(num_rows):
            total = jnp.sum(sums[row], axis=1)
            if table is not None:
                place = positions[jnp.int32(row)] % table.shape[0]
                total = total + triton.load_where(table, (place, out), exists)
            triton.store_where(result, (jnp.int32(row), out), total, exists)

    return triton.launch(
        kernel,
        grid=(sum(programs),),
        inputs=[x, positions, *weights, *tables],
        outputs=[jax.ShapeDtypeStruct((num_rows, w.shape[0]), jnp.float32) for w in weights],
        num_warps=_NUM_WARPS,
        name="dense_linears",
    )
