"""Triton kernel of `flush_write`: an entry per program, from its row to its place in a block.

A program looks its block up and copies the row of each plane. One without a block ends at once.
Bytes: the entries, read and written, and a word of the table for each. XLA has a launch for each
plane, and another for its indices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import Planes
from pallas_kernels.compressor.reference import Entries
from pallas_kernels.gpu import triton

Ref = Any
_NUM_WARPS = 1


def flush_write(entries: Entries) -> Planes:
    """See `op.flush_write`."""
    rows = {name: row.astype(entries.pool[name].dtype) for name, row in entries.rows.items()}

    def kernel(inputs: _Operands, pool: dict[str, Ref]) -> None:
        program = pl.program_id(0)
        segment, number = inputs.segment_ids[program], inputs.numbers[program]
        entries_per_block = next(iter(pool.values())).shape[2]
        logical = number // entries_per_block  # the column of the table
        # -1 of either, or an entry beyond the table, reads a word of the table that is dropped.
        inside = (segment >= 0) & (number >= 0) & (logical < inputs.table.shape[1])
        block = inputs.table[jnp.maximum(segment, 0), jnp.where(inside, logical, 0)]

        @pl.when(inside & (block >= 0))
        def _() -> None:
            place = inputs.layer[0], block, number % entries_per_block  # one program an entry
            for name, plane in pool.items():
                triton.copy_row(inputs.rows[name], (program,), plane, place)

    words = triton.launch(
        kernel,
        grid=entries.numbers.shape,
        inputs=_Operands(
            triton.as_words(rows),
            entries.block_table,
            entries.segment_ids,
            entries.numbers,
            jnp.reshape(entries.layer, 1),
        ),
        in_place=triton.as_words(entries.pool),
        num_warps=_NUM_WARPS,
        name="flush_write",
    )
    return triton.from_words(words, entries.pool)


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs.

    Attributes:
      rows: planes [n, ...], byte planes as words.
      table: i32[B, LB].
      segment_ids: i32[n].
      numbers: i32[n], of the entries.
      layer: i32[1].
    """

    rows: Any
    table: Any
    segment_ids: Any
    numbers: Any
    layer: Any
