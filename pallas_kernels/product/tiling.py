"""How a product is cut into tiles, and the tensor core that it is cut for.

m, n and k are rows of x, outputs and inputs, as in every linear layer:

    result[m, n] = sum over k of x[m, k] weight[n, k]

A CTA's tile is `Tiling.tile_m` x `TILE_N`, and a stage has `Tiling.tile_k` of its inputs. Each of
two consumer warpgroups has `WARPGROUP_N` of the outputs. `choose_tiling` says which tiling a call
gets.
"""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from pallas_kernels.common.weights import INPUTS, ROWS
from pallas_kernels.gpu import devices

CONSUMERS = 2
"""Warpgroups that multiply; one more, the producer, fills stages."""
WARPGROUP_N = ROWS
"""Outputs of a consumer's tile: what one `wgmma` has on its left."""
TILE_N = CONSUMERS * WARPGROUP_N
"""Outputs of a CTA's tile."""
GROUP_K = INPUTS
"""Inputs of a group: those that share a scale, 128 bytes of E4M3, one swizzled line."""
DENSE_GROUP_K = 64
"""Inputs of a group of a dense weight: as many bytes."""
TMEM_STAGES = 2
"""Groups of inputs whose accumulators tensor memory holds at once, on Blackwell."""
ROWS_ON_LEFT = CONSUMERS * 64
"""tile_m where x is on the left of an instruction, which has 64 rows there, a consumer's each."""
MAX_MMA_ROWS = 128
"""Rows of x of one product in registers, 64 of a thread's f32; 256 would leave none for sums.

A tile may have more of them, which are multiplied in slices (`Tiling.row_slices`).
"""


@dataclasses.dataclass(frozen=True)
class TensorCore:
    """How a GPU multiplies.

    Attributes:
      device: that calls are cut for.
      min_tile_m: rows of x that a tile multiplies at least.
    """

    device: devices.Device
    min_tile_m: int

    @property
    def has_tmem(self) -> bool:
        """Whether accumulators are in tensor memory (tcgen05), or in registers (wgmma)."""
        return self.device.has_tmem


HOPPER = TensorCore(devices.H200, min_tile_m=8)
BLACKWELL = TensorCore(devices.B200, min_tile_m=16)


def choose_core() -> TensorCore:
    """That of the GPU that a function traced now runs on; Hopper's where there is none."""
    return BLACKWELL if devices.current_device().has_tmem else HOPPER


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut; m, n and k as above.

    Attributes:
      tile_m: rows of x of a tile, a multiple of `TensorCore.min_tile_m`.
      tile_k: inputs of a stage, a multiple of `Shapes.group_k`.
      stages: places in shared memory for the operands of a k_iter, full or on their way.
      split_k: CTAs that share the inputs of a tile, whose sums are added up afterwards.
      persistent: CTAs of an SM that stay and go through tiles, one after the other; 0 is a CTA for
        each tile. For one product, on Hopper.
      band: items of a band, through which persistent CTAs go before the next, for each outputs in
        turn (CUTLASS: swizzle of CTAs, Triton: GROUP_SIZE_M).
      packed_stores: whether results are stored two outputs at a time, where they have 16 bits.
      swap_ab: whether the weights are the left operand of an instruction, and x the right one,
        which may have as few as 8 rows. Else 64 rows of x are a consumer's left operand, and the
        tiles of both consumers' outputs the right one, see `mosaic_hopper_rows`: of FP8, tile_m
        128, on Hopper.
      mma_rows: rows of x of one product, of which a tile takes one after the other; 0 is as many as
        fit.
    """

    tile_m: int
    tile_k: int
    stages: int
    split_k: int = 1
    persistent: int = 0
    band: int = 1
    packed_stores: bool = False
    swap_ab: bool = True
    mma_rows: int = 0

    @property
    def row_slices(self) -> list[tuple[int, int]]:
        """First row and rows of each product; accumulators of many rows take several."""
        count = (
            self.tile_m // self.mma_rows if self.mma_rows else pl.cdiv(self.tile_m, MAX_MMA_ROWS)
        )
        return [(i * (self.tile_m // count), self.tile_m // count) for i in range(count)]

    @property
    def reuses_exchange(self) -> bool:
        """Whether what gate and up exchange takes the same memory more than once."""
        return self.persistent > 0 or len(self.row_slices) > 1


def scale_rows(tile_m: int) -> int:
    """Rows of x whose scales are copied at a time, in multiples of the 128 bytes of a copy."""
    return pl.cdiv(tile_m, 32) * 32
