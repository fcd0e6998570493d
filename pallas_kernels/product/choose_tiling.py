"""How a product with quantised weights is cut into tiles."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.weights import INPUTS, ROWS, Weight
from pallas_kernels.product.call_shapes import CONSUMERS, MAX_PRODUCT, Shapes, Tiling

_SPARE_BYTES = 4096
"""Of shared memory, for what is not a stage."""
_MAX_SPLITS = 16
_MIN_BLOCKS_OF_SPLIT = 4
_WIDE = 64
"""Columns from which on one CTA fills an SM: with its registers."""
_LEAST_WIDTH = 96
_WIDTHS = (112, 128, 144, 160, 192, 224, 240, 256)
"""Columns of a tile of MXFP4, which is unpacked once for all of them; 96 are for fewer rows."""
_UNPACKING = 64
"""Columns whose products take as long as unpacking a tile."""
_COLUMNS_IN_REGISTERS = 336
"""Of f32, that a warpgroup's registers hold beside what it unpacks: sums and two pieces."""
_COLUMNS_OF_NEXT = 48
"""Of f32, that take as many registers as the next tile, while products run."""
_FEW_TILES_OF_SM = 8
"""Tiles of an SM up to which one CTA goes through them, however many stages they have."""
_MANY_TURNS = 64
"""Stages of a tile from which on starting a CTA and storing its results don't show."""
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
_TURNS_OF_ROUNDED = 4
"""CTAs an SM at most whose rows the kernel rounds, of a stack's products."""
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
    few = tiling.columns == shapes.core.min_columns and not tiling.programs
    few = few and rounding.fixed_bytes(tiling) <= _MAX_ROUNDED_BYTES
    takes = dtype == jnp.bfloat16 and weight.shape[-1] % INPUTS == 0 and not shapes.is_dense
    return rounding if few and takes else shapes


def plan_call(
    shapes: Shapes,
    dtype: DTypeLike,
    weight: Weight,
    num_rows: int,
    num_groups: int,
    *,
    may_split: bool,
    shares_items: bool = False,
) -> tuple[Shapes, Tiling]:
    """`choose_tiling` for a call whose kernel may round rows itself; see `round_in_kernel`.

    CTAs that follow each other on an SM do not: each would wait for its own rows.
    """
    choose = functools.partial(
        choose_tiling,
        num_rows=num_rows,
        num_groups=num_groups,
        may_split=may_split,
        shares_items=shares_items,
    )
    tiling = choose(shapes)
    at_once = _TURNS_OF_ROUNDED * shapes.core.device.num_sms
    if num_groups * shapes.num_ctas <= at_once or num_groups == 1:
        shapes = round_in_kernel(shapes, dtype, weight, tiling)
    return shapes, choose(shapes)


def choose_tiling(
    shapes: Shapes,
    num_rows: int,
    num_groups: int,
    *,
    may_split: bool,
    shares_items: bool = False,
) -> Tiling:
    """Stages that keep enough bytes on their way, and CTAs that fill the SMs.

    Args:
      shapes: sizes of the call.
      num_rows: rows of x that a weight of the stack multiplies, as far as they are known.
      num_groups: weights of the stack that multiply any.
      may_split: whether sums of several CTAs may be added up afterwards.
      shares_items: whether another product has the same list of items, so that how many rows there
        are decides alone how many a tile has.
    """
    columns = widest = _choose_columns(shapes, num_rows)
    is_cut = not may_split and not shares_items and cuts_rows(shapes, num_rows)
    if is_cut:
        columns = _cut_rows(shapes, widest, num_rows, num_groups)
    elif may_split and not shares_items:
        columns = _narrow(shapes, widest, num_rows, num_groups)
    fills = _sums_in_registers(shapes) and (widest >= _WIDE or is_cut)
    items = -(-num_rows // columns)
    num_tiles = shapes.num_ctas * num_groups * items
    is_short = _are_short(shapes, columns, num_tiles)
    splits = _choose_splits(shapes, num_tiles, fills=fills) if may_split else 1
    are_pairs = shapes.num_blocks // splits % 2 == 0 and columns <= _WIDE
    blocks = 2 if are_pairs and not is_short else 1
    piece = _choose_piece(shapes, columns) if fills and shapes.is_mxfp4 and columns > _WIDE else 0
    tiling = Tiling(columns=columns, blocks=blocks, stages=2, splits=splits, piece=piece)
    if shapes.rounds_rows and _room_for(shapes, tiling, fills=fills) < tiling.stages:
        tiling = dataclasses.replace(tiling, blocks=1)  # two CTAs fit an SM then
    are_few = num_tiles * splits <= _FEW_TILES_OF_SM * shapes.core.device.num_sms
    on_left = fills and shapes.is_fp8 and columns == CONSUMERS * ROWS
    if fills and (on_left or are_few or shapes.turns(tiling) < _MANY_TURNS):
        tiling = dataclasses.replace(
            tiling,
            programs=1,
            band=min(_MAX_BAND, items),
            packs=not on_left,
            rows_on_left=on_left,
        )
    stages = _choose_stages(shapes, tiling, fills=fills, few=on_left or is_short)
    return dataclasses.replace(tiling, stages=stages)


def _sums_in_registers(shapes: Shapes) -> bool:
    """Whether scaled products are added up in registers, which leave no room for a second CTA."""
    return shapes.is_quantized and not shapes.core.has_memory


def _choose_columns(shapes: Shapes, num_rows: int) -> int:
    """Rows of x that a tile multiplies; of many rows of MXFP4 those that take least time."""
    in_registers = _sums_in_registers(shapes)
    if in_registers and shapes.is_mxfp4 and num_rows > _WIDE:
        widths = _WIDTHS if num_rows > _LEAST_WIDTH else (_LEAST_WIDTH,)
        return min(widths, key=lambda width: -(-num_rows // width) * (width + _UNPACKING))
    columns, most = shapes.core.min_columns, MAX_PRODUCT
    if not in_registers or num_rows <= _WIDE:
        most //= shapes.num_parts
    while columns < min(num_rows, most):
        columns *= 2
    return columns


def cuts_rows(shapes: Shapes, num_rows: int) -> bool:
    """Whether tiles whose inputs are not split have few rows of x, so that more SMs have one.

    Of the fewest rows, which the kernel rounds, inputs are split; and of few, where it takes many
    tiles to give all SMs one, each of which reads the same weights.
    """
    most_items = shapes.core.device.num_sms // shapes.num_ctas
    least = _WIDE if most_items > _MOST_READERS else shapes.core.min_columns
    return _may_be_narrow(shapes) and num_rows > least


def _may_be_narrow(shapes: Shapes) -> bool:
    """Whether a tile may have fewer rows than fit; of rows in two parts that was not measured."""
    return _sums_in_registers(shapes) and shapes.is_fp8 and shapes.num_parts == 1


def _cut_rows(shapes: Shapes, columns: int, num_rows: int, num_groups: int) -> int:
    """The fewest rows of x of a tile with which all tiles run at once; else `columns`."""
    most_items = shapes.core.device.num_sms // (shapes.num_ctas * num_groups)
    if most_items == 0:
        return columns
    least = shapes.core.min_columns
    few = -(-num_rows // (most_items * least)) * least
    return few if few <= _WIDE else columns


def _narrow(shapes: Shapes, columns: int, num_rows: int, num_groups: int) -> int:
    """Fewer rows of x for a tile of block FP8, where SMs would have none or share its inputs.

    Sums of splits are added up in a launch of their own. So a narrow tile is split only where its
    rows would else be one tile.
    """
    num_tiles = shapes.num_ctas * num_groups * -(-num_rows // _WIDE)
    may_be = columns > _WIDE and _may_be_narrow(shapes)
    if not may_be or num_tiles > shapes.core.device.num_sms:
        return columns
    splits = _choose_splits(shapes, num_tiles, fills=True)
    short = shapes.num_blocks <= _MOST_OF_NARROW * splits
    return _WIDE if short and (splits == 1 or num_rows <= columns) else columns


def _are_short(shapes: Shapes, columns: int, num_tiles: int) -> bool:
    """Whether tiles follow each other on an SM, whose stages would hold all of the next one."""
    in_turns = columns == _WIDE and num_tiles > shapes.core.device.num_sms
    return in_turns and _may_be_narrow(shapes) and shapes.num_blocks <= _SHORT


def _choose_piece(shapes: Shapes, columns: int) -> int:
    """Columns of a product, of which registers hold two beside the sums.

    A tile that loads the next one takes three products or more: of two, the compiler would let none
    run while it loads.
    """
    most = min(_WIDE, (_COLUMNS_IN_REGISTERS - columns) // 2)
    if shapes.loads_ahead(columns):
        most = min((_COLUMNS_IN_REGISTERS - _COLUMNS_OF_NEXT - columns) // 2, columns // 3)
    return next(piece for piece in range(most // 8 * 8, 0, -8) if columns % piece == 0)


def _choose_splits(shapes: Shapes, num_tiles: int, *, fills: bool) -> int:
    """As many as give each SM a CTA; where one fills an SM, not more than run at once."""
    num_sms = shapes.core.device.num_sms
    most = num_sms // 2 if fills else num_sms - 1  # CTAs, whose number then doubles
    splits = 1
    while (
        num_tiles * splits <= most
        and splits < _MAX_SPLITS
        and shapes.num_blocks % (2 * splits) == 0
        and shapes.num_blocks // (2 * splits) >= _MIN_BLOCKS_OF_SPLIT
    ):
        splits *= 2
    return splits


def _choose_stages(shapes: Shapes, tiling: Tiling, *, fills: bool, few: bool) -> int:
    """As many as shared memory holds beside what else is there; or few of them.

    Where a CTA rounds rows, its last turn takes the stage of an earlier one: that is faster than a
    stage for each turn.
    """
    stages = min(_room_for(shapes, tiling, fills=fills), _MAX_STAGES)
    if not tiling.programs:
        stages = min(stages, shapes.turns(tiling) - shapes.rounds_rows)
    if few:
        stages = min(stages, _FEW_STAGES)
    elif stages > 3 and (tiling.programs or shapes.is_mxfp4):
        stages = 1 << (stages.bit_length() - 1)  # so that a stage's slot is a mask
    return max(2, stages)


def _room_for(shapes: Shapes, tiling: Tiling, *, fills: bool) -> int:
    """Stages that fit beside what else is in shared memory, of two CTAs unless one fills an SM."""
    ctas_of_sm = 1 if fills or tiling.columns > _WIDE else 2
    room = shapes.core.device.shared_memory_bytes // ctas_of_sm - _SPARE_BYTES
    return (room - shapes.fixed_bytes(tiling)) // shapes.stage_bytes(tiling)
