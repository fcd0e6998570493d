"""Triton kernels that make a product's rows.

    round    a few groups of 128 inputs of a row, or of four where rows are many, per program; a row
             may be any of x's, so that an expert's tokens are gathered on the way, and x may come
             in parts, by token or in runs
    pick     rows that are rounded already: eight groups of eight rows per program

Dense weights take rows as they are, which XLA gathers. Bytes: those of x or of the codes that are
picked, and of the codes that are made, once each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.common import numbers, rows
from pallas_kernels.common.rows import GROUP
from pallas_kernels.common.weights import MXFP4, BlockFP8, Weight
from pallas_kernels.gpu import triton, triton_codecs
from pallas_kernels.product.raw_rows import RawRows

Ref = Any
_GROUPS = 4
"""Groups of a row that a program rounds."""
_MANY_ROWS, _ROWS_OF_MANY = 1024, 4
"""Rows from which on a program has several, and how many: picked rows take less time so."""
_NUM_WARPS = 4
_WORDS = GROUP // 4
_PICKED_ROWS, _PICKED_GROUPS = 8, 8
"""Rows and groups of a program that picks."""


class Rows(NamedTuple):
    """Rows in E4M3, whose terms add up, or as they are.

    Attributes:
      codes: e4m3[P, R, B * 128], one term if rows are rounded, two if they are as they were; for
        dense weights bf16[1, R, in].
      scale: f32[P, B, R]; None for dense weights.
    """

    codes: jax.Array
    scale: jax.Array | None

    @property
    def num_terms(self) -> int:
        """P."""
        return self.codes.shape[0]


def make_rows(
    x: jax.Array | RawRows,
    weight: Weight,
    *,
    num_spare: int,
    token: jax.Array | None = None,
    num_used: jax.Array | None = None,
    num_runs: int = 1,
) -> Rows:
    """Rows as this weight takes them, and some that are arbitrary behind them.

    Args:
      x: [N, in], bf16 for dense weights; or, for others, rows that were left otherwise, normed.
      weight: its `activations` say how many terms there are, its format how inputs are ordered.
      num_spare: rows that a kernel may read beyond the last.
      token: i32[R], the row of x that each is, clamped; None is x's own.
      num_used: i32[], rows after which those of quantised weights may be arbitrary too; None is R.
      num_runs: runs of rows, each of which begins at a multiple of eight.
    """
    source = x if isinstance(x, RawRows) else RawRows(x[None], token)
    num_rows = source.num_rows
    of_run = num_rows // num_runs
    spread = padded(of_run) if num_runs > 1 else of_run
    if not isinstance(weight, BlockFP8 | MXFP4):
        # Nothing is rounded: XLA gathers the rows and pads them, as one copy.
        assert isinstance(x, jax.Array), "rows for dense weights are arrays"
        taken = x if token is None else x.at[token].get(mode="clip")
        runs = taken.reshape(num_runs, of_run, -1)
        runs = jnp.pad(runs, ((0, 0), (0, spread - of_run), (0, 0)))
        codes = runs.reshape(1, num_runs * spread, -1)
        spare = padded(codes.shape[1] + num_spare) - codes.shape[1]
        return Rows(jnp.pad(codes, ((0, 0), (0, spare), (0, 0))), None)
    return _launch(
        source,
        num_used,
        of_run=(of_run, spread),
        total=padded(num_runs * spread + num_spare),
        num_terms=1 if weight.activations == "fp8" else 2,
        reorders=isinstance(weight, MXFP4),
    )


def pick_rows(
    rows: Rows, token: jax.Array, *, num_spare: int, num_used: jax.Array | None = None
) -> Rows:
    """Some of the rows that `make_rows` has rounded; arguments as of it, tokens among its rows.

    Where each is picked several times this takes less time than to round it anew.
    """
    assert rows.scale is not None, "rows of dense weights are not rounded"
    (num_terms, num_rows, dim), num_groups = rows.codes.shape, rows.scale.shape[1]
    total, width = padded(token.shape[0] + num_spare), num_groups * _WORDS
    words = jax.lax.bitcast_convert_type(
        rows.codes.reshape(num_terms, num_rows, width, 4), jnp.uint32
    )

    def pick_some(
        inputs: list[Ref], outputs: list[Ref], first: jax.Array, start: jax.Array
    ) -> None:
        codes, scales, token_ref = inputs[:3]
        # Rows beyond the last load the row of token 0, a masked load being 0, and store nothing.
        row = first + jnp.arange(_PICKED_ROWS, dtype=jnp.int32)
        live = row < token.shape[0]
        source = jnp.clip(triton.load_where(token_ref, (row,), live), 0, num_rows - 1)
        # Words of codes are i32[1, 256] and groups i32[8, 1]: codes lie row by row and scales group
        # by group, so that neighbouring lanes move what lies side by side in either.
        word = start * _WORDS + jnp.arange(_PICKED_GROUPS * _WORDS, dtype=jnp.int32)[None]
        group = start + jnp.arange(_PICKED_GROUPS, dtype=jnp.int32)[:, None]
        for term in map(jnp.int32, range(num_terms)):
            inside = live[:, None] & (word < width)
            picked = triton.load_where(codes, (term, source[:, None], word), inside)
            triton.store_where(outputs[0], (term, row[:, None], word), picked, inside)
            inside = live[None] & (group < num_groups)
            picked = triton.load_where(scales, (term, group, source[None]), inside)
            triton.store_where(outputs[1], (term, group, row[None]), picked, inside)

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        first, start = pl.program_id(0) * _PICKED_ROWS, pl.program_id(1) * _PICKED_GROUPS
        run = functools.partial(pick_some, inputs, outputs, first, start)
        _run_if_used(run, first, None if num_used is None else inputs[-1])

    codes, scale = triton.launch(
        kernel,
        grid=(pl.cdiv(token.shape[0], _PICKED_ROWS), pl.cdiv(num_groups, _PICKED_GROUPS)),
        inputs=[words, rows.scale, token, *([] if num_used is None else [num_used.reshape(1)])],
        outputs=[
            jax.ShapeDtypeStruct((num_terms, total, width), jnp.uint32),
            jax.ShapeDtypeStruct((num_terms, num_groups, total), jnp.float32),
        ],
        num_warps=_NUM_WARPS,
        name="pick_rows",
    )
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return Rows(codes.reshape(num_terms, total, dim), scale)


def _run_if_used(run: Callable[[], None], first: jax.Array, num_used: Ref | None) -> None:
    """Runs a program unless nobody reads its rows, the first of which is given."""
    if num_used is None:
        run()
    else:
        pl.when(first < num_used[0])(run)


def padded(num_rows: int) -> int:
    """Rows up to a multiple of eight, which bulk copies take together."""
    return pl.cdiv(num_rows, 8) * 8


def _launch(
    source: RawRows,
    num_used: jax.Array | None,
    *,
    of_run: tuple[int, int],
    total: int,
    num_terms: int,
    reorders: bool,
) -> Rows:
    num_rows, dim = source.num_rows, source.num_inputs
    num_groups = pl.cdiv(dim, GROUP)
    height = _ROWS_OF_MANY if num_rows >= _MANY_ROWS else 1
    programs = pl.cdiv(num_groups, _GROUPS)
    is_whole = dim % (_GROUPS * GROUP) == 0

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        first, program = pl.program_id(0) * height, pl.program_id(1)
        run = functools.partial(round_some, inputs, outputs, first, program)
        _run_if_used(run, first, None if num_used is None else inputs[-1])

    def round_some(
        inputs: list[Ref], outputs: list[Ref], first: jax.Array, program: jax.Array
    ) -> None:
        row = first + jnp.arange(height, dtype=jnp.int32)
        live = row < num_rows
        taken = _source_of(source, inputs, row, live)
        size, spread = of_run
        # Each run of rows begins at a multiple of eight, for bulk copies.
        row = (row // size * spread + row % size if spread > size else row)[:, None]
        lane = (program * _GROUPS * GROUP + jnp.arange(_GROUPS * GROUP, dtype=jnp.int32))[None]
        inside = jnp.broadcast_to(is_whole or lane < dim, (height, _GROUPS * GROUP))
        # f32[height, 512], four groups of each row; what lies beyond the last input is zero, and
        # counts for no scale.
        values = _load_sums(source, inputs[0], taken[:, None], lane, inside)
        groups = values.reshape(height, _GROUPS, GROUP)
        _store_terms(outputs, groups, row, live, program, num_groups, num_terms, reorders=reorders)

    codes, scale = triton.launch(
        kernel,
        grid=(pl.cdiv(num_rows, height), programs),
        inputs=[
            source.values,
            *([] if source.token is None else [source.token]),
            *([] if num_used is None else [num_used.reshape(1)]),
        ],
        outputs=[
            jax.ShapeDtypeStruct((num_terms, total, num_groups * _WORDS), jnp.uint32),
            jax.ShapeDtypeStruct((num_terms, num_groups, total), jnp.float32),
        ],
        num_warps=_NUM_WARPS,
        name="quantize_rows",
    )
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return Rows(codes.reshape(num_terms, total, num_groups * GROUP), scale)


def _source_of(source: RawRows, inputs: list[Ref], row: jax.Array, live: jax.Array) -> jax.Array:
    """Which rows of x some rows are, i32[n]."""
    count = source.values.shape[1]
    # Lanes beyond the last row take that row again, so that every address is one of x; they store
    # nothing.
    taken = jnp.minimum(row, source.num_rows - 1)
    if source.token is not None:
        # Tokens of nobody's rows are arbitrary: kept inside the array, whatever they are.
        taken = jnp.clip(triton.load_where(inputs[1], (row,), live), 0, count - 1)
    if source.interleaved > 1:
        # Rows are numbered weight by weight, and lie token by token.
        of_weight = count // source.interleaved
        taken = taken % of_weight * source.interleaved + taken // of_weight
    return taken


def _load_sums(
    source: RawRows, values: Ref, row: jax.Array, lane: jax.Array, inside: jax.Array
) -> jax.Array:
    """Columns of rows, f32, the sums of splits rounded."""
    splits, count, width = source.values.shape
    if source.column_runs > 1:
        # A row's columns lie in as many runs, the first ones of all rows together.
        row, lane = lane // width * (count // source.column_runs) + row, lane % width
    parts = [
        triton.load_where(values, (jnp.int32(split), row, lane), inside).astype(jnp.float32)
        for split in range(splits)
    ]
    # Added in the order of the splits, and rounded as the product before would have stored them.
    total = functools.reduce(jnp.add, parts)
    return triton.round_to_bf16(total) if source.dtype == jnp.bfloat16 else total


def _store_terms(
    outputs: list[Ref],
    groups: jax.Array,
    row: jax.Array,
    live: jax.Array,
    program: jax.Array,
    num_groups: int,
    num_terms: int,
    *,
    reorders: bool,
) -> None:
    """Rounds a program's groups of rows, f32[height, 4, 128], to terms, and stores these.

    Args:
      outputs: codes and scales of all rows.
      groups: the values.
      row: i32[height, 1], where each row goes.
      live: bool[height], it goes somewhere.
      program: i32[], which four groups they are.
      num_groups: groups of a row.
      num_terms: of a value.
      reorders: as of MXFP4's tiles.
    """
    codes, scales = outputs
    # A power of two, so that multiplying by its inverse is exact, and rounding happens once, in the
    # conversion to E4M3.
    scale = numbers.encode_ue8m0(rows.group_maximum(groups) * numbers.INV_448)
    scaled = groups * numbers.invert_ue8m0(scale)[..., None]
    group = (program * _GROUPS + jnp.arange(_GROUPS, dtype=jnp.int32))[None]
    word = jnp.arange(_GROUPS * _WORDS, dtype=jnp.int32)
    # MXFP4's tiles keep the columns in the order in which threads load their codes: x takes that
    # order here, once, and the kernel moves nothing.
    to_word = (program * _GROUPS * _WORDS + (_reordered(word) if reorders else word))[None]
    for term in range(num_terms):
        code = triton.encode_e4m3(scaled)
        # Four codes a word, so that a thread stores words.
        packed = triton_codecs.pack(code.reshape(-1).astype(jnp.uint32), 8, 4)
        written = live[:, None] & (to_word < num_groups * _WORDS)
        packed = packed.reshape(row.shape[0], -1)
        triton.store_where(codes, (jnp.int32(term), row, to_word), packed, written)
        value = numbers.decode_ue8m0(scale)
        written = live[:, None] & (group < num_groups)
        triton.store_where(scales, (jnp.int32(term), group, row), value, written)
        # The next term is what this one lacks, under a scale smaller by as much; see `rows.REST`.
        scaled = (scaled - numbers.decode_e4m3(code)) * np.float32(rows.REST)
        scale = scale - np.uint8(rows.REST_BITS)


def _reordered(word: jax.Array) -> jax.Array:
    """Words 8 q + 4 v + k of a group -> 16 v + 4 k + q, as `left_operand.order_columns` has it."""
    group, q, v, k = word & ~31, (word >> 3) & 3, (word >> 2) & 1, word & 3
    return group | (v << 4) | (k << 2) | q
