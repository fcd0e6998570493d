"""Triton kernel of `gather_host_rows`: a program reads some rows over PCIe, a word a thread.

No array stands for a table, which may be larger than the device's memory: XLA would count it as
part of that. A thread makes its address of a table's and of a row's number.

Bytes: each row once, over PCIe. Bound by its latency for few rows, by its bandwidth for many.
Measurements: docs/kernels/gather_host_rows.md.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gather_host_rows.reference import WORD_BYTES, read_words
from pallas_kernels.gpu import triton

Ref = Any
_ROWS = 8
_WARPS = 4


def gather_host_rows(
    rows: jax.Array, addresses: jax.Array, *, row_bytes: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """See `op.gather_host_rows`."""
    _, num_tables, num_columns = rows.shape
    if not rows.size:
        return tuple(jnp.zeros((*rows.shape, size), jnp.uint8) for size in row_bytes)
    kernel = functools.partial(
        _kernel, num_tables=num_tables, num_columns=num_columns, row_bytes=row_bytes
    )
    found = triton.launch(
        kernel,
        grid=(pl.cdiv(rows.size, _ROWS),),
        inputs=(rows.reshape(-1), addresses),
        outputs=[
            jax.ShapeDtypeStruct((rows.size, pl.cdiv(size, WORD_BYTES)), jnp.int32)
            for size in row_bytes
        ],
        num_warps=_WARPS,
        name="gather_host_rows",
    )
    return tuple(
        lax.bitcast_convert_type(plane, jnp.uint8).reshape(*rows.shape, -1)[..., :size]
        for plane, size in zip(found, row_bytes, strict=True)
    )


def _kernel(
    inputs: tuple[Ref, Ref],
    outputs: list[Ref],
    *,
    num_tables: int,
    num_columns: int,
    row_bytes: tuple[int, ...],
) -> None:
    rows, addresses = inputs
    number = pl.program_id(0) * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)
    inside = number < rows.shape[0]
    # Threads beyond the last row read that again, so that every address is one of a table.
    number = jnp.minimum(number, rows.shape[0] - 1)
    table = lax.rem(lax.div(number, num_columns), num_tables)
    for place, plane in enumerate(outputs):
        size = plane.shape[1]
        word = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)[None]  # i32[1, words]
        # A row is a run of words, so that the threads of a warp ask for neighbouring ones.
        found = _load_words(
            addresses[table, jnp.int32(place), jnp.int32(0)][:, None],
            addresses[table, jnp.int32(place), jnp.int32(1)][:, None],
            rows[number][:, None],
            jnp.minimum(word, size - 1),
            row_bytes=row_bytes[place],
        )  # i32[_ROWS, words]
        triton.store_where(plane, (number[:, None], word), found, inside[:, None] & (word < size))


def _load_words(
    low: jax.Array, high: jax.Array, row: jax.Array, word: jax.Array, *, row_bytes: int
) -> jax.Array:
    """Words of rows of a plane that begins at an address of two halves."""
    numbers = jnp.broadcast_arrays(low, high, row, word)
    if interpreting():
        shape = jax.ShapeDtypeStruct(numbers[0].shape, jnp.int32)
        return jax.pure_callback(
            functools.partial(read_words, row_bytes=row_bytes), shape, *numbers
        )
    return triton.inline_lines(load_word(row_bytes), numbers, "=r,r,r,r,r", pack=1, dtype=jnp.int32)


def load_word(row_bytes: int) -> str:
    """PTX: $0 is the word numbered $4 of the row numbered $3 of the plane at $2 * 2**32 + $1.

    A plane of a file may begin at any byte, and a row have any number of them. What is wanted then
    lies in two words of memory, or in one: the second is read only where it has a byte of the row,
    since the last row of a plane may have no memory behind it.
    """
    return "\n".join(
        [
            "{",
            ".reg .b64 at;",
            ".reg .b32 inside, bits, end, first, second;",
            ".reg .pred alone;",
            "mov.b64 at, {$1, $2};",
            f"mad.wide.u32 at, $3, {row_bytes}, at;",
            f"mad.wide.u32 at, $4, {WORD_BYTES}, at;",
            "cvt.u32.u64 inside, at;",
            f"and.b32 inside, inside, {WORD_BYTES - 1};",
            f"and.b64 at, at, {-WORD_BYTES};",
            # Bytes of the row from here on, and up to where they reach in the words of memory.
            f"mul.lo.u32 bits, $4, {WORD_BYTES};",
            f"sub.u32 end, {row_bytes}, bits;",
            f"min.u32 end, end, {WORD_BYTES};",
            "add.u32 end, end, inside;",
            "mul.lo.u32 bits, inside, 8;",
            "mov.b32 second, 0;",
            "ld.global.b32 first, [at+0];",
            f"setp.le.u32 alone, end, {WORD_BYTES};",
            "@alone bra one;",
            f"ld.global.b32 second, [at+{WORD_BYTES}];",
            "one:",
            "shf.r.wrap.b32 $0, first, second, bits;",
            "}",
        ]
    )
