"""Product: rows times the weights of a stack, item by item, as a launch takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.weights import MXFP4, BlockFP8, Weight
from pallas_kernels.gpu import unpack_mxfp4
from pallas_kernels.product.call_shapes import Shapes
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.tile_scheduler import TileScheduler
from pallas_kernels.product.tiling import WARPGROUP_N, Tiling
from pallas_kernels.product.triton_rows import Rows
from pallas_kernels.product.work_list import EvenItems, Items, PickedItems


class SwiGLU(NamedTuple):
    """The epilogue of a gate and an up projection.

    Attributes:
      limit: see `expert_mlp`.
      dtype: to which both are rounded before.
    """

    limit: float
    dtype: Any


class Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs in device memory.

    Attributes:
      items: see `Items` and `PickedItems`; None where they follow from their number.
      rows: see `triton_rows.Rows`, or `raw_rows.RawRows`.
      codes: of each weight.
      scales: of each weight; none of dense ones.
      magnitudes: i32[20, 2], the table of `unpack_mxfp4`.
      share: f32[R], factor of each row after SwiGLU, or None; of each item of `PickedItems`.
    """

    items: Items | PickedItems | None
    rows: Rows | RawRows
    codes: Any
    scales: Any
    magnitudes: Any
    share: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Product:
    """Rows times weights of a stack, item by item.

    Attributes:
      rows: of R rows, `scale_rows(tile_m)` of them beyond the last that an item names, if they are
        rounded.
      weights: stacks [E, out, in] of one format, with the same inputs.
      items: what is multiplied; no row of the result is in two.
      shapes: sizes of the call; static.
      tiling: how it is cut; static.
      swiglu: what follows a gate and an up projection; None elsewhere; static.
      share: f32[R], factor of each row after SwiGLU, f32[N] of each of `PickedItems`; None is 1.
      interprets: whether it is for the interpreter, for which a launch is traced anew; static.
    """

    rows: Rows | RawRows
    weights: Sequence[Weight]
    items: Items | EvenItems | PickedItems
    shapes: Shapes = dataclasses.field(metadata={"static": True})
    tiling: Tiling = dataclasses.field(metadata={"static": True})
    swiglu: SwiGLU | None = dataclasses.field(default=None, metadata={"static": True})
    share: jax.Array | None = None
    interprets: bool = dataclasses.field(default_factory=interpreting, metadata={"static": True})

    @property
    def num_items(self) -> int:
        """Items in all."""
        return self.items.count(self.tiling.tile_m)

    @property
    def most_rows(self) -> int:
        """Rows that a tile has at most."""
        return self.items.most_rows(self.tiling.tile_m)

    @property
    def name(self) -> str:
        """What a profile calls it: format, outputs of the launch and inputs."""
        shapes = self.shapes
        outputs = "x".join(str(tiles * WARPGROUP_N) for tiles in shapes.warpgroup_tiles)
        name = f"{shapes.format}_{shapes.block}" if shapes.has_small_blocks else shapes.format
        return f"{name}_{outputs}_of_{shapes.k_groups * shapes.group_k}"

    def operands(self) -> Operands:
        """Arrays that the kernel reads."""
        quantized = [weight for weight in self.weights if isinstance(weight, BlockFP8 | MXFP4)]
        return Operands(
            items=None if isinstance(self.items, EvenItems) else self.items,
            rows=self.rows,
            codes=[weight.codes for weight in quantized] or self.weights,
            scales=[weight.scale for weight in quantized],
            magnitudes=jnp.asarray(unpack_mxfp4.magnitude_bytes()),
            share=self.share,
        )

    def scheduler(self, inputs: Operands | None = None) -> TileScheduler:
        """Of its tiles, in the kernel by the arrays there."""
        items = self.items
        if inputs is not None and inputs.items is not None:
            items = inputs.items
        return TileScheduler(items, self.shapes, self.tiling)
