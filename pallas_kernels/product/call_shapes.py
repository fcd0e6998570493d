"""Static sizes of a product with some weights, and which calls the kernels serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.pending import Pending
from pallas_kernels.common.weights import (
    FP8_BLOCK,
    INPUTS,
    MXFP4,
    ROWS,
    SMALL_BLOCK,
    BlockFP8,
    Weight,
)
from pallas_kernels.gpu import devices
from pallas_kernels.product.tiling import (
    CONSUMERS,
    DENSE_GROUP_K,
    GROUP_K,
    HOPPER,
    WARPGROUP_N,
    TensorCore,
    Tiling,
    choose_core,
)

MOST_ROWS_OF_SMALL_BLOCKS = 64
"""Rows of a weight with FP8 scales of 32 x 32 that this kernel multiplies; 0 leaves it all of them
to `triton_blocks`."""
_LOADS_AHEAD = range(128, 193)
"""tile_m of tiles that do; see `Shapes.loads_ahead`."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of a call.

    Attributes:
      k_groups: groups of `group_k` inputs.
      warpgroup_tiles: tiles of `WARPGROUP_N` outputs of each weight.
      num_terms: E4M3 terms that add up to a row of x: one of rounded rows, two of others.
      is_gated: whether the weights are a gate and an up projection, a consumer each; else their
        tiles follow each other.
      format: of the weights, "fp8", "mxfp4" or "dense".
      rounds_rows: whether the kernel rounds rows of x itself, each CTA those that it multiplies.
      block: outputs and inputs that share a scale of block FP8.
      core: the tensor core.
    """

    k_groups: int
    warpgroup_tiles: tuple[int, ...]
    num_terms: int
    is_gated: bool
    format: str
    rounds_rows: bool = False
    block: int = FP8_BLOCK
    core: TensorCore = HOPPER

    @property
    def has_small_blocks(self) -> bool:
        """Whether 32 x 32 codes of block FP8 share a scale, and not a whole group of inputs."""
        return self.is_fp8 and self.block == SMALL_BLOCK

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
    def group_k(self) -> int:
        """Inputs of a group, 128 bytes of an operand."""
        return DENSE_GROUP_K if self.is_dense else GROUP_K

    @property
    def joins_tiles(self) -> bool:
        """Whether both consumers' tiles are one operand as they lie."""
        return self.core.has_tmem and not self.is_mxfp4

    @property
    def num_warpgroup_tiles(self) -> int:
        """Tiles of `WARPGROUP_N` outputs of the result."""
        return self.warpgroup_tiles[0] if self.is_gated else sum(self.warpgroup_tiles)

    @property
    def tiles_n(self) -> int:
        """CTAs' tiles along the outputs."""
        return pl.cdiv(sum(self.warpgroup_tiles), CONSUMERS)

    def loads_ahead(self, tile_m: int) -> bool:
        """Whether a tile of so many rows loads the next MXFP4 codes while its products run.

        Fewer rows gain nothing by it; more of them, or rows in two terms, leave no registers.
        """
        return self.is_mxfp4 and self.num_terms == 1 and tile_m in _LOADS_AHEAD

    def groups_of_stage(self, tiling: Tiling) -> int:
        """Groups of inputs of a stage."""
        return tiling.tile_k // self.group_k

    def k_iters(self, tiling: Tiling) -> int:
        """Stages that pass through shared memory for a tile."""
        return self.k_groups // (self.groups_of_stage(tiling) * tiling.split_k)


def shapes_of(*weights: Weight, is_gated: bool = False, core: TensorCore | None = None) -> Shapes:
    """Sizes of a product with these weights; None is `choose_core`'s."""
    weight = weights[0]
    is_dense = not isinstance(weight, BlockFP8 | MXFP4)
    return Shapes(
        k_groups=pl.cdiv(weight.shape[-1], DENSE_GROUP_K if is_dense else GROUP_K),
        warpgroup_tiles=tuple(pl.cdiv(w.shape[-2], WARPGROUP_N) for w in weights),
        num_terms=1 if is_dense or weight.activations == "fp8" else 2,
        is_gated=is_gated,
        format="dense" if is_dense else "mxfp4" if isinstance(weight, MXFP4) else "fp8",
        block=weight.block if isinstance(weight, BlockFP8) else FP8_BLOCK,
        core=core or choose_core(),
    )


def can_join(weights: Sequence[Weight]) -> bool:
    """Whether one launch can serve them all, where the kernel serves each."""
    # Results follow each other in tiles of `ROWS` outputs, so that only the last weight may end
    # within one.
    return len(set(map(_kind_of, weights))) == 1 and all(
        weight.shape[-2] % ROWS == 0 for weight in weights[:-1]
    )


def find_obstacle(
    x: jax.Array | Pending, *weights: Weight, small_blocks: bool = False
) -> str | None:
    """Why the kernels can't serve a call, as the rest of a sentence; None where they can.

    Rows are rounded under a scale for 128 inputs for weights that round them by fewer, too: scales
    are powers of two, and E4M3 keeps as many bits under each. Under the larger one a value that is
    less than 2^-13 of the largest among 128 has fewer: it is off by at most 2^-16 of that largest.

    Args:
      x: rows.
      *weights: that multiply them.
      small_blocks: whether FP8 may have scales of 32 x 32, as a product of few rows may on Hopper.
    """
    if len({_kind_of(weight) for weight in weights}) > 1:
        return "takes weights of one format and one form of activations, got several"
    for weight in weights:
        if isinstance(weight, BlockFP8) and weight.block != FP8_BLOCK:
            obstacle = _find_obstacle_of_small(x, weight) if small_blocks else ""
            if obstacle is not None:
                taken = f"takes FP8 scales of {FP8_BLOCK} x {FP8_BLOCK}{obstacle}"
                return f"{taken}, got blocks of {weight.block}"
        # Whole groups of inputs and whole tiles of a consumer; a scale belongs to 128 x 128 codes.
        if isinstance(weight, BlockFP8) and (weight.shape[-1] % INPUTS or weight.shape[-2] % ROWS):
            return f"takes FP8 weights of multiples of {ROWS} x {INPUTS}, got {weight.shape=}"
        if isinstance(weight, BlockFP8 | MXFP4):
            if weight.activations == "bfloat16" and x.dtype != jnp.bfloat16:
                return f"takes rows as they are in bfloat16 alone, got {x.dtype}"
            continue
        if weight.dtype != jnp.bfloat16 or x.dtype != jnp.bfloat16:
            return f"takes dense weights and rows in bfloat16, got {weight.dtype} and {x.dtype}"
        if weight.shape[-1] % DENSE_GROUP_K or weight.shape[-2] % ROWS:
            return (
                f"takes dense weights of multiples of {ROWS} x {DENSE_GROUP_K}, got {weight.shape=}"
            )
    return devices.find_obstacle()


def _find_obstacle_of_small(x: jax.Array | Pending, weight: BlockFP8) -> str | None:
    """Which calls with FP8 scales of 32 x 32 there is a kernel for, where this is none of them."""
    if choose_core().has_tmem:
        return ", and smaller ones on Hopper alone"
    if weight.scale.dtype != jnp.uint8:
        return f", and smaller ones that are powers of two, not {weight.scale.dtype}"
    if x.shape[-2] > MOST_ROWS_OF_SMALL_BLOCKS:
        most = MOST_ROWS_OF_SMALL_BLOCKS
        return f", and smaller ones for at most {most} rows, not {x.shape[-2]}"
    return None


def _kind_of(weight: Weight) -> tuple[type, str, int] | None:
    """What weights of one launch have in common; None of a dense one."""
    if not isinstance(weight, BlockFP8 | MXFP4):
        return None
    return type(weight), weight.activations, weight.row_group
