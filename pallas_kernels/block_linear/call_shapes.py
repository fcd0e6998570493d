"""Sizes of a product with quantised weights, which calls its kernel serves, how it is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.backend import compute_capability
from pallas_kernels.common.pending import Pending
from pallas_kernels.common.weights import INPUTS, MXFP4, ROWS, BlockFP8, Weight
from pallas_kernels.gpu import devices

CONSUMERS = 2
"""Warpgroups that multiply; each has a tile of 64 rows of a weight."""
BUFFERS = 2
"""Groups of inputs whose products tensor memory holds at once, on Blackwell."""
DENSE_INPUTS = 64
"""Inputs of a group of a dense weight: as many bytes as `INPUTS` of E4M3."""
_SPARE_BYTES = 4096
"""Of shared memory, for what is not a stage."""
_MAX_SPLITS = 16
_MIN_BLOCKS_OF_SPLIT = 4
_MAX_PRODUCT = 128
"""Columns of a product in registers, 64 of a thread's f32; 256 would leave none for the sums."""
WIDE = 64
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
_LOADS_AHEAD = range(128, 193)
"""Columns of tiles that do; see `Shapes.loads_ahead`."""
_FEW_TILES_OF_SM = 8
"""Tiles of an SM up to which one CTA goes through them, however many stages they have."""
_MANY_TURNS = 64
"""Stages of a tile from which on starting a CTA and storing its results don't show."""
_MAX_BAND = 16
_MAX_STAGES = 12
_STAGES_OF_ROWS = 6
"""Of tiles whose left operand is rows of x."""
_TURNS_OF_ROUNDED = 4
"""CTAs an SM at most whose rows the kernel rounds, of a stack's products."""
_MAX_ROUNDED_BYTES = 80 << 10
"""Of shared memory, for rows of x that a kernel rounds itself."""


@dataclasses.dataclass(frozen=True)
class TensorCore:
    """How a GPU multiplies.

    Attributes:
      device: that calls are cut for.
      min_columns: rows of x that a tile multiplies at least.
      has_memory: whether products arrive in tensor memory (tcgen05), or in registers (wgmma).
    """

    device: devices.Device
    min_columns: int
    has_memory: bool


HOPPER = TensorCore(devices.H200, min_columns=8, has_memory=False)
BLACKWELL = TensorCore(devices.B200, min_columns=16, has_memory=True)


def choose_core() -> TensorCore:
    """That of the GPU that a function traced now runs on; Hopper's where there is none."""
    is_blackwell = devices.find_device(compute_capability()) == devices.B200
    return BLACKWELL if is_blackwell else HOPPER


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
      columns: rows of x that a tile multiplies at once, a multiple of `TensorCore.min_columns`.
      blocks: groups of inputs of a stage.
      stages: stages in shared memory, there or on their way.
      splits: CTAs that share the inputs of a tile, whose sums are added up afterwards.
      programs: CTAs of an SM that go through tiles, one after the other; 0 is a CTA for each tile.
        For one product, on Hopper.
      band: items of a band, through which such CTAs go before the next, for each outputs in turn.
      packs: whether results are stored two outputs at a time, where they have 16 bits.
      rows_on_left: whether 64 rows of x are the left operand of a consumer's product, and the tiles
        of the weights the right one; see `mosaic_hopper_rows`. Of FP8, 128 columns, on Hopper.
      piece: columns of a product, of which a tile takes one after the other; 0 is as many as fit.
    """

    columns: int
    blocks: int
    stages: int
    splits: int = 1
    programs: int = 0
    band: int = 1
    packs: bool = False
    rows_on_left: bool = False
    piece: int = 0

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First column and columns of each product; sums of many take several."""
        count = self.columns // self.piece if self.piece else -(-self.columns // _MAX_PRODUCT)
        return [(i * (self.columns // count), self.columns // count) for i in range(count)]

    @property
    def exchanges_in_turns(self) -> bool:
        """Whether what gate and up exchange takes the same memory more than once."""
        return self.programs > 0 or len(self.pieces) > 1


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of a call.

    Attributes:
      num_blocks: groups of `inputs` inputs.
      tiles: tiles of 64 outputs of each weight.
      num_parts: parts of a row of x.
      is_gated: whether the weights are a gate and an up projection, a consumer each; else their
        tiles follow each other.
      format: of the weights, "fp8", "mxfp4" or "dense".
      rounds_rows: whether the kernel rounds rows of x itself, each CTA those that it multiplies.
      core: the tensor core.
    """

    num_blocks: int
    tiles: tuple[int, ...]
    num_parts: int
    is_gated: bool
    format: str
    rounds_rows: bool = False
    core: TensorCore = HOPPER

    @property
    def is_fp8(self) -> bool:
        """Whether weights are block FP8."""
        return self.format == "fp8"

    @property
    def is_mxfp4(self) -> bool:
        """Whether weights are MXFP4."""
        return self.format == "mxfp4"

    @property
    def is_dense(self) -> bool:
        """Whether weights are in bf16."""
        return self.format == "dense"

    @property
    def is_quantized(self) -> bool:
        """Whether weights are codes with scales."""
        return not self.is_dense

    @property
    def inputs(self) -> int:
        """Inputs of a group, 128 bytes of an operand."""
        return DENSE_INPUTS if self.is_dense else INPUTS

    @property
    def joins_tiles(self) -> bool:
        """Whether both consumers' tiles are one operand as they lie."""
        return self.core.has_memory and not self.is_mxfp4

    @property
    def num_tiles(self) -> int:
        """Tiles of 64 outputs of the result."""
        return self.tiles[0] if self.is_gated else sum(self.tiles)

    @property
    def num_ctas(self) -> int:
        """CTAs along the outputs."""
        return -(-sum(self.tiles) // CONSUMERS)

    def loads_ahead(self, columns: int) -> bool:
        """Whether a tile of so many columns loads the next one of MXFP4 while its products run.

        Fewer columns gain nothing by it; more columns, or rows in two parts, leave no registers.
        """
        return self.is_mxfp4 and self.num_parts == 1 and columns in _LOADS_AHEAD

    def turns(self, tiling: Tiling) -> int:
        """Stages of a tile."""
        return self.num_blocks // (tiling.blocks * tiling.splits)

    def stage_bytes(self, tiling: Tiling) -> int:
        """Of shared memory: codes and scales of the weights, and of x."""
        weights = CONSUMERS * ROWS * (INPUTS // 2 + 4 if self.is_mxfp4 else INPUTS)
        if self.rounds_rows:
            return tiling.blocks * weights
        scales = 0 if self.is_dense else 4 * scale_columns(tiling.columns)
        rows = self.num_parts * (tiling.columns * INPUTS + scales)
        return tiling.blocks * (weights + rows)

    def fixed_bytes(self, tiling: Tiling) -> int:
        """Of shared memory: what gate and up exchange, rows rounded here, unpacked tiles."""
        exchanged = 4 * ROWS * tiling.pieces[0][1] if self.is_gated else 0
        if self.rounds_rows:
            groups = self.num_blocks // tiling.splits * self.num_parts
            exchanged += groups * (tiling.columns * INPUTS + 4 * scale_columns(tiling.columns))
        unpacks = self.is_mxfp4 and self.core.has_memory
        return exchanged + (BUFFERS * CONSUMERS * ROWS * (INPUTS + 4) if unpacks else 0)


def scale_columns(columns: int) -> int:
    """Scales of x that are copied at a time, in multiples of the 128 bytes that a copy takes."""
    return -(-columns // 32) * 32


def shapes_of(*weights: Weight, is_gated: bool = False, core: TensorCore | None = None) -> Shapes:
    """Sizes of a product with these weights; None is `choose_core`'s."""
    weight = weights[0]
    is_dense = not isinstance(weight, BlockFP8 | MXFP4)
    return Shapes(
        num_blocks=-(-weight.shape[-1] // (DENSE_INPUTS if is_dense else INPUTS)),
        tiles=tuple(-(-w.shape[-2] // ROWS) for w in weights),
        num_parts=1 if is_dense or weight.activations == "fp8" else 2,
        is_gated=is_gated,
        format="dense" if is_dense else "mxfp4" if isinstance(weight, MXFP4) else "fp8",
        core=core or choose_core(),
    )


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
) -> tuple[Shapes, Tiling]:
    """`choose_tiling` for a call whose kernel may round rows itself; see `round_in_kernel`.

    CTAs that follow each other on an SM do not: each would wait for its own rows.
    """
    tiling = choose_tiling(shapes, num_rows, num_groups, may_split=may_split)
    at_once = _TURNS_OF_ROUNDED * shapes.core.device.num_sms
    if num_groups * shapes.num_ctas <= at_once or num_groups == 1:
        shapes = round_in_kernel(shapes, dtype, weight, tiling)
    return shapes, choose_tiling(shapes, num_rows, num_groups, may_split=may_split)


def choose_tiling(shapes: Shapes, num_rows: int, num_groups: int, *, may_split: bool) -> Tiling:
    """Stages that keep enough bytes on their way, and CTAs that fill the SMs.

    Args:
      shapes: sizes of the call.
      num_rows: rows of x that a weight of the stack multiplies, as far as they are known.
      num_groups: weights of the stack that multiply any.
      may_split: whether sums of several CTAs may be added up afterwards.
    """
    columns = _choose_columns(shapes, num_rows)
    fills = _sums_in_registers(shapes) and columns >= WIDE
    blocks = 2 if shapes.num_blocks % 2 == 0 and columns <= WIDE else 1
    items = -(-num_rows // columns)
    num_tiles = shapes.num_ctas * num_groups * items
    splits = _choose_splits(shapes, blocks, num_tiles, fills=fills) if may_split else 1
    piece = _choose_piece(shapes, columns) if fills and shapes.is_mxfp4 and columns > WIDE else 0
    tiling = Tiling(columns=columns, blocks=blocks, stages=2, splits=splits, piece=piece)
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
    return dataclasses.replace(tiling, stages=_choose_stages(shapes, tiling, fills=fills))


def _sums_in_registers(shapes: Shapes) -> bool:
    """Whether scaled products are added up in registers, which leave no room for a second CTA."""
    return shapes.is_quantized and not shapes.core.has_memory


def _choose_columns(shapes: Shapes, num_rows: int) -> int:
    """Rows of x that a tile multiplies; of many rows of MXFP4 those that take least time."""
    in_registers = _sums_in_registers(shapes)
    if in_registers and shapes.is_mxfp4 and num_rows > WIDE:
        widths = _WIDTHS if num_rows > _LEAST_WIDTH else (_LEAST_WIDTH,)
        return min(widths, key=lambda width: -(-num_rows // width) * (width + _UNPACKING))
    columns, most = shapes.core.min_columns, _MAX_PRODUCT
    if not in_registers or num_rows <= WIDE:
        most //= shapes.num_parts
    while columns < min(num_rows, most):
        columns *= 2
    return columns


def _choose_piece(shapes: Shapes, columns: int) -> int:
    """Columns of a product, of which registers hold two beside the sums.

    A tile that loads the next one takes three products or more: of two, the compiler would let none
    run while it loads.
    """
    most = min(WIDE, (_COLUMNS_IN_REGISTERS - columns) // 2)
    if shapes.loads_ahead(columns):
        most = min((_COLUMNS_IN_REGISTERS - _COLUMNS_OF_NEXT - columns) // 2, columns // 3)
    return next(piece for piece in range(most // 8 * 8, 0, -8) if columns % piece == 0)


def _choose_splits(shapes: Shapes, blocks: int, num_tiles: int, *, fills: bool) -> int:
    """As many as give each SM a CTA; where one fills an SM, not more than run at once."""
    num_sms = shapes.core.device.num_sms
    most = num_sms // 2 if fills else num_sms - 1  # CTAs, whose number then doubles
    splits = 1
    while (
        num_tiles * splits <= most
        and splits < _MAX_SPLITS
        and shapes.num_blocks % (2 * splits * blocks) == 0
        and shapes.num_blocks // (2 * splits) >= _MIN_BLOCKS_OF_SPLIT
    ):
        splits *= 2
    return splits


def _choose_stages(shapes: Shapes, tiling: Tiling, *, fills: bool) -> int:
    """As many as shared memory holds beside what else is there, and a tile has."""
    ctas_of_sm = 1 if fills or tiling.columns > WIDE else 2
    room = shapes.core.device.shared_memory_bytes // ctas_of_sm - _SPARE_BYTES
    stages = min((room - shapes.fixed_bytes(tiling)) // shapes.stage_bytes(tiling), _MAX_STAGES)
    if not tiling.programs:
        stages = min(stages, shapes.turns(tiling))
    if tiling.rows_on_left:
        stages = min(stages, _STAGES_OF_ROWS)
    elif stages > 3 and (tiling.programs or shapes.is_mxfp4):
        stages = 1 << (stages.bit_length() - 1)  # so that a stage's slot is a mask
    return max(2, stages)


def can_join(weights: Sequence[Weight]) -> bool:
    """Whether one launch can serve them all, where the kernel serves each."""
    return len(set(map(_kind_of, weights))) == 1 and all(
        weight.shape[-2] % ROWS == 0 for weight in weights[:-1]
    )


def find_obstacle(x: jax.Array | Pending, *weights: Weight) -> str | None:
    """Why the kernels can't serve a call, as the rest of a sentence; None where they can."""
    capability = compute_capability()
    if len({_kind_of(weight) for weight in weights}) > 1:
        return "takes weights of one format and one form of activations, got several"
    for weight in weights:
        if isinstance(weight, BlockFP8) and (weight.shape[-1] % INPUTS or weight.shape[-2] % ROWS):
            return f"takes FP8 weights of multiples of {ROWS} x {INPUTS}, got {weight.shape=}"
        if isinstance(weight, BlockFP8 | MXFP4):
            if weight.activations == "bfloat16" and x.dtype != jnp.bfloat16:
                return f"takes rows as they are in bfloat16 alone, got {x.dtype}"
            continue
        if weight.dtype != jnp.bfloat16 or x.dtype != jnp.bfloat16:
            return f"takes dense weights and rows in bfloat16, got {weight.dtype} and {x.dtype}"
        if weight.shape[-1] % DENSE_INPUTS or weight.shape[-2] % ROWS:
            return (
                f"takes dense weights of multiples of {ROWS} x {DENSE_INPUTS}, got {weight.shape=}"
            )
    if capability is not None and devices.find_device(capability) is None:
        return f"is for Hopper and Blackwell, got compute capability {capability}"
    return None


def _kind_of(weight: Weight) -> tuple[type, str] | None:
    """What weights of one launch have in common; None of a dense one."""
    return (type(weight), weight.activations) if isinstance(weight, BlockFP8 | MXFP4) else None
