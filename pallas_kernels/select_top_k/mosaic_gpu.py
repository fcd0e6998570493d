"""Top-k by radix selection through Mosaic GPU, for Hopper and Blackwell.

One program: one tile of a row, its ranks in registers of up to four warpgroups.

    scores -> ranks (u32, the least is best) -> counts of their first 11 bits, of the next 11 among
    those that agree with the k-th best so far, of the last 10; until the k best are told apart
    -> a bitmap of the selected -> their numbers, ascending

A row of several tiles takes a second launch, which selects from the lists of the first: the best k
of a row are among the best k of its tiles, and tiles in order keep equal scores in order. A third
launch only where those lists do not fit a tile. What is done depends on shapes; scores only end the
search early, lengths only leave out what is not visible, and no order of threads shows in the
result, since counts are sums and lists are placed by prefix sums.

Bytes: 4 per visible entry (per entry, in rows of exactly one tile, which are read without waiting
for their length), 16 * k per tile of a longer row, 4 * k per row. Bound by latency up to some 130
programs: barriers and prefix sums, some 0.6 us a digit; then by instructions, 15 per entry. Takes k
up to `MAX_K`, any number of entries below 2**29. Has not run on a Blackwell card.

Takes 3.8, 5.6 and 8.7 us for 512 of 64 x 4096, 64 x 16384 and 1 x 262144 on an H200. Roads not
taken there, in one run beside this but for a list that was cleared first, 3.9, 5.6, 8.9:
- among up to 32 that agree with the k-th best in 22 bits, comparing instead of the last digit: 3.9,
  6.0, 9.1;
- that, and numbers straight to device memory, twice the code: 3.9, 7.1, 11.4, though 3.8 where 4.0
  for 1024 of 64 x 4096;
and beside an earlier form of this (3.4, 5.9, 9.4 for its kernels alone, before what a digit doesn't
count went to a spare word, where a condition had become a branch around each atomic):
- one warpgroup, whose code of 128 entries a thread comes too slowly: 5.4, 13.5, 23.7;
- eight warpgroups 3.7, 6.1, 9.7; two 3.7, 7.0, 11.3;
- tiles of 8192 where lists are then as long as a full tile: 9.1 at 1 x 262144, but three launches
  for 1024 of them (13.3, two take 11.4), and 11.4 for 8 x 262144 where this takes 10.3;
- Triton, which has no atomics on shared memory: a bisection takes some 20 reductions over the block
  where this takes two or three counts (a trial: 215 for 1 x 262144, 60 for 64 x 32768).

Source: architecture.md section 4.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.select_top_k import load_ranks, ptx, radix_steps

Ref = Any
MAX_TILE = 16384
SHORT_TILE = 8192
"""Of rows whose lists are then no longer than this."""
MAX_K = MAX_TILE // 2
MAX_GROUPS = 4
_ENTRIES_PER_THREAD = 4
_CHUNK = ptx.THREADS
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Lowest bit and width of each."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One launch.

    Attributes:
      tile: entries of a program, a power of two.
      num_tiles: of a row.
      span: entries of the row of scores that a program's stand for.
      num_groups: warpgroups of a program.
    """

    tile: int
    num_tiles: int
    span: int
    num_groups: int


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How rows of scores are cut.

    Attributes:
      tile: entries of a program of the first launch, a power of two, more than k.
    """

    tile: int


def choose_tiling(num_entries: int, k: int) -> Tiling:
    """The largest tile, or a shorter one whose lists are then no longer than it."""
    tile = min(MAX_TILE, _power_of_two(num_entries))
    lists = _ceil_div(num_entries, SHORT_TILE) * _round_up(k, _CHUNK)
    if num_entries > tile and lists <= SHORT_TILE:
        tile = SHORT_TILE
    return Tiling(tile)


def choose_stages(num_entries: int, k: int) -> tuple[Stage, ...]:
    """The launches for rows of `num_entries`: as many as it takes to come to one tile."""
    padded = _round_up(k, _CHUNK)
    tile = choose_tiling(num_entries, k).tile
    stages = [Stage(tile, _ceil_div(num_entries, tile), tile, _num_groups(tile))]
    while (last := stages[-1]).num_tiles > 1:
        lists = min(last.num_tiles, MAX_TILE // padded)
        tile = _power_of_two(lists * padded)
        num_tiles = _ceil_div(last.num_tiles, lists)
        stages.append(Stage(tile, num_tiles, last.span * lists, _num_groups(tile)))
    return tuple(stages)


def select_top_k(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
    """See `select_op.select_top_k`.

    Raises:
      NotImplementedError: k is more than `MAX_K`.
    """
    if k > MAX_K:
        raise NotImplementedError(
            f"'mosaic_gpu' selects at most {MAX_K} entries, got {k=}; pass backend='reference'"
        )
    sources, previous = [scores], None
    for stage in choose_stages(scores.shape[1], k):
        sources = _launch(sources, visible, k, stage, previous)
        previous = stage
    return sources[0][:, :k]


def _launch(
    sources: list[jax.Array], visible: jax.Array, k: int, stage: Stage, previous: Stage | None
) -> list[jax.Array]:
    """From [scores], or a previous stage's [numbers, ranks], to [numbers, ranks] or [numbers].

    Numbers i32 and ranks u32 are [T, num_tiles * K], K being k rounded up to a multiple of 128:
    a list per tile, -1 and `ABSENT` beyond its end.
    """
    num_rows, padded = visible.shape[0], _round_up(k, _CHUNK)
    num_groups = 1 if interpreting() else stage.num_groups
    numbers = jax.ShapeDtypeStruct((num_rows, stage.num_tiles * padded), jnp.int32)
    ranks = jax.ShapeDtypeStruct(numbers.shape, jnp.uint32)

    def kernel(*refs: Ref) -> None:
        _select_kernel(*refs, k=k, stage=stage, previous=previous, num_groups=num_groups)

    kernel.__name__ = f"select_top_{k}_of_{stage.tile}" + ("_listed" if previous else "")
    return plgpu.kernel(
        kernel,
        out_type=[numbers] if stage.num_tiles == 1 else [numbers, ranks],
        grid=(stage.num_tiles, num_rows),  # the last may exceed 65535
        grid_names=("tile", "row"),
        num_threads=num_groups,
        thread_name="group",
        scratch_types=[
            *(plgpu.SMEM(((1 << bits) + radix_steps.SPARE,), jnp.int32) for _, bits in _DIGITS),
            plgpu.SMEM((padded,), jnp.int32),
            plgpu.SMEM((2, stage.tile // ptx.LANES), jnp.uint32),
            plgpu.SMEM((radix_steps.SCRATCH,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(visible, *sources)


def _select_kernel(
    visible_gmem: Ref,
    *refs: Ref,
    k: int,
    stage: Stage,
    previous: Stage | None,
    num_groups: int,
) -> None:
    num_sources, num_scratch = 1 if previous is None else 2, len(_DIGITS) + 3
    *numbers_gmem, source_gmem = refs[:num_sources]
    outputs_gmem, scratch = refs[num_sources:-num_scratch], refs[-num_scratch:]
    *counts_smem, listed_smem, bitmap_smem, scratch_smem = scratch
    row, tile, group = (lax.axis_index(name) for name in ("row", "tile", "group"))
    padded, width = listed_smem.shape[0], source_gmem.shape[1]

    visible = jnp.clip(visible_gmem[row] - tile * stage.span, 0, stage.span)
    if previous is None:
        start = tile * stage.tile
        count = visible = jnp.minimum(visible, width - start)
    else:
        start = tile * (stage.span // previous.span * padded)
        lists = lax.div(visible + (previous.span - 1), jnp.int32(previous.span))
        count = jnp.minimum(lists * padded, width - start)
    everything = visible <= k

    def clear_counts() -> None:
        for counts in counts_smem:
            radix_steps.clear(counts, num_groups=num_groups)

    ranks = _load(source_gmem, row, start, count, stage.tile, num_groups, meanwhile=clear_counts)

    @pl.when(jnp.logical_not(everything))
    def _():
        radix_steps.synchronize()
        limit, need = _search(ranks, counts_smem, scratch_smem, k, num_groups)
        for with_ties in (False, True):
            list_selected = functools.partial(
                radix_steps.list_in_order,
                *(ranks, limit, need, listed_smem, bitmap_smem, scratch_smem),
                num_groups=num_groups,
                with_ties=with_ties,
            )
            pl.when((need > 0) == with_ties)(list_selected)

    def write(chunk: jax.Array) -> None:
        entries = pl.ds(chunk * _CHUNK, _CHUNK)
        layout = ptx.strided(_CHUNK)
        listed = plgpu.load(listed_smem.at[entries], layout=layout, optimized=False)
        entry = chunk * _CHUNK + plgpu.broadcasted_iota(jnp.int32, (_CHUNK,), 0, layout=layout)
        place = entry
        if previous is not None:  # of lists that are full, each as long as what it stands for
            list_number = lax.div(entry, jnp.int32(previous.span))
            place = entry + list_number * (padded - previous.span)
        place = jnp.where(everything, place, listed)
        place = jnp.where(entry < jnp.minimum(visible, k), place, -1)
        if previous is None:
            numbers = jnp.where(place >= 0, place + start, -1)
        else:
            numbers = load_ranks.gather(numbers_gmem[0], row, start, place)
            numbers = lax.bitcast_convert_type(numbers, jnp.int32)
        out = pl.ds(tile * padded + chunk * _CHUNK, _CHUNK)
        outputs_gmem[0].at[row, out][...] = numbers
        if len(outputs_gmem) == 2:
            gathered = load_ranks.gather(source_gmem, row, start, place)
            outputs_gmem[1].at[row, out][...] = gathered

    for first in range(0, padded // _CHUNK, num_groups):
        chunk = first + group
        pl.when(chunk < padded // _CHUNK)(functools.partial(write, chunk))


def _load(
    source_gmem: Ref,
    row: jax.Array,
    start: jax.Array,
    count: jax.Array,
    tile: int,
    num_groups: int,
    *,
    meanwhile: Callable[[], None],
) -> jax.Array:
    """Ranks of a tile's first `count` entries, `ABSENT` beyond; `meanwhile` needs no `count`."""
    load = functools.partial(
        load_ranks.load_ranks, source_gmem, row, start, n=tile, num_groups=num_groups
    )
    if source_gmem.shape[1] == tile:  # does not wait for `count`
        loaded = load(count=None)
        meanwhile()
        return lax.cond(count < tile, lambda: load_ranks.keep_first(loaded, count), lambda: loaded)
    meanwhile()
    return lax.cond(count < tile, lambda: load(count=count), lambda: load(count=None))


def _search(
    ranks: jax.Array, counts_smem: list[Ref], scratch_smem: Ref, k: int, num_groups: int
) -> tuple[jax.Array, jax.Array]:
    """Limit and need of the best k, digit by digit, as `select_steps.narrow` describes them."""
    limit, need = jnp.uint32(0), jnp.int32(k)
    for (shift, bits), counts in zip(_DIGITS, counts_smem, strict=True):
        narrow = functools.partial(
            radix_steps.narrow,
            ranks,
            counts_smem=counts,
            scratch_smem=scratch_smem,
            shift=shift,
            bits=bits,
            num_groups=num_groups,
        )
        limit, need = lax.cond(need > 0, narrow, lambda *settled: settled, limit, need)
    return limit, need


def _num_groups(tile: int) -> int:
    return max(1, min(MAX_GROUPS, tile // (ptx.THREADS * _ENTRIES_PER_THREAD)))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b


def _power_of_two(n: int) -> int:
    return max(ptx.THREADS, 1 << (n - 1).bit_length())
