"""How a call of the index scores is cut, and which calls its kernel serves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import formats, mosaic, tilings
from pallas_kernels.backend import compute_capability
from pallas_kernels.formats import Codec

plgpu: Any = mosaic_gpu
HEADS, DIM = 64, 128
"""Index heads and their dims, the released models'."""
_MANY_TILES = 64
"""Of a program."""


@dataclasses.dataclass(frozen=True)
class TensorCore:
    """How a GPU multiplies keys with queries.

    Attributes:
      tile: keys of one product.
      layout: of a product in registers.
      has_memory: whether products arrive in tensor memory (tcgen05), or in registers (wgmma).
    """

    tile: int
    layout: Any
    has_memory: bool

    @property
    def layouts(self) -> list[Any]:
        """In which a thread has a number for each key it loads, and for each it has the sum of."""
        return [mosaic.ROW, self.layout.reduce(1)] if self.has_memory else [mosaic.ROW]


HOPPER = TensorCore(tile=64, layout=plgpu.Layout.WGMMA, has_memory=False)
BLACKWELL = TensorCore(tile=128, layout=plgpu.Layout.TCGEN05, has_memory=True)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a token's entries are cut.

    Attributes:
      tiles: of a program.
      groups: warpgroups of a program.
      stages: tiles of a warpgroup that are on their way while one is multiplied.
    """

    tiles: int
    groups: int = 4
    stages: int = 1


def choose_tiling(
    num_tokens: int, num_tiles: int, mxfp4: bool, core: TensorCore = HOPPER, num_cores: int = 132
) -> Tiling:
    """Programs that fill the cores once, or several times evenly; each warpgroup has a tile.

    One tile of each on its way is as much as memory's latency asks for: on an H200 more gain
    nothing. A fifth warpgroup gains 3 % of a long run of tiles, and loses as much of a short one.
    """
    tiles = -(-num_tiles // max(1, num_cores // num_tokens))
    groups = 4 if core.has_memory or tiles < _MANY_TILES else 5
    formula = Tiling(tiles=max(groups, tiles), groups=groups)
    bits = 4 if mxfp4 else 8
    return tilings.tune("index_scores", formula, tokens=num_tokens, tiles=num_tiles, bits=bits)


def find_obstacle(queries: jax.Array, codec: Codec) -> str | None:
    """Why this kernel can't serve a call, as the rest of a sentence; None where it can."""
    capability = compute_capability()
    if not isinstance(codec, formats.FP8KeyCodec) and not is_mxfp4(codec):
        return f"takes MXFP4 and FP8 keys, got {codec}"
    if queries.shape[1:] != (HEADS, DIM):
        return f"needs queries [T, {HEADS}, {DIM}], got {queries.shape=}"
    if capability is not None and capability[0] not in (9, 10):
        return f"is for Hopper and Blackwell, got compute capability {capability}"
    return None


def is_mxfp4(codec: Codec) -> bool:
    """Whether keys are; the kernel's others are FP8."""
    return isinstance(codec, formats.FP4KeyCodec) and codec.power_of_two


def choose_core() -> TensorCore:
    """That of the GPU, or Hopper's where there is none."""
    capability = compute_capability()
    return BLACKWELL if capability is not None and capability[0] == 10 else HOPPER
