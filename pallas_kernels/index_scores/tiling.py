"""Static sizes of a call of the index scores, which calls its kernel serves, how they are cut."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.common import codecs
from pallas_kernels.common.codecs import Codec
from pallas_kernels.gpu import devices, mosaic, mosaic_bulk, unpack_mxfp4
from pallas_kernels.gpu.devices import Device

plgpu: Any = mosaic_gpu
HEADS, DIM = 64, 128
"""Index heads and their dims, the released models'."""
_ENTRIES_ALIGNED = mosaic_bulk.ALIGNMENT // 4
"""Entries whose scales, 4 bytes each, are copied together."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of a call.

    Attributes:
      num_tokens: T.
      num_heads: IH; the rest of a product's 64 columns is zeros.
      entries_per_block: EB.
      num_blocks: NB.
      table_width: LB.
      mxfp4: whether keys are MXFP4; else they are FP8.
      last: whether L2 may drop keys first.
      device: whose tensor cores multiply.
    """

    num_tokens: int
    num_heads: int
    entries_per_block: int
    num_blocks: int
    table_width: int
    mxfp4: bool
    last: bool
    device: Device

    @property
    def tile_m(self) -> int:
        """Keys of a tile, which are the rows of one product; its columns are the heads."""
        return 128 if self.device.has_tmem else 64

    @property
    def key_layout(self) -> Any:
        """Layout in which a thread has a tile's keys, as E4M3 codes."""
        return mosaic.WIDE_ROWS if self.mxfp4 else mosaic.EVEN_ROWS

    @property
    def product_layout(self) -> Any:
        """Layout in which a product [tile_m, 64] comes into registers."""
        return plgpu.Layout.TCGEN05 if self.device.has_tmem else plgpu.Layout.WGMMA

    @property
    def score_layout(self) -> Any:
        """Layout of a tile's scores, one for each key, when heads are added up."""
        return self.product_layout.reduce(1) if self.device.has_tmem else mosaic.ROW

    @property
    def scale_layouts(self) -> list[Any]:
        """Layouts in which a key's scales are wanted: to unpack it, and to scale its score."""
        unpacks_apart = self.mxfp4 and self.device.has_tmem
        return [mosaic.ROW, self.score_layout] if unpacks_apart else [self.score_layout]

    @property
    def num_entries(self) -> int:
        """Entries that a table row has room for."""
        return self.table_width * self.entries_per_block

    @property
    def width(self) -> int:
        """Bytes of a key's codes."""
        return DIM // 2 if self.mxfp4 else DIM

    @property
    def rows_of_piece(self) -> int:
        """Entries of a tile that lie in one block."""
        return math.gcd(self.entries_per_block, self.tile_m)

    @property
    def factor(self) -> float:
        """Of weights: norm of scores, 1/2 for twice the ReLU, and the scale of unpacked keys."""
        return 0.5 * (self.num_heads * DIM) ** -0.5 / (unpack_mxfp4.HEADROOM if self.mxfp4 else 1.0)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a call is cut.

    Attributes:
      tiles: tiles of a CTA.
      warpgroups: of a CTA.
      stages: tiles of a warpgroup in shared memory, there or on their way.
      tokens: query tokens of a CTA, which follow each other; those of one request share its keys.
        On Hopper; 1 on Blackwell.
    """

    tiles: int
    warpgroups: int = 4
    stages: int = 2
    tokens: int = 1


_MANY_TOKENS = 2048
"""From so many on CTAs of several tokens still fill the SMs evenly."""
_TOKENS_OF_REQUEST = 64
"""On average, from which on few CTAs have tokens of several requests, each of which is a pass."""
_SHARING = Tiling(tiles=4, warpgroups=4, tokens=4)
"""How a prompt's tokens share keys."""


def choose_tiling(
    num_tokens: int,
    num_tiles: int,
    mxfp4: bool,
    device: Device = devices.H200,
    *,
    num_requests: int,
) -> Tiling:
    """CTAs that fill the SMs once, or several times evenly; each warpgroup has a tile.

    Two tiles of each are as much as memory's latency asks for. Six warpgroups are as many as have
    registers for MXFP4 keys. On Blackwell, whose tiles are larger and lie in shared memory once
    more as operands, three are as many as it has room for with FP8. On Hopper many tokens of few
    requests share keys. Nothing has been measured on Blackwell.
    """
    tiles = pl.cdiv(num_tiles, max(1, device.num_sms // num_tokens))
    is_many = num_tokens >= max(_MANY_TOKENS, _TOKENS_OF_REQUEST * num_requests)
    if device.has_tmem:
        warpgroups = 4 if mxfp4 else 3
    elif is_many:
        return dataclasses.replace(_SHARING, tiles=max(_SHARING.warpgroups, tiles))
    else:
        warpgroups = 6 if mxfp4 else 5
    return Tiling(tiles=max(warpgroups, tiles), warpgroups=warpgroups)


def read_once(num_tokens: int, num_requests: int, bytes_of_request: int, device: Device) -> bool:
    """Whether L2 may as well drop a call's keys: it can't hold them all, and each has one reader.

    Keys that fit into L2 are left there for a call that repeats them. What either gains is in
    docs/kernels/index_scores.md.
    """
    all_bytes = num_requests * bytes_of_request
    return num_tokens <= num_requests and all_bytes > device.l2_bytes


def find_obstacle(queries: jax.Array, codec: Codec, entries_per_block: int) -> str | None:
    """Why this kernel can't serve a call, as the rest of a sentence; None where it can."""
    if not isinstance(codec, codecs.FP8KeyCodec) and not is_mxfp4(codec):
        return f"takes MXFP4 and FP8 keys, got {codec}"
    if queries.shape[1] > HEADS or queries.shape[2] != DIM:
        return f"needs queries [T, {HEADS}, {DIM}], or fewer heads, got {queries.shape=}"
    if entries_per_block % _ENTRIES_ALIGNED:
        return f"needs blocks of a multiple of {_ENTRIES_ALIGNED}, got {entries_per_block} entries"
    return devices.find_obstacle()


def is_mxfp4(codec: Codec) -> bool:
    """Whether keys are; the kernel's others are FP8."""
    return isinstance(codec, codecs.FP4KeyCodec) and codec.power_of_two
