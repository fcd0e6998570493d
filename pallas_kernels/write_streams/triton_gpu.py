"""Triton kernel of `write_streams`: some columns of one stream of a token per program.

    columns of the output and of all streams     -> the same columns of one stream after it
    those times the stream's columns of fn       -> one part of the products

Bytes: the streams out once, and fn, which each further token reads again out of L2, as each program
reads all streams. fn's 1.5 MB (Flash) and the launch bound it.
Measurements: docs/kernels/write_streams.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.pending import PickedSums
from pallas_kernels.gpu import triton
from pallas_kernels.write_streams.reference import Arguments
from pallas_kernels.write_streams.triton_outputs import load_output, operand_of

Ref = Any
MAX_TOKENS = 16
"""Beyond them the product is one of matrices, for which tensor cores are faster."""
_COLUMNS = 256
_NUM_WARPS = 8


def write_streams(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """See `op.write_streams`."""
    output, dtype = arguments.output, arguments.streams.dtype
    count, num, dim = arguments.streams.shape
    num_rows = arguments.fn.shape[0]
    rows_width = pl.next_power_of_2(num_rows)
    parts = pl.cdiv(dim, _COLUMNS)
    is_sum = not isinstance(output, jax.Array)

    def kernel(inputs: Arguments, outputs: tuple[Ref, Ref]) -> None:
        written_ref, products_ref = outputs
        token, part, k = (pl.program_id(axis) for axis in range(3))
        column = part * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32)
        row = jnp.arange(rows_width, dtype=jnp.int32)
        here = (row[:, None] < num_rows) & (column[None] < dim)
        # Asked for before the streams are waited for.
        weight = triton.load_where(inputs.fn, (row[:, None], k * dim + column[None]), here)
        y, rows = _load_streams(inputs.streams, inputs.output, token, column)
        # The program's own stream k alone; its neighbours read the same columns for theirs, out of
        # L2.
        written = inputs.post[token, k] * y
        for j, x in enumerate(rows):
            written = written + inputs.comb[token, jnp.int32(j), k] * x
        if dtype == jnp.bfloat16:
            written = triton.round_to_bf16(written)
        to = token, k, column
        triton.store_where(written_ref, to, written.astype(dtype), column < dim)
        # Of what was stored, rounded: the next hyper-connection reads that.
        total = jnp.sum(weight * written[None], axis=1)
        # A part of its own for each program: no two add to the same sum.
        triton.store_where(products_ref, (token, k * parts + part, row), total, row < num_rows)

    def _load_streams(
        streams: Ref, output: Ref | PickedSums, token: jax.Array, column: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The columns of the output and of each stream, in f32; zeros beyond the last."""
        live = column < dim
        y = load_output(output, token, column, live, is_sum=is_sum, dtype=dtype)
        rows = [
            triton.load_where(streams, (token, jnp.int32(j), column), live).astype(jnp.float32)
            for j in range(num)
        ]
        return y, rows

    return triton.launch(
        kernel,
        grid=(count, parts, num),
        inputs=arguments._replace(output=operand_of(output)),  # type: ignore[arg-type]
        outputs=(
            jax.ShapeDtypeStruct((count, num, dim), dtype),
            jax.ShapeDtypeStruct((count, num * parts, num_rows), jnp.float32),
        ),
        num_warps=_NUM_WARPS,
        name="write_streams",
    )
