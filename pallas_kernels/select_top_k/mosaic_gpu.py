"""Top-k by radix selection through Mosaic GPU, for Hopper and Blackwell.

One CTA: one tile of a row, its ranks in registers of up to four warpgroups.

    scores -> ranks (u32, the least is best) -> counts of their first 11 bits, of the next 11 among
    those that agree with the k-th best so far, of the last 10; until the k best are told apart
    -> a bitmap of the selected -> their numbers, ascending

A row of several tiles takes a second launch, which selects from the lists of the first: the best k
of a row are among the best k of its tiles, and tiles in order keep equal scores in order. A third
launch only where those lists do not fit a tile. What is done depends on shapes; scores only end the
search early, and no order of threads shows in the result.

Bytes: 4 per visible entry, 16 * k per tile of a longer row, 4 * k per row. Bound by latency up to
some 130 CTAs, then by instructions, 15 per entry. Takes k up to `MAX_K`, any number of entries
below 2**29. It has not run on a Blackwell card. Measurements and roads not taken:
docs/kernels/select_top_k.md. Source: architecture.md section 4.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.backend import interpreting
from pallas_kernels.select_top_k import load_ranks, ptx, radix_steps

Ref = Any
MAX_TILE = 16384
SHORT_TILE = 8192
"""Tile of rows whose lists are then no longer than this."""
MAX_K = MAX_TILE // 2
MAX_WARPGROUPS = 4
_ENTRIES_PER_THREAD = 4
_CHUNK = ptx.THREADS
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Lowest bit and width of each."""


class Operands(NamedTuple):
    """Arrays that a launch reads, and in the kernel their refs in device memory.

    Attributes:
      visible: i32[T].
      source: f32[T, E] scores, or u32 ranks of the lists of the stage before.
      numbers: i32[T, E], entries of those lists; None where the source is scores.
    """

    visible: Any
    numbers: Any
    source: Any


class Outputs(NamedTuple):
    """Lists of a launch, one per tile of k rounded up to a multiple of 128 places.

    Attributes:
      numbers: i32[T, num_tiles * K], entries, -1 beyond the end of a list.
      ranks: u32, likewise, `ABSENT` beyond the end; None where the row is one tile.
    """

    numbers: Any
    ranks: Any


class Scratch(NamedTuple):
    """What a CTA has to itself."""

    counts_smem: Any
    listed_smem: Any
    bitmap_smem: Any
    steps_smem: Any


@dataclasses.dataclass(frozen=True)
class Stage:
    """One launch.

    Attributes:
      tile: entries of a CTA, a power of two.
      num_tiles: tiles of a row.
      span: entries of the row of scores that a CTA's stand for.
      num_warpgroups: warpgroups of a CTA.
    """

    tile: int
    num_tiles: int
    span: int
    num_warpgroups: int


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How rows of scores are cut.

    Attributes:
      tile: entries of a CTA of the first launch, a power of two, more than k.
    """

    tile: int


def choose_tiling(num_entries: int, k: int) -> Tiling:
    """The largest tile, or a shorter one whose lists are then no longer than it."""
    tile = min(MAX_TILE, _least_tile(num_entries))
    lists = pl.cdiv(num_entries, SHORT_TILE) * _round_up(k, _CHUNK)
    if num_entries > tile and lists <= SHORT_TILE:
        tile = SHORT_TILE
    return Tiling(tile)


def choose_stages(num_entries: int, k: int) -> tuple[Stage, ...]:
    """The launches for rows of `num_entries`: as many as it takes to come to one tile."""
    padded = _round_up(k, _CHUNK)
    tile = choose_tiling(num_entries, k).tile
    stages = [Stage(tile, pl.cdiv(num_entries, tile), tile, _num_warpgroups(tile))]
    while (last := stages[-1]).num_tiles > 1:
        lists = min(last.num_tiles, MAX_TILE // padded)
        tile = _least_tile(lists * padded)
        num_tiles = pl.cdiv(last.num_tiles, lists)
        stages.append(Stage(tile, num_tiles, last.span * lists, _num_warpgroups(tile)))
    return tuple(stages)


def find_obstacle(k: int) -> str | None:
    """Why the kernel can't select so many, as the rest of a sentence; None where it can."""
    if not hasattr(mgpu.utils, "inline_ptx"):
        return f"needs jax 0.11.2 or newer, got jax {jax.__version__}"  # for PTX in kernels
    return f"selects at most {MAX_K} entries, got {k=}" if k > MAX_K else None


def select_top_k(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
    """See `op.select_top_k`; k is at most `MAX_K`."""
    operands = Operands(visible=visible, numbers=None, source=scores)
    lists = previous = None
    for stage in choose_stages(scores.shape[1], k):
        lists = _launch(operands, k, stage, previous)
        operands = operands._replace(numbers=lists.numbers, source=lists.ranks)
        previous = stage
    assert lists is not None
    return lists.numbers[:, :k]


def _launch(operands: Operands, k: int, stage: Stage, previous: Stage | None) -> Outputs:
    """From scores, or from a previous stage's lists, to this stage's."""
    num_rows, padded = operands.visible.shape[0], _round_up(k, _CHUNK)
    num_warpgroups = 1 if interpreting() else stage.num_warpgroups
    shape = num_rows, stage.num_tiles * padded
    lists = Outputs(
        numbers=jax.ShapeDtypeStruct(shape, jnp.int32),
        ranks=jax.ShapeDtypeStruct(shape, jnp.uint32) if stage.num_tiles > 1 else None,
    )
    scratch = Scratch(
        counts_smem=[
            plgpu.SMEM(((1 << bits) + radix_steps.SPARE,), jnp.int32) for _, bits in _DIGITS
        ],
        listed_smem=plgpu.SMEM((padded,), jnp.int32),
        bitmap_smem=plgpu.SMEM((2, stage.tile // ptx.LANES), jnp.uint32),
        steps_smem=plgpu.SMEM((radix_steps.SCRATCH,), jnp.int32),
    )

    def kernel(inputs: Operands, outputs: Outputs, scratch: Scratch) -> None:
        _select_kernel(
            inputs,
            outputs,
            scratch,
            k=k,
            stage=stage,
            previous=previous,
            num_warpgroups=num_warpgroups,
        )

    kernel.__name__ = f"select_top_{k}_of_{stage.tile}" + ("_listed" if previous else "")
    [lists] = plgpu.kernel(
        kernel,
        out_type=[lists],
        grid=(stage.num_tiles, num_rows),  # the last may exceed 65535
        grid_names=("tile", "row"),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(operands)
    return lists


def _select_kernel(
    inputs: Operands,
    outputs: Outputs,
    scratch: Scratch,
    *,
    k: int,
    stage: Stage,
    previous: Stage | None,
    num_warpgroups: int,
) -> None:
    listed_smem, steps_smem = scratch.listed_smem, scratch.steps_smem
    row, tile, warpgroup = (lax.axis_index(name) for name in ("row", "tile", "warpgroup"))
    padded, width = listed_smem.shape[0], inputs.source.shape[1]  # K of a list, E of a row

    # What this CTA selects from: `count` entries of the source from `start` on, among which lists
    # have gaps; they stand for `visible` entries of the row of scores.
    visible = jnp.clip(inputs.visible[row] - tile * stage.span, 0, stage.span)
    if previous is None:
        start = tile * stage.tile
        count = visible = jnp.minimum(visible, width - start)
    else:
        start = tile * (stage.span // previous.span * padded)
        # Of the lists before, those of tiles that have anything visible.
        lists = lax.div(visible + (previous.span - 1), jnp.int32(previous.span))
        count = jnp.minimum(lists * padded, width - start)
    everything = visible <= k

    def clear_counts() -> None:
        for counts in scratch.counts_smem:
            radix_steps.clear(counts, num_warpgroups=num_warpgroups)

    # Counts are cleared while ranks are on their way from device memory.
    ranks = _load(
        inputs.source, row, start, count, stage.tile, num_warpgroups, meanwhile=clear_counts
    )

    @pl.when(jnp.logical_not(everything))
    def _():
        # All threads see zeros in the counts before any of them counts.
        radix_steps.synchronize()
        # All warpgroups take each step together, and get the same limit.
        limit, need = _search(ranks, scratch.counts_smem, steps_smem, k, num_warpgroups)
        # Where no ties at the limit are to be counted, one bitmap is enough.
        for with_ties in (False, True):
            list_selected = functools.partial(
                radix_steps.list_in_order,
                *(ranks, limit, need, listed_smem, scratch.bitmap_smem, steps_smem),
                num_warpgroups=num_warpgroups,
                with_ties=with_ties,
            )
            pl.when((need > 0) == with_ties)(list_selected)

    def write(chunk: jax.Array) -> None:
        entries = pl.ds(chunk * _CHUNK, _CHUNK)
        layout = ptx.strided(_CHUNK)
        # The list was complete for all threads when `list_in_order` came back.
        listed = plgpu.load(listed_smem.at[entries], layout=layout, optimized=False)
        entry = chunk * _CHUNK + plgpu.broadcasted_iota(jnp.int32, (_CHUNK,), 0, layout=layout)
        in_source = entry
        if previous is not None:  # of lists that are full, each as long as what it stands for
            list_number = lax.div(entry, jnp.int32(previous.span))
            in_source = entry + list_number * (padded - previous.span)
        # Where no more is visible than is wanted, nothing was searched: all of it is the selection.
        in_source = jnp.where(everything, in_source, listed)
        # A list ends at the k-th, or where nothing more is visible; -1 from there on.
        in_source = jnp.where(entry < jnp.minimum(visible, k), in_source, -1)
        if previous is None:
            numbers = jnp.where(in_source >= 0, in_source + start, -1)
        else:
            numbers = load_ranks.load_listed(inputs.numbers, row, start, in_source)
            numbers = lax.bitcast_convert_type(numbers, jnp.int32)
        out = pl.ds(tile * padded + chunk * _CHUNK, _CHUNK)
        outputs.numbers.at[row, out][...] = numbers
        if outputs.ranks is not None:
            listed_ranks = load_ranks.load_listed(inputs.source, row, start, in_source)
            outputs.ranks.at[row, out][...] = listed_ranks

    for first in range(0, padded // _CHUNK, num_warpgroups):
        chunk = first + warpgroup
        pl.when(chunk < padded // _CHUNK)(functools.partial(write, chunk))


def _load(
    source_gmem: Ref,
    row: jax.Array,
    start: jax.Array,
    count: jax.Array,
    tile: int,
    num_warpgroups: int,
    *,
    meanwhile: Callable[[], None],
) -> jax.Array:
    """Ranks of a tile's first `count` entries, `ABSENT` beyond; `meanwhile` needs no `count`."""
    load = functools.partial(
        load_ranks.load_ranks, source_gmem, row, start, n=tile, num_warpgroups=num_warpgroups
    )
    if source_gmem.shape[1] == tile:  # does not wait for `count`
        loaded = load(count=None)
        meanwhile()
        return lax.cond(count < tile, lambda: load_ranks.keep_first(loaded, count), lambda: loaded)
    meanwhile()
    return lax.cond(count < tile, lambda: load(count=count), lambda: load(count=None))


def _search(
    ranks: jax.Array, counts_smem: list[Ref], steps_smem: Ref, k: int, num_warpgroups: int
) -> tuple[jax.Array, jax.Array]:
    """Limit and need of the best k, digit by digit, as `radix_steps.narrow` describes them."""
    limit, need = jnp.uint32(0), jnp.int32(k)  # nothing is settled
    for (shift, bits), counts in zip(_DIGITS, counts_smem, strict=True):
        narrow = functools.partial(
            radix_steps.narrow,
            ranks,
            counts_smem=counts,
            scratch_smem=steps_smem,
            shift=shift,
            bits=bits,
            num_warpgroups=num_warpgroups,
        )
        # All threads agree, so that all or none of them come to the step's barriers.
        limit, need = lax.cond(need > 0, narrow, lambda *settled: settled, limit, need)
    return limit, need


def _num_warpgroups(tile: int) -> int:
    return max(1, min(MAX_WARPGROUPS, tile // (ptx.THREADS * _ENTRIES_PER_THREAD)))


def _round_up(a: int, b: int) -> int:
    return pl.cdiv(a, b) * b


def _least_tile(n: int) -> int:
    """The smallest tile that holds so many entries."""
    return max(ptx.THREADS, pl.next_power_of_2(n))
