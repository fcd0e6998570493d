"""How a selection reads device memory: ranks of a row's entries, and single entries by number.

Functions of a CTA of G warpgroups, called by all of them. n entries are a multiple of 128 * G,
of which warpgroup g holds the n / G from g * n / G on, and thread t of it those at t, t + 128, ...
of these (`ptx.strided`). In the interpreter G is 1 and each is the same in jnp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import interpreting
from pallas_kernels.select_top_k import ptx

Ref = Any
ABSENT = (1 << 32) - 1
"""The rank of what is no entry, and of NaN in a row of scores, where what is absent comes last."""
NAN = ABSENT - 1
"""The rank of NaN in lists, which may have gaps."""


def load_ranks(
    source: Ref,
    row: jax.Array,
    start: jax.Array,
    count: jax.Array | None,
    n: int,
    *,
    num_warpgroups: int,
) -> jax.Array:
    """Ranks of the first `count` entries of a row from `start` on; `ABSENT` for the others.

    Args:
      source: scores f32[T, E] or ranks u32[T, E] in device memory.
      row: i32[].
      start: i32[].
      count: i32[], start + count is at most E; None takes all n, which are there.
      n: number of entries.
      num_warpgroups: G.

    Returns:
      u32[n / G], `strided`: this warpgroup's.
    """
    if interpreting():
        entry = jnp.arange(n, dtype=jnp.int32)
        ranks = _rank(source[row][jnp.minimum(start + entry, source.shape[1] - 1)])
        return ranks if count is None else keep_first(ranks, count)
    share = n // num_warpgroups
    counts = () if count is None else (count,)

    @ptx.inline(
        arg_types=(ptx.REF, ptx.SCALAR, ptx.SCALAR, *(ptx.SCALAR for _ in counts)),
        return_type=ptx.ranks_type(share),
    )
    def load(_, source, row, start, *counts):
        # A thread's first entry; the others follow 128 apart, so that a warp loads 128 bytes that
        # lie together.
        entry = ptx.own_entry(share)
        args = [
            ptx.ptx(
                ".reg .b32 a; .reg .b64 offset; add.u32 a, $2, $3; mul.wide.u32 offset, a, 4;"
                "add.s64 $0, $1, offset;",
                [ptx.row_address(source, ptx.value_of(row)), entry, ptx.value_of(start)],
                ptx.i64(),
            ),
            *(ptx.ptx("sub.s32 $0, $1, $2;", [ptx.value_of(c), entry], ptx.i32()) for c in counts),
        ]
        registers = []
        for first in range(0, share, ptx.THREADS):
            # Nobody writes the source in this launch: the read-only path. Beyond `count` nothing is
            # read, and the rank is `ABSENT`, all ones.
            code = f"ld.global.nc.b32 $0, [$1 + {4 * first}];"
            if counts:
                code = f".reg .pred p; setp.gt.s32 p, $2, {first}; mov.b32 $0, -1; @p {code}"
            registers.append(ptx.ptx(code, args, ptx.i32()))
        if ptx.holds_scores(source):
            registers = [ptx.rank_of(bits) for bits in registers]
        return ptx.array_of(registers, share)

    return load(source, row, start, *counts)


def keep_first(ranks: jax.Array, count: jax.Array) -> jax.Array:
    """The ranks of a CTA's first `count` entries, and `ABSENT` for the others.

    Args:
      ranks: u32[n / G], `strided`.
      count: i32[].

    Returns:
      u32[n / G], `strided`.
    """
    (share,) = ranks.shape
    if interpreting():
        return jnp.where(jnp.arange(share) < count, ranks, jnp.uint32(ABSENT))

    @ptx.inline(
        arg_types=(ptx.strided(share), ptx.SCALAR),
        return_type=ptx.ranks_type(share),
    )
    def keep(_, ranks, count):
        args = [ptx.value_of(count), ptx.own_entry(share)]
        # How many of its entries a thread keeps, counted from its first one on.
        left = ptx.ptx("sub.s32 $0, $1, $2;", args, ptx.i32())
        kept = [
            ptx.ptx(
                f".reg .pred p; setp.gt.s32 p, $2, {r * ptx.THREADS}; selp.b32 $0, $1, -1, p;",
                [rank, left],
                ptx.i32(),
            )
            for r, rank in enumerate(ptx.registers_of(ranks))
        ]
        return ptx.array_of(kept, share)

    return keep(ranks, count)


def load_listed(source: Ref, row: jax.Array, start: jax.Array, index: jax.Array) -> jax.Array:
    """Entries start + index of a row, scores as ranks; `ABSENT` where the index is -1.

    Args:
      source: scores f32[T, E], or u32 or i32[T, E], in device memory.
      row: i32[].
      start: i32[].
      index: i32[n], `strided`.

    Returns:
      u32[n], the bits, `strided`; a score of NaN is `NAN`, to be told from what is absent.
    """
    (n,) = index.shape
    if interpreting():
        loaded = source[row][jnp.maximum(start + index, 0)]
        ranks = _rank(loaded)
        if loaded.dtype == jnp.float32:
            ranks = jnp.minimum(ranks, jnp.uint32(NAN))
        return jnp.where(index >= 0, ranks, jnp.uint32(ABSENT))

    @ptx.inline(
        arg_types=(ptx.REF, ptx.SCALAR, ptx.SCALAR, ptx.strided(n)),
        return_type=ptx.ranks_type(n),
    )
    def load(_, source, row, start, index):
        first, start = ptx.row_address(source, ptx.value_of(row)), ptx.value_of(start)
        registers = []
        for entry in ptx.registers_of(index):
            # Any entry of the row, wherever the list says: no two lanes need be neighbours.
            loaded = ptx.ptx(
                ".reg .pred p; .reg .b32 entry; .reg .b64 address;"
                "setp.ge.s32 p, $2, 0; add.s32 entry, $2, $3; mul.wide.s32 address, entry, 4;"
                "add.s64 address, address, $1; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [address];",
                [first, entry, start],
                ptx.i32(),
            )
            if ptx.holds_scores(source):
                loaded = ptx.ptx(
                    # NaN would be taken for what is absent, in lists that have gaps: it moves one
                    # down.
                    f".reg .pred p; .reg .b32 t; min.u32 t, $1, {NAN};"
                    "setp.ge.s32 p, $2, 0; selp.b32 $0, t, -1, p;",
                    [ptx.rank_of(loaded), entry],
                    ptx.i32(),
                )
            registers.append(loaded)
        return ptx.array_of(registers, n)

    return load(source, row, start, index)


def _rank(loaded: jax.Array) -> jax.Array:
    """What `ptx.rank_of` makes of scores; other bits as they are."""
    bits = jax.lax.bitcast_convert_type(loaded, jnp.uint32)
    if loaded.dtype != jnp.float32:
        return bits
    # Of the bits of a score: a larger positive one has a smaller rank, a negative one its own bits;
    # both zeros are the same.
    top = jnp.uint32(1 << 31)
    ranks = jnp.where(bits >= top, bits, ~(bits | top))
    ranks = jnp.where(bits == 0, top, ranks)
    return jnp.where(jnp.isnan(loaded), jnp.uint32(ABSENT), ranks)
