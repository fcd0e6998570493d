"""Which tiling a product gets: `plan` for a call, `choose_tiling` for sizes alone.

A tile's m is chosen first (`_choose_tile_m`, and fewer rows in `_cut_rows` and `_narrow`), then how
many CTAs share its inputs, then what a stage holds, then how many stages fit.

Where a size is bounded, for tiles of another one, such as 256 rows of FP8:

    _choose_tile_m         `most`, the largest tile_m of FP8 and dense weights; `_WIDTHS` of MXFP4
    choose_tiling          `on_left`: of `ROWS_ON_LEFT` rows x is the left operand, see `Tiling`
    mosaic_hopper_rows     a consumer has half of the rows, and `wgmma.begin` takes 64 on its left:
                           of 256 it has two products of each group
    expert_mlp/mosaic_gpu  rows to spare behind those of a shared expert: the largest tile's

Stages (`scratch.shared_bytes`), the list of items and the launch follow by themselves. Registers do
not: sums of 256 rows take half of a thread's, so that one product runs at a time.
docs/kernels/block_linear.md has what such tiles gained.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.common.weights import Weight
from pallas_kernels.product.call_shapes import Shapes, shapes_of
from pallas_kernels.product.scratch import shared_bytes
from pallas_kernels.product.tiling import (
    GROUP_K,
    MAX_MMA_ROWS,
    ROWS_ON_LEFT,
    TensorCore,
    Tiling,
)

_SPARE_BYTES = 4096
"""Of shared memory, for what is not a stage."""
_MAX_SPLITS = 16
_MIN_GROUPS_OF_SPLIT = 4
_WIDE = 64
"""tile_m from which on one CTA fills an SM: with its registers."""
_LEAST_WIDTH = 96
_WIDTHS = (112, 128, 144, 160, 192, 224, 240, 256)
"""tile_m of MXFP4, whose codes are unpacked once for all rows of a tile; 96 are for fewer rows."""
_UNPACKING = 64
"""Rows of x whose products take as long as unpacking a tile."""
_ROWS_IN_REGISTERS = 336
"""Of f32 products, that a warpgroup's registers hold beside what it unpacks: accumulators and two
products that run."""
_ROWS_OF_NEXT = 48
"""Of f32 products, that take as many registers as the next codes, while products run."""
_FEW_TILES_OF_SM = 8
"""Tiles of an SM up to which one CTA goes through them, however many stages they have."""
_MANY_K_ITERS = 64
"""k_iters of a tile from which on starting a CTA and storing its results don't show."""
_MOST_OF_NARROW = 32
"""Groups of inputs of a tile up to which one of fewer rows takes less time than a split one."""
_MOST_READERS = 4
"""Tiles of few rows that read the same weights in less time than split tiles read them once."""
_SHORT = 8
"""Groups of inputs of a tile up to which fewer stages than would hold the next one are faster."""
_MAX_BAND = 16
_MAX_STAGES = 12
_FEW_STAGES = 6
"""Of tiles whose left operand is rows of x, and of short ones."""
_TURNS_OF_ROUNDED = 12
"""CTAs an SM at most whose rows the kernel rounds, of a stack's products: each rounds anew."""
_MAX_ROUNDED_BYTES = 80 << 10
"""Of shared memory, for rows of x that a kernel rounds itself."""


def round_in_kernel(shapes: Shapes, dtype: DTypeLike, weight: Weight, tiling: Tiling) -> Shapes:
    """The sizes of a call whose kernel rounds its rows of x itself, where it can and should.

    Args:
      shapes: sizes of the call.
      dtype: of x; it can take bf16.
      weight: one of the weights, whose inputs it takes in whole groups.
      tiling: how the call is cut. As each CTA of it rounds rows anew, those have to be few, and
        they have to fit beside the stages. CTAs that go through tiles would wait for each one's.
    """
    rounding = dataclasses.replace(shapes, rounds_rows=True)
    few = tiling.tile_m == shapes.core.min_tile_m and not tiling.persistent
    few = few and _bytes_of(rounding, tiling)[0] <= _MAX_ROUNDED_BYTES
    takes = dtype == jnp.bfloat16 and weight.shape[-1] % GROUP_K == 0 and not shapes.is_dense
    return rounding if few and takes else shapes


def plan(
    weights: Sequence[Weight],
    dtype: DTypeLike,
    *,
    num_rows: int,
    num_weights: int,
    may_split: bool,
    is_gated: bool = False,
    shares_items: bool = False,
    tiling: Tiling | None = None,
    core: TensorCore | None = None,
) -> tuple[Shapes, Tiling]:
    """Sizes of a product and how it is cut.

    Args:
      weights: stacks of one format, with the same inputs.
      dtype: of x.
      num_rows: see `choose_tiling`.
      num_weights: see `choose_tiling`.
      may_split: see `choose_tiling`.
      is_gated: see `Shapes`.
      shares_items: see `choose_tiling`.
      tiling: the one to use; None chooses.
      core: the tensor core; None is `choose_core`'s.
    """
    shapes = shapes_of(*weights, is_gated=is_gated, core=core)
    if tiling is not None:
        return round_in_kernel(shapes, dtype, weights[0], tiling), tiling
    return plan_call(
        shapes,
        dtype,
        weights[0],
        num_rows,
        num_weights,
        may_split=may_split,
        shares_items=shares_items,
    )


def plan_call(
    shapes: Shapes,
    dtype: DTypeLike,
    weight: Weight,
    num_rows: int,
    num_weights: int,
    *,
    may_split: bool,
    shares_items: bool = False,
) -> tuple[Shapes, Tiling]:
    """`choose_tiling` for a call whose kernel may round rows itself; see `round_in_kernel`.

    Where many CTAs follow each other on an SM they do not, since each waits for its own rows: a
    launch that rounds them once then takes less. Arguments are as of `plan` and `choose_tiling`.
    """
    choose = functools.partial(
        choose_tiling,
        num_rows=num_rows,
        num_weights=num_weights,
        may_split=may_split,
        shares_items=shares_items,
    )
    tiling = choose(shapes)
    at_once = _TURNS_OF_ROUNDED * shapes.core.device.num_sms
    if num_weights * shapes.tiles_n <= at_once or num_weights == 1:
        shapes = round_in_kernel(shapes, dtype, weight, tiling)
    return shapes, choose(shapes)


def choose_tiling(
    shapes: Shapes,
    num_rows: int,
    num_weights: int,
    *,
    may_split: bool,
    shares_items: bool = False,
) -> Tiling:
    """Stages that keep enough bytes on their way, and CTAs that fill the SMs.

    Args:
      shapes: sizes of the call.
      num_rows: rows of x that a weight of the stack multiplies, as far as they are known.
      num_weights: weights of the stack that multiply any.
      may_split: whether sums of several CTAs may be added up afterwards.
      shares_items: whether another product has the same list of items, so that how many rows there
        are decides alone how many a tile has.
    """
    # As many rows as fit, so that a weight is read by as few tiles as there can be; then fewer,
    # where SMs would have nothing to do.
    tile_m = widest = _choose_tile_m(shapes, num_rows)
    is_cut = not may_split and not shares_items and cuts_rows(shapes, num_rows)
    if is_cut:
        tile_m = _cut_rows(shapes, widest, num_rows, num_weights)
    elif may_split and not shares_items:
        tile_m = _narrow(shapes, widest, num_rows, num_weights)
    # One CTA an SM, by its registers: it then gets all of the shared memory, and going through
    # tiles hides what starting and storing take.
    fills = _sums_in_registers(shapes) and (widest >= _WIDE or is_cut)
    items = pl.cdiv(num_rows, tile_m)
    num_tiles = shapes.tiles_n * num_weights * items
    is_short = _are_short(shapes, tile_m, num_tiles)
    split_k = _choose_split_k(shapes, num_tiles, fills=fills) if may_split else 1
    # With two groups in a stage half as many barriers are waited for.
    are_pairs = shapes.k_groups // split_k % 2 == 0 and tile_m <= _WIDE
    tile_k = shapes.group_k * (2 if are_pairs and not is_short else 1)
    # Only tiles that are unpacked once for many rows multiply them in slices smaller than need be.
    in_turns = fills and shapes.is_mxfp4 and tile_m > _WIDE
    mma_rows = _choose_mma_rows(shapes, tile_m) if in_turns else 0
    tiling = Tiling(tile_m, tile_k, stages=2, split_k=split_k, mma_rows=mma_rows)
    if shapes.rounds_rows and _room_for(shapes, tiling, fills=fills) < tiling.stages:
        tiling = dataclasses.replace(tiling, tile_k=shapes.group_k)  # two CTAs fit an SM then
    are_few = num_tiles * split_k <= _FEW_TILES_OF_SM * shapes.core.device.num_sms
    on_left = fills and shapes.is_fp8 and tile_m == ROWS_ON_LEFT
    if fills and (on_left or are_few or shapes.k_iters(tiling) < _MANY_K_ITERS):
        tiling = dataclasses.replace(
            tiling,
            persistent=1,
            band=min(_MAX_BAND, items),
            packed_stores=not on_left,
            swap_ab=not on_left,
        )
    stages = _choose_stages(shapes, tiling, fills=fills, few=on_left or is_short)
    return dataclasses.replace(tiling, stages=stages)


def _sums_in_registers(shapes: Shapes) -> bool:
    """Whether scaled products are added up in registers, which leave no room for a second CTA."""
    return shapes.is_quantized and not shapes.core.has_tmem


def _choose_tile_m(shapes: Shapes, num_rows: int) -> int:
    """Rows of x that a tile multiplies; of many rows of MXFP4 those that take least time."""
    in_registers = _sums_in_registers(shapes)
    if in_registers and shapes.is_mxfp4 and num_rows > _WIDE:
        widths = _WIDTHS if num_rows > _LEAST_WIDTH else (_LEAST_WIDTH,)
        return min(widths, key=lambda width: pl.cdiv(num_rows, width) * (width + _UNPACKING))
    # Rows in two terms have two products of each group: half of the rows then take as many
    # registers.
    tile_m, most = shapes.core.min_tile_m, MAX_MMA_ROWS
    if not in_registers or num_rows <= _WIDE:
        most //= shapes.num_terms
    while tile_m < min(num_rows, most):
        tile_m *= 2
    return tile_m


def cuts_rows(shapes: Shapes, num_rows: int) -> bool:
    """Whether tiles whose inputs are not split have few rows of x, so that more SMs have one.

    Of the fewest rows, which the kernel rounds, inputs are split; and of few, where it takes many
    tiles to give all SMs one, each of which reads the same weights.
    """
    most_items = shapes.core.device.num_sms // shapes.tiles_n
    least = _WIDE if most_items > _MOST_READERS else shapes.core.min_tile_m
    return _may_be_narrow(shapes) and num_rows > least


def _may_be_narrow(shapes: Shapes) -> bool:
    """Whether a tile may have fewer rows than fit; of rows in two terms that was not measured."""
    return _sums_in_registers(shapes) and shapes.is_fp8 and shapes.num_terms == 1


def _cut_rows(shapes: Shapes, tile_m: int, num_rows: int, num_weights: int) -> int:
    """The fewest rows of x of a tile with which all tiles run at once; else `tile_m`."""
    most_items = shapes.core.device.num_sms // (shapes.tiles_n * num_weights)
    if most_items == 0:
        return tile_m
    least = shapes.core.min_tile_m
    few = pl.cdiv(num_rows, most_items * least) * least
    return few if few <= _WIDE else tile_m


def _narrow(shapes: Shapes, tile_m: int, num_rows: int, num_weights: int) -> int:
    """Fewer rows of x for a tile of block FP8, where SMs would have none or share its inputs.

    Sums of splits are added up in a launch of their own. So a narrow tile is split only where its
    rows would else be one tile.
    """
    num_tiles = shapes.tiles_n * num_weights * pl.cdiv(num_rows, _WIDE)
    may_be = tile_m > _WIDE and _may_be_narrow(shapes)
    if not may_be or num_tiles > shapes.core.device.num_sms:
        return tile_m
    split_k = _choose_split_k(shapes, num_tiles, fills=True)
    short = shapes.k_groups <= _MOST_OF_NARROW * split_k
    return _WIDE if short and (split_k == 1 or num_rows <= tile_m) else tile_m


def _are_short(shapes: Shapes, tile_m: int, num_tiles: int) -> bool:
    """Whether tiles follow each other on an SM, whose stages would hold all of the next one."""
    in_turns = tile_m == _WIDE and num_tiles > shapes.core.device.num_sms
    return in_turns and _may_be_narrow(shapes) and shapes.k_groups <= _SHORT


def _choose_mma_rows(shapes: Shapes, tile_m: int) -> int:
    """Rows of x of a product, of which registers hold two beside the accumulators.

    A tile that loads the next one takes three products or more: of two, the compiler would let none
    run while it loads.
    """
    most = min(_WIDE, (_ROWS_IN_REGISTERS - tile_m) // 2)
    if shapes.loads_ahead(tile_m):
        most = min((_ROWS_IN_REGISTERS - _ROWS_OF_NEXT - tile_m) // 2, tile_m // 3)
    return next(mma_rows for mma_rows in range(most // 8 * 8, 0, -8) if tile_m % mma_rows == 0)


def _choose_split_k(shapes: Shapes, num_tiles: int, *, fills: bool) -> int:
    """As many as give each SM a CTA; where one fills an SM, not more than run at once."""
    num_sms = shapes.core.device.num_sms
    most = num_sms // 2 if fills else num_sms - 1  # CTAs, whose number then doubles
    split_k = 1
    while (
        num_tiles * split_k <= most
        and split_k < _MAX_SPLITS
        and shapes.k_groups % (2 * split_k) == 0
        and shapes.k_groups // (2 * split_k) >= _MIN_GROUPS_OF_SPLIT
    ):
        split_k *= 2
    return split_k


def _choose_stages(shapes: Shapes, tiling: Tiling, *, fills: bool, few: bool) -> int:
    """As many as shared memory holds beside what else is there; or few of them.

    Where a CTA rounds rows, its last k_iter takes the stage of an earlier one: that is faster than
    a stage for each k_iter.
    """
    stages = min(_room_for(shapes, tiling, fills=fills), _MAX_STAGES)
    if not tiling.persistent:
        stages = min(stages, shapes.k_iters(tiling) - shapes.rounds_rows)
    if few:
        stages = min(stages, _FEW_STAGES)
    elif stages > 3 and (tiling.persistent or shapes.is_mxfp4):
        stages = pl.next_power_of_2(stages + 1) // 2  # so that `Work.stage_of` is a mask
    return max(2, stages)


def _room_for(shapes: Shapes, tiling: Tiling, *, fills: bool) -> int:
    """`stages_that_fit`, of two CTAs unless one fills an SM."""
    return stages_that_fit(shapes, tiling, 1 if fills or tiling.tile_m > _WIDE else 2)


def stages_that_fit(shapes: Shapes, tiling: Tiling, ctas_of_sm: int = 1) -> int:
    """Stages that fit beside what else is in the shared memory of so many CTAs."""
    room = shapes.core.device.shared_memory_bytes // ctas_of_sm - _SPARE_BYTES
    fixed, of_stage = _bytes_of(shapes, tiling)
    return (room - fixed) // of_stage


def _bytes_of(shapes: Shapes, tiling: Tiling) -> tuple[int, int]:
    """Bytes of shared memory that do not depend on the stages, and those of each stage."""
    # Fixed bytes and bytes of a stage follow from the sums for one and for two stages.
    with_one, with_two = (
        shared_bytes(shapes, dataclasses.replace(tiling, stages=stages)) for stages in (1, 2)
    )
    return 2 * with_one - with_two, with_two - with_one
