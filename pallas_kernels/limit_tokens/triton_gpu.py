"""Triton kernels of top-k and top-p: a digit of the last token's rank a launch, then its number.

    limit_digit   one part of a row, 16 ranks -> how many tokens and what mass rank before each
    limit_number  a row's parts -> the last token among those of the last rank

A launch adds up what the one before it found in all parts of the row, which says how far the rank
is known, and counts before the ranks that may be next. Sums are of whole numbers: neither the parts
nor the order of adding shows in the result. Programs of rows without a limit end at once.

Bytes: 8 per token and launch, out of L2 for up to some 40 rows. Launches bound few rows, then
instructions do, five per token and rank. Measurements and roads not taken:
docs/kernels/limit_tokens.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton
from pallas_kernels.limit_tokens.reference import (
    NAN_RANK,
    Sums,
    Wanted,
    comes_short,
    finish,
    low_bits_of,
    masses_of,
    ranks_of,
    sums_of,
    wanted_of,
)

Ref = Any
SHIFTS = (27, 23, 19, 15, 11, 7, 3, 0)
"""Lowest bit of each digit. The last one has three bits, and the rank after all is looked at."""
RANKS = 16
"""That a launch compares with: those with each digit, or up to the next one after the last."""
COLUMNS = 256
"""Tokens that a program compares at a time, one a thread."""
PARTS = 2048, 4096
"""Tokens of a program, of few rows and of many."""
_FEW_ROWS = 8
_HIGH_BITS = 20
"""Of the sum of the high halves of a thread's 16 masses, which have 16 bits each at most."""
_WARPS = COLUMNS // 32


class Row(NamedTuple):
    """Arrays of rows, and in a kernel their refs.

    Attributes:
      scaled: f32[T, V].
      masses: u32[T, V].
      wanted: of each row.
    """

    scaled: Any
    masses: Any
    wanted: Wanted


class Found(NamedTuple):
    """What a launch leaves.

    Attributes:
      rank: u32[T], the last token's as far as the launches before have found it, zeros below.
      before: u32[T, P, 3, 16], of each part the `Sums` of tokens before each of the ranks that it
        was compared with.
    """

    rank: Any
    before: Any


def limit_tokens(
    scaled: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `op.limit_tokens`."""
    num_rows, num_tokens = scaled.shape
    masses = masses_of(scaled)
    row = Row(scaled, masses, wanted_of(masses, top_k, top_p))
    size = PARTS[num_rows >= _FEW_ROWS]
    num_parts = pl.cdiv(num_tokens, size)
    shapes = Found(
        rank=jax.ShapeDtypeStruct((num_rows,), jnp.uint32),
        before=jax.ShapeDtypeStruct((num_rows, num_parts, len(Sums._fields), RANKS), jnp.uint32),
    )
    found: Found | None = None
    for pair in zip((0, *SHIFTS), SHIFTS, strict=False):
        # Operands, so that but for the first launch all are of one kernel to compile; of one
        # element each, since XLA would compute what looks like a series in a launch of its own.
        shifts = tuple(jnp.asarray([shift], jnp.uint32) for shift in pair)
        found = triton.launch(
            functools.partial(_count_kernel, size=size),
            grid=(num_rows, num_parts),
            inputs=(row, found, shifts),
            outputs=shapes,
            num_warps=_WARPS,
            name="limit_digit",
        )
    last_rank, last = triton.launch(
        functools.partial(_settle_kernel, size=size),
        grid=(num_rows,),
        inputs=(row, found),
        outputs=(
            jax.ShapeDtypeStruct((num_rows,), jnp.uint32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        ),
        num_warps=_WARPS,
        name="limit_number",
    )
    return finish(last_rank, last, row.wanted, num_tokens)


def _count_kernel(
    inputs: tuple[Row, Found | None, tuple[Ref, Ref]], outputs: Found, *, size: int
) -> None:
    row, found, (last_shift, shift) = inputs
    num_tokens = row.scaled.shape[1]
    number, part = pl.program_id(0), pl.program_id(1)

    @pl.when(row.wanted.tokens[number] > 0)
    def _() -> None:
        # What the launch before has counted says the digit; every part's program works it out.
        rank = jnp.zeros((), jnp.uint32)
        if found is not None:
            rank = _next_rank(row, found, number, last_shift[jnp.int32(0)])[0]

        @pl.when(part == 0)
        def _() -> None:
            outputs.rank[number] = rank  # one program a row stores what all found

        candidate = jnp.arange(RANKS, dtype=jnp.uint32)
        candidates = (rank + (candidate << shift[jnp.int32(0)]))[:, None]  # u32[16, 1]
        low_bits = low_bits_of(num_tokens)
        # A thread's own tokens first, over all of the part; threads add up once, at the end. Until
        # then the number of tokens is above the high halves of their masses in one word.
        zeros = jnp.zeros((RANKS, COLUMNS), jnp.uint32)
        sums = [zeros, zeros]
        for first in range(0, size, COLUMNS):
            ranks, masses = _load(row, number, part * size + first, COLUMNS)  # u32[COLUMNS]
            # Tokens beyond the row have the last rank of all, which comes before none.
            is_before = ranks[None] < candidates  # bool[16, COLUMNS]
            values = (
                (masses >> low_bits) + jnp.uint32(1 << _HIGH_BITS),
                masses & jnp.uint32((1 << low_bits) - 1),
            )
            sums = [
                total + jnp.where(is_before, jnp.broadcast_to(value[None], zeros.shape), zeros)
                for total, value in zip(sums, values, strict=True)
            ]
        tokens_and_high, low = sums
        high = tokens_and_high & jnp.uint32((1 << _HIGH_BITS) - 1)
        for place, total in enumerate((tokens_and_high >> _HIGH_BITS, high, low)):
            where = number, part, jnp.int32(place), pl.ds(0, RANKS)
            # u32[16], a sum over the program's threads; parts are added by the next launch.
            outputs.before[where] = jnp.sum(total, axis=1, dtype=jnp.uint32)


def _settle_kernel(inputs: tuple[Row, Found], outputs: tuple[Ref, Ref], *, size: int) -> None:
    row, found = inputs
    out_rank, out_last = outputs
    number, num_parts = pl.program_id(0), found.before.shape[1]

    @pl.when(row.wanted.tokens[number] > 0)
    def _() -> None:
        rank, digit = _next_rank(row, found, number, jnp.uint32(SHIFTS[-1]))
        low_bits = low_bits_of(row.scaled.shape[1])
        wanted = _scalars(row.wanted, number)
        part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)
        # What ranks before the last token's, and what has its rank, in each part.
        better, equal = [], []
        for place in range(len(Sums._fields)):
            sums = _load_parts(found, number, place)  # u32[P, 16]
            at_digit, next_digit = (
                jnp.sum(jnp.where(_candidates() == each, sums, 0), axis=1, dtype=jnp.uint32)
                for each in (digit, digit + 1)
            )
            better.append(jnp.sum(at_digit, dtype=jnp.uint32))
            equal.append(next_digit - at_digit)
        # The last part at whose beginning a token would still be left.
        is_earlier = part[None] < part[:, None]  # bool[P, P]
        before = [
            total + jnp.sum(jnp.where(is_earlier, own[None], 0), axis=1, dtype=jnp.uint32)
            for total, own in zip(better, equal, strict=True)
        ]
        is_left = comes_short(_sums(before), wanted, low_bits) & (part < num_parts)
        last_part = jnp.sum(is_left.astype(jnp.int32)) - 1
        start = [
            jnp.sum(jnp.where(part == last_part, each, 0), dtype=jnp.uint32) for each in before
        ]
        # And in it the last number that comes before none that is left out, bit by bit.
        ranks, masses = _load(row, number, last_part * size, size)  # u32[size]
        offset = jnp.arange(size, dtype=jnp.int32)
        last = jnp.int32(0)
        for bit in reversed(range(size.bit_length() - 1)):
            tried = last | (1 << bit)
            ties = (ranks == rank) & (offset < tried)  # bool[size]
            own = sums_of(ties[None], masses[None], low_bits)
            sums = [
                total + jnp.sum(each).astype(jnp.uint32)
                for total, each in zip(start, own, strict=True)
            ]
            last = jnp.where(comes_short(_sums(sums), wanted, low_bits), tried, last)
        out_rank[number] = rank
        out_last[number] = last_part * size + last


def _next_rank(
    row: Row, found: Found, number: jax.Array, shift: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rank with the digit that a launch found, and that digit."""
    sums = [
        jnp.sum(_load_parts(found, number, place), axis=0, dtype=jnp.uint32)
        for place in range(len(Sums._fields))
    ]
    low_bits = low_bits_of(row.scaled.shape[1])
    is_left = comes_short(_sums(sums), _scalars(row.wanted, number), low_bits)
    # Ranks ascend: it holds up to the digit, and for the first one, whose rank is that so far.
    digit = jnp.sum(is_left.astype(jnp.int32)) - 1
    return found.rank[number] + (digit.astype(jnp.uint32) << shift), digit


def _load_parts(found: Found, number: jax.Array, place: int) -> jax.Array:
    """u32[P, 16], one of the sums of each part, zeros beyond the last part."""
    num_parts = found.before.shape[1]
    part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)[:, None]
    there = jnp.broadcast_to(part < num_parts, (part.shape[0], RANKS))
    # P is rounded up to a power of two, as shapes of programs are.
    return triton.load_where(found.before, (number, part, jnp.int32(place), _candidates()), there)


def _candidates() -> jax.Array:
    return jnp.arange(RANKS, dtype=jnp.int32)[None]


def _load(row: Row, number: jax.Array, start: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Ranks and masses of tokens from `start` on; beyond the row ranks that come last, and 0."""
    token = start + jnp.arange(width, dtype=jnp.int32)
    there = token < row.scaled.shape[1]
    # The last part reaches beyond the row, whose next words are another row's.
    scaled = triton.load_where(row.scaled, (number, token), there)
    masses = triton.load_where(row.masses, (number, token), there)
    return jnp.where(there, ranks_of(scaled), jnp.uint32(NAN_RANK + 1)), masses


def _sums(values: list[jax.Array]) -> Sums:
    tokens, high, low = values
    return Sums(tokens.astype(jnp.int32), high, low)


def _scalars(wanted: Wanted, number: jax.Array) -> Wanted:
    return Wanted(*(each[number] for each in wanted))
