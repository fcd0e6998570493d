"""The steps of a selection in shared memory: narrow it by a digit of the ranks, list it in order.

Called by all warpgroups of a CTA, each with its share of the ranks as `load_ranks.py` lays
them out: a warp's vote on a register is 32 neighbouring bits of a bitmap. Ranks are u32, the least
is the best. In the interpreter there is one warpgroup, and each step is the same in jnp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp

from pallas_kernels.common.backend import interpreting
from pallas_kernels.select_top_k import ptx

Ref = Any
SCRATCH = ptx.MAX_WARPS + 2
"""Words of shared memory that the steps work in: sums of warps, and two results."""
_RESULTS = 4 * ptx.MAX_WARPS
SPARE = 4
"""Words of a digit's counts beyond them, where what is not counted goes."""


def clear(ref: Ref, *, num_warpgroups: int) -> None:
    """Stores zeros in i32[n] of shared memory; `synchronize` before it is read."""
    if interpreting():
        ref[...] = jnp.zeros(ref.shape, jnp.int32)
        return
    (n,) = ref.shape

    @ptx.inline(arg_types=(ptx.REF,))
    def store(_, ref):
        # Neighbouring threads clear neighbouring words, each bank once.
        first = ptx.ptx(
            ".reg .b32 t; mov.u32 t, %tid.x; mad.lo.u32 $0, t, 4, $1;",
            [ptx.shared_address(ref)],
            ptx.i32(),
        )
        for i in range(0, n, num_warpgroups * ptx.THREADS):
            ptx.ptx(
                f".reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, {n - i};"
                f"@p st.shared.b32 [$0 + {4 * i}], 0;",
                [first],
            )

    store(ref)


def synchronize() -> None:
    """Waits until all threads of the CTA come here; what they stored is seen by all."""
    if interpreting():
        return

    @ptx.inline()
    def wait(_):
        ptx.ptx(ptx.BARRIER)  # the hardware's, for all of the CTA's threads

    wait()


def narrow(
    ranks: jax.Array,
    limit: jax.Array,
    need: jax.Array,
    counts_smem: Ref,
    scratch_smem: Ref,
    *,
    shift: int,
    bits: int,
    num_warpgroups: int,
) -> tuple[jax.Array, jax.Array]:
    """Finds one more digit of the rank at which the selection ends.

    Before and after it: every rank less than `limit` is selected, and of those that begin with its
    digits so far the best `need`. Where those are all that there are, `limit` moves past them and
    nothing is needed any more.

    Args:
      ranks: u32[n / G], `strided`.
      limit: u32[], zeros from bit shift + bits down.
      need: i32[], 1 or more, of which there are as many.
      counts_smem: i32[2**bits + SPARE], zeros, seen by all threads.
      scratch_smem: i32[SCRATCH].
      shift: lowest bit of the digit.
      bits: width of the digit; 2**bits is a multiple of 128 * G.
      num_warpgroups: G.

    Returns:
      limit u32[] and need i32[], the same in all threads.
    """
    if interpreting():
        return _narrow_in_jnp(ranks, limit, need, shift=shift, bits=bits)

    @ptx.inline(
        arg_types=(ptx.strided(ranks.shape[0]), ptx.SCALAR, ptx.SCALAR, ptx.REF, ptx.REF),
        return_type=(
            ptx.scalar_type(jnp.uint32),
            ptx.scalar_type(jnp.int32),
        ),
    )
    def count_and_find(_, ranks, limit, need, counts, scratch):
        limit, need = ptx.value_of(limit), ptx.value_of(need)
        counts, scratch = ptx.shared_address(counts), ptx.shared_address(scratch)
        _count(ranks, limit, counts, shift=shift, bits=bits)
        # All warps' counts are in before one thread reads them.
        ptx.ptx(ptx.BARRIER)
        _find(limit, need, counts, scratch, shift, per_thread=(1 << bits) // num_warpgroups // 128)
        # `_find` ends with a barrier: what its one thread stored is everyone's.
        results = ptx.ptx_many(f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {_RESULTS}];", [scratch], 2)
        return ptx.scalar_of(results[0], signed=False), ptx.scalar_of(results[1], signed=True)

    return count_and_find(ranks, limit, need, counts_smem, scratch_smem)


def list_in_order(
    ranks: jax.Array,
    limit: jax.Array,
    need: jax.Array,
    listed_smem: Ref,
    bitmap_smem: Ref,
    scratch_smem: Ref,
    *,
    num_warpgroups: int,
    with_ties: bool,
) -> None:
    """Lists the entries of ranks below `limit` and the first `need` of those at it, ascending.

    Args:
      ranks: u32[n / G], `strided`; n / (128 * G) is a power of two.
      limit: u32[].
      need: i32[].
      listed_smem: i32[K], at least as long as the list; not written beyond it.
      bitmap_smem: u32[2, n // 32].
      scratch_smem: i32[SCRATCH].
      num_warpgroups: G.
      with_ties: whether `need` may be more than 0.
    """
    (share,) = ranks.shape
    if interpreting():
        at_limit = ranks == limit
        taken = (ranks < limit) | (at_limit & (jnp.cumsum(at_limit.astype(jnp.int32)) <= need))
        to = jnp.where(taken, jnp.cumsum(taken.astype(jnp.int32)) - 1, listed_smem.shape[0])
        entry = jnp.arange(share, dtype=jnp.int32)
        listed_smem[...] = listed_smem[...].at[to].set(entry, mode="drop")
        return
    relations = ("lt", "eq") if with_ties else ("lt",)
    plane_bytes = share * num_warpgroups // 8

    @ptx.inline(arg_types=(ptx.strided(share), ptx.SCALAR, ptx.SCALAR, ptx.REF, ptx.REF, ptx.REF))
    def mark_and_list(_, ranks, limit, need, listed, bitmap, scratch):
        limit, need = ptx.value_of(limit), ptx.value_of(need)
        listed, bitmap, scratch = (ptx.shared_address(ref) for ref in (listed, bitmap, scratch))
        _mark(ranks, limit, bitmap, relations, plane_bytes)
        # The bitmap is whole before threads read the words of others.
        ptx.ptx(ptx.BARRIER)
        per_thread = share // ptx.THREADS
        planes = [_own_bits(bitmap, i * plane_bytes, per_thread) for i in range(len(relations))]
        _list(planes, need, listed, scratch, per_thread)
        # And the list before any thread reads it.
        ptx.ptx(ptx.BARRIER)

    mark_and_list(ranks, limit, need, listed_smem, bitmap_smem, scratch_smem)


def _narrow_in_jnp(
    ranks: jax.Array, limit: jax.Array, need: jax.Array, *, shift: int, bits: int
) -> tuple[jax.Array, jax.Array]:
    above = shift + bits
    digits = (ranks >> shift) & jnp.uint32((1 << bits) - 1)  # u32[n]
    same = ranks >> above == limit >> above if above < 32 else jnp.full(ranks.shape, True)
    counts = jnp.zeros(1 << bits, jnp.int32).at[digits].add(same.astype(jnp.int32))
    totals = jnp.cumsum(counts)  # i32[2**bits]
    digit = jnp.sum((totals < need).astype(jnp.int32))  # of the need-th
    left = need - (totals[digit] - counts[digit])  # how many of the digit's own
    all_taken = left == counts[digit]
    limit = limit + (digit.astype(jnp.uint32) << shift)
    beyond = limit + jnp.uint32(1 << shift)
    beyond = jnp.where(beyond == 0, ~jnp.uint32(0), beyond)
    limit = jnp.where(all_taken, beyond, limit)
    return limit, jnp.where(all_taken, 0, left)


def _count(ranks: mgpu.FragmentedArray, limit: Any, counts: Any, *, shift: int, bits: int) -> None:
    """Counts digits of the ranks that agree with `limit` above them; others go beyond the last.

    A condition would be a branch around each.
    """
    # Relative to the limit a rank that agrees has the digit alone, and any other one is too large
    # (or wraps round): `min` sends it to the spare word. Atomics, since threads of all warpgroups
    # count.
    for rank in ptx.registers_of(ranks):
        ptx.ptx(
            f".reg .b32 t; sub.u32 t, $0, $1; shr.u32 t, t, {shift}; min.u32 t, t, {1 << bits};"
            "mad.lo.u32 t, t, 4, $2; red.shared.add.u32 [t], 1;",
            [rank, limit, counts],
        )


def _find(limit: Any, need: Any, counts: Any, scratch: Any, shift: int, *, per_thread: int) -> None:
    """The thread among whose digits the `need`-th entry is stores limit and need; a barrier."""
    # A thread's digits are neighbours, loaded up to four at a time.
    width = min(4, per_thread)
    loads = "".join(
        f"ld.shared.v{width}.b32 {{{', '.join(f'${i + j}' for j in range(width))}}}, [a + {4 * i}];"
        if width > 1
        else f"ld.shared.b32 ${i}, [a + {4 * i}];"
        for i in range(0, per_thread, width)
    )
    own = ptx.ptx_many(
        f".reg .b32 a; mov.u32 a, %tid.x;mad.lo.u32 a, a, {4 * per_thread}, ${per_thread}; {loads}",
        [counts],
        per_thread,
    )
    # How many entries have digits below this thread's: a barrier of the whole CTA.
    before = ptx.exclusive_sum(ptx.add(own), scratch)
    # left: how many are needed of the digit; over: how many more of it there are.
    search = "".join(
        f"mov.u32 before, total; add.u32 total, total, ${4 + i};"
        "setp.lt.s32 p, before, $1; setp.ge.and.s32 p, total, $1, p;"
        f"@p mov.u32 digit, {i}; @p sub.s32 left, $1, before;"
        "@p sub.s32 over, total, $1; @p mov.u32 found, 1;"
        for i in range(per_thread)
    )
    ptx.ptx(
        ".reg .pred p, all; .reg .b32 total, before, digit, left, over, found, t;"
        "mov.u32 total, $0; mov.u32 found, 0; mov.u32 digit, 0; mov.u32 left, 0; mov.u32 over, 0;"
        f"{search} setp.ne.u32 p, found, 0; setp.eq.s32 all, over, 0;"
        f"mov.u32 t, %tid.x; mad.lo.u32 digit, t, {per_thread}, digit;"
        "@all add.u32 digit, digit, 1; @all mov.u32 left, 0;"
        f"shl.b32 digit, digit, {shift}; add.u32 digit, digit, $2;"
        "setp.eq.and.u32 all, digit, 0, all; @all mov.u32 digit, -1;"
        # Stored by the one thread that found the digit; after the barrier all threads may load it.
        f"@p st.shared.v2.b32 [$3 + {_RESULTS}], {{digit, left}}; {ptx.BARRIER}",
        [before, need, limit, scratch, *own],
    )


def _mark(
    ranks: mgpu.FragmentedArray,
    limit: Any,
    bitmap: Any,
    relations: tuple[str, ...],
    plane_bytes: int,
) -> None:
    """One bitmap for each relation of ranks to `limit`, a bit per entry."""
    registers = ptx.registers_of(ranks)
    # A warp's vote on register r is the word of entries 128 r + 32 w on of its warpgroup, by
    # `strided`.
    words = len(registers) * ptx.WARPS
    own_word = ptx.ptx(
        ".reg .b32 t, g; mov.u32 t, %tid.x; shr.u32 g, t, 7; shr.u32 t, t, 5;"
        f"and.b32 t, t, {ptx.WARPS - 1}; mad.lo.u32 g, g, {words}, t; mad.lo.u32 $0, g, 4, $1;",
        [bitmap],
        ptx.i32(),
    )
    for r, rank in enumerate(registers):
        for plane, relation in enumerate(relations):
            ptx.ptx(
                ".reg .pred p; .reg .b32 vote, lane; mov.u32 lane, %laneid;"
                f"setp.{relation}.u32 p, $0, $1; vote.sync.ballot.b32 vote, p, -1;"
                "setp.eq.u32 p, lane, 0;"
                f"@p st.shared.b32 [$2 + {plane * plane_bytes + 4 * ptx.WARPS * r}], vote;",
                [rank, limit, own_word],
            )


def _own_bits(bitmap: Any, plane_start: int, per_thread: int) -> tuple[Any, ...]:
    """The bits of the `per_thread` neighbouring entries that this thread lists, in words."""
    if per_thread < ptx.LANES:
        return ptx.ptx_many(
            ".reg .b32 a, b; mov.u32 a, %tid.x;"
            f"mul.lo.u32 a, a, {per_thread}; and.b32 b, a, 31; shr.u32 a, a, 5;"
            f"mad.lo.u32 a, a, 4, $1; ld.shared.b32 $0, [a + {plane_start}];"
            f"shr.u32 $0, $0, b; and.b32 $0, $0, {(1 << per_thread) - 1};",
            [bitmap],
            1,
        )
    num_words = per_thread // ptx.LANES
    return ptx.ptx_many(
        f".reg .b32 a; mov.u32 a, %tid.x; mad.lo.u32 a, a, {4 * num_words}, ${num_words};"
        + "".join(f"ld.shared.b32 ${i}, [a + {plane_start + 4 * i}];" for i in range(num_words)),
        [bitmap],
        num_words,
    )


def _list(
    planes: list[tuple[Any, ...]], need: Any, listed: Any, scratch: Any, per_thread: int
) -> None:
    """Every thread stores the numbers of its marked entries behind those of threads before it."""
    below, with_ties = planes[0], len(planes) == 2
    at = planes[1] if with_ties else [mgpu.utils.c(0, ptx.i32())] * len(below)
    # Two counts in one word, of less than 2**16 each: below the limit, and at it above bit 16.
    counts = [
        ptx.ptx(
            ".reg .b32 a, b; popc.b32 a, $1; popc.b32 b, $2; mad.lo.u32 $0, b, 65536, a;",
            words,
            ptx.i32(),
        )
        for words in zip(below, at, strict=True)
    ]
    before = ptx.exclusive_sum(ptx.add(counts), scratch)
    # Of the ties before a thread's own no more than `need` were listed: so many words it moves on.
    ties = ptx.ptx("shr.u32 $0, $1, 16;", [before], ptx.i32())
    address = ptx.ptx(
        ".reg .b32 a, b; and.b32 a, $1, 65535; min.s32 b, $2, $3; add.s32 a, a, b;"
        "mad.lo.u32 $0, a, 4, $4;",
        [before, ties, need, listed],
        ptx.i32(),
    )
    skip_unneeded = (
        "and.b32 entry, lowest, $3; setp.ne.u32 tie, entry, 0; @tie add.s32 ties, ties, 1;"
        "setp.gt.and.s32 p, ties, $6, tie; @p bra NEXT${:uid};"
    )
    # From the lowest bit of a word up, so that entries ascend.
    for i, words in enumerate(zip(below, at, strict=True)):
        address, ties = ptx.ptx_many(
            ".reg .pred p, tie; .reg .b32 word, lowest, first, entry, place, ties;"
            "or.b32 word, $2, $3; mov.u32 place, $4; mov.u32 ties, $5; mov.u32 first, %tid.x;"
            f"mad.lo.u32 first, first, {per_thread}, {ptx.LANES * i};"
            "NEXT${:uid}: setp.eq.u32 p, word, 0; @p bra DONE${:uid};"
            "neg.s32 lowest, word; and.b32 lowest, lowest, word; xor.b32 word, word, lowest;"
            + (skip_unneeded if with_ties else "")
            + "bfind.u32 entry, lowest; add.u32 entry, entry, first;"
            "st.shared.b32 [place], entry; add.u32 place, place, 4; bra NEXT${:uid};"
            "DONE${:uid}: mov.u32 $0, place; mov.u32 $1, ties;",
            [*words, address, ties, need],
            2,
        )
