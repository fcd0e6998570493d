"""Sizes of a product with quantised weights, which calls its kernel serves, how it is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import compute_capability
from pallas_kernels.common.weights import INPUTS, MXFP4, ROWS, BlockFP8, QuantizedWeight, Weight
from pallas_kernels.gpu import devices

CONSUMERS = 2
"""Warpgroups that multiply; each has a tile of 64 rows of a weight."""
_SPARE_BYTES = 4096
"""Of shared memory, for what is not a stage."""
_MAX_SPLITS = 16
_MIN_BLOCKS_OF_SPLIT = 4


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
      columns: rows of x that a tile multiplies at once, a multiple of 8.
      blocks: groups of 128 inputs of a stage.
      stages: stages in shared memory, there or on their way.
      splits: CTAs that share the inputs of a tile, whose sums are added up afterwards.
    """

    columns: int
    blocks: int
    stages: int
    splits: int = 1


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of a call.

    Attributes:
      num_blocks: groups of 128 inputs.
      tiles: tiles of 64 outputs of each weight.
      num_parts: parts of a row of x.
      is_gated: whether the weights are a gate and an up projection, a consumer each; else their
        tiles follow each other.
      is_mxfp4: the weights' format; else block FP8.
    """

    num_blocks: int
    tiles: tuple[int, ...]
    num_parts: int
    is_gated: bool
    is_mxfp4: bool

    @property
    def num_tiles(self) -> int:
        """Tiles of 64 outputs of the result."""
        return self.tiles[0] if self.is_gated else sum(self.tiles)

    @property
    def num_ctas(self) -> int:
        """CTAs along the outputs."""
        return -(-sum(self.tiles) // CONSUMERS)

    def stage_bytes(self, tiling: Tiling) -> int:
        """Of shared memory: codes and scales of the weights, and of x."""
        weights = CONSUMERS * ROWS * (INPUTS // 2 + 4 if self.is_mxfp4 else INPUTS)
        rows = self.num_parts * (tiling.columns * INPUTS + 4 * scale_columns(tiling.columns))
        return tiling.blocks * (weights + rows)


def scale_columns(columns: int) -> int:
    """Scales of x that are copied at a time: at least the 128 bytes that a copy is aligned to."""
    return max(columns, 32)


def shapes_of(*weights: QuantizedWeight, is_gated: bool = False) -> Shapes:
    """Sizes of a product with these weights."""
    weight = weights[0]
    return Shapes(
        num_blocks=-(-weight.shape[-1] // INPUTS),
        tiles=tuple(-(-w.shape[-2] // ROWS) for w in weights),
        num_parts=1 if weight.activations == "fp8" else 2,
        is_gated=is_gated,
        is_mxfp4=isinstance(weight, MXFP4),
    )


def choose_tiling(shapes: Shapes, num_rows: int, num_groups: int, *, may_split: bool) -> Tiling:
    """Stages that keep enough bytes on their way, and CTAs that fill the SMs.

    Args:
      shapes: sizes of the call.
      num_rows: rows of x that a weight of the stack multiplies, as far as they are known.
      num_groups: weights of the stack that multiply any.
      may_split: whether sums of several CTAs may be added up afterwards.
    """
    columns = 8
    while columns < min(num_rows, 128 // shapes.num_parts):
        columns *= 2
    blocks = 2 if shapes.num_blocks % 2 == 0 and columns <= 64 else 1
    splits = 1
    num_ctas = shapes.num_ctas * num_groups * -(-num_rows // columns)
    while (
        may_split
        and num_ctas * splits < devices.H200.num_sms
        and splits < _MAX_SPLITS
        and shapes.num_blocks % (2 * splits * blocks) == 0
        and shapes.num_blocks // (2 * splits) >= _MIN_BLOCKS_OF_SPLIT
    ):
        splits *= 2
    tiling = Tiling(columns=columns, blocks=blocks, stages=2, splits=splits)
    ctas_of_sm = 1 if columns > 64 else 2
    room = devices.H200.shared_memory_bytes // ctas_of_sm - _SPARE_BYTES
    if shapes.is_gated:
        room -= 4 * ROWS * columns
    stages = room // shapes.stage_bytes(tiling)
    turns = shapes.num_blocks // (blocks * splits)
    return dataclasses.replace(tiling, stages=max(2, min(stages, turns, 12)))


def can_join(weights: Sequence[Weight]) -> bool:
    """Whether one launch can serve them all, where the kernel serves each."""
    kinds = {(type(w), getattr(w, "activations", None)) for w in weights}
    return len(kinds) == 1 and all(weight.shape[-2] % ROWS == 0 for weight in weights[:-1])


def find_obstacle(x: jax.Array, *weights: Weight) -> str | None:
    """Why this kernel can't serve a call, as the rest of a sentence; None where it can."""
    capability = compute_capability()
    if any(not isinstance(weight, BlockFP8 | MXFP4) for weight in weights):
        return "takes block FP8 and MXFP4 weights, got a dense one"
    if len({(type(weight), weight.activations) for weight in weights}) > 1:  # pyright: ignore
        return "takes weights of one format and one form of activations, got several"
    for weight in weights:
        if isinstance(weight, BlockFP8) and (weight.shape[-1] % INPUTS or weight.shape[-2] % ROWS):
            return f"takes FP8 weights of multiples of {ROWS} x {INPUTS}, got {weight.shape=}"
        assert isinstance(weight, BlockFP8 | MXFP4)
        if weight.activations == "bfloat16" and x.dtype != jnp.bfloat16:
            return f"takes rows as they are in bfloat16 alone, got {x.dtype}"
    if capability is not None and devices.find_device(capability) != devices.H200:
        return f"is for Hopper, got compute capability {capability}"
    return None
