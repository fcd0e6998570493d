"""Sizes of a product with quantised weights and of its tiles, and which calls it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

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
MAX_PRODUCT = 128
"""Columns of a product in registers, 64 of a thread's f32; 256 would leave none for the sums."""
_LOADS_AHEAD = range(128, 193)
"""Columns of tiles that do; see `Shapes.loads_ahead`."""


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
        count = self.columns // self.piece if self.piece else -(-self.columns // MAX_PRODUCT)
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
        exchanges = self.is_gated and not tiling.rows_on_left
        exchanged = 4 * ROWS * tiling.pieces[0][1] if exchanges else 0
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
