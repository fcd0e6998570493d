"""Static sizes of a call of the kernels of sparse attention, what they can serve, how it is cut."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import codecs
from pallas_kernels.common.codecs import Codec
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gpu import devices
from pallas_kernels.sparse_attention.stored_rows import GROUP, StoredRows

TILE, HEADS = 64, 64
"""Keys of a tile, heads of a CTA."""
_DECODED = codecs.PlainCodec, codecs.GroupedFP8Codec, codecs.ScaledFP8Codec
_WHOLE = codecs.WholeFP8Codec, codecs.FP4KeyCodec
"""DeepSeek-V4.1's window and entry, which the Triton kernels decode."""
FEW_HEADS = 8
"""Rows of shared memory that a bulk copy brings: fewer than 64 heads are a multiple of them."""
MAX_DIM = 512
LOG2_E = math.log2(math.e)
FLOOR = np.float32(-1e30)
"""Below any logit, and finite: a difference of two such maxima is not NaN."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work of one token and 64 heads is cut.

    Attributes:
      splits: CTAs that share the keys.
    """

    splits: int


SERVES_ENTRIES_APART = True
"""Whether Mosaic's kernels serve such calls of more than few tokens; False leaves them to
`triton_turns`."""
CTA_US, TILE_US = 8.1, 2.4
"""Microseconds of a CTA without keys, and of a tile; an H200's."""
BYTES_PER_US = 5e6
"""At which splits' sums are written and read again; what a second launch takes is in it."""


def choose_tiling(num_ctas: int, num_tiles: int, num_sms: int, dim: int) -> Tiling:
    """The splits of least time: more of them wait for fewer tiles, and write and read more sums."""

    def microseconds(splits: int) -> float:
        rounds = pl.cdiv(num_ctas * splits, num_sms)
        bytes_of_sums = num_ctas * splits * HEADS * dim * 4 if splits > 1 else 0
        of_cta = CTA_US + TILE_US * pl.cdiv(num_tiles, splits)
        return rounds * of_cta + 2 * bytes_of_sums / BYTES_PER_US

    # No more splits than let all CTAs run at once.
    cuts = equal_cuts(num_tiles, num_sms // max(1, num_ctas))
    return Tiling(splits=min(cuts, key=microseconds))


def equal_cuts(num_tiles: int, most: int) -> list[int]:
    """Numbers of splits up to `most`, ascending, and none that leaves a split idle."""
    most = max(1, min(num_tiles, most))
    return sorted({pl.cdiv(num_tiles, pl.cdiv(num_tiles, splits)) for splits in range(1, most + 1)})


def is_apart(ring: LayerPlanes, pool: LayerPlanes | None, *, apart: bool) -> bool:
    """Whether keys lie in two layers, or in DeepSeek-V4.1's form."""
    return (apart and pool is not None) or isinstance(ring.codec, _WHOLE)


def find_obstacle(
    queries: jax.Array, ring: LayerPlanes, pool: LayerPlanes | None = None
) -> str | None:
    """Why no kernel can serve a call, as the rest of a sentence; None where one can."""
    num_heads, dim = queries.shape[1:]
    if queries.dtype != jnp.bfloat16:
        return f"takes bf16 queries, for its products are of bf16, got {queries.dtype}"
    if ring.codec == codecs.PlainCodec("float32"):
        return "would round keys of cache format 'f32' to bf16"
    if not isinstance(ring.codec, (*_DECODED, codecs.WholeFP8Codec)):
        names = [each.__name__ for each in (*_DECODED, codecs.WholeFP8Codec)]
        return f"decodes entries of {names}, got {ring.codec}"
    if pool is not None and pool.codec != ring.codec and not _is_v41(ring, pool):
        return (
            "takes entries of the ring's codec, or DeepSeek-V4.1's FP4 ones beside its windows, "
            f"got {ring.codec} and {pool.codec}"
        )
    if num_heads % (HEADS if num_heads > HEADS else FEW_HEADS) or dim % (4 * GROUP):
        return (
            f"needs H % {HEADS} == 0, or H % {FEW_HEADS} == 0 below it, and C % {4 * GROUP} == 0, "
            f"got {queries.shape=}"
        )
    if dim > MAX_DIM:
        return f"needs C <= {MAX_DIM} to hold its sums, got {queries.shape=}"
    rope = ring.planes.get("rope")
    if rope is not None and rope.shape[-1] % GROUP:
        return f"needs R % {GROUP} == 0, got {rope.shape=}"
    return devices.find_obstacle()


def _is_v41(ring: LayerPlanes, pool: LayerPlanes) -> bool:
    """Whether window and entries are stored as DeepSeek-V4.1 has them."""
    is_window = isinstance(ring.codec, codecs.WholeFP8Codec)
    return is_window and pool.codec == codecs.FP4KeyCodec(16, power_of_two=False, rotated=False)


def product_dtype(*stored: Codec) -> Any:
    """Dtype of products with keys that codecs store.

    f16 holds E4M3 codes times powers of two as bf16 does, from steps of 2^-24 to 65,504, far
    around what a norm leaves of an entry, and takes one instruction for two in place of six. E2M1
    codes times E4M3 scales are exact in either.
    """
    narrow = codecs.GroupedFP8Codec, *_WHOLE
    return jnp.float16 if all(isinstance(c, narrow) for c in stored) else jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of a call, its format and its tiling.

    Attributes:
      num_heads: H.
      dim: C.
      window: W.
      num_slots: NS.
      num_entries: K, a multiple of the tile.
      num_blocks: NB.
      entries_per_block: EB.
      table_width: LB.
      scale: factor of the logits.
      window_form: how the ring and the call's own rows store a vector.
      entry_form: how the pool does.
      splits: CTAs that share the keys.
      rotated: last columns that the kernel rotates, in whole groups: of the output, if keys are not
        split, and of queries that it norms. 0 where that is left to others.
      query_eps: floor of the norm of queries as projected; None of those that are ready.
    """

    num_heads: int
    dim: int
    window: int
    num_slots: int
    num_entries: int
    num_blocks: int
    entries_per_block: int
    table_width: int
    scale: float
    window_form: StoredRows
    entry_form: StoredRows
    splits: int = 1
    rotated: int = 0
    query_eps: float | None = None

    @property
    def dtype(self) -> Any:
        """Dtype of products."""
        return self.window_form.dtype

    @property
    def heads_of_cta(self) -> int:
        """Heads that a CTA has; the rest of its 64 rows is zeros, and not written."""
        return min(self.num_heads, HEADS)

    @property
    def window_tiles(self) -> int:
        """Tiles of a token's window; its entries' come after."""
        return pl.cdiv(self.window, TILE)

    def window_tiles_of(self, split: jax.Array) -> jax.Array:
        """How many of them a split has, which takes every `splits`-th tile."""
        tiles = lax.div(self.window_tiles - split + self.splits - 1, self.splits)
        return jnp.maximum(tiles, 0)

    @property
    def num_tiles(self) -> int:
        """Tiles of a token."""
        return self.window_tiles + self.num_entries // TILE

    @property
    def tiles_per_split(self) -> int:
        """At most; a split has every `splits`-th tile of the token."""
        return pl.cdiv(self.num_tiles, self.splits)

    def tiles_to_look_at(self, split: jax.Array, visible: jax.Array) -> jax.Array:
        """How many tiles a split has until none has an entry that is seen; at least 1."""
        num_entries = jnp.clip(visible, 0, self.num_entries)
        num_tiles = self.window_tiles + lax.div(num_entries + TILE - 1, TILE)
        # Splits take every `splits`-th tile: of those up to the last one that is seen, this many
        # are the split's.
        mine = lax.div(num_tiles - split + self.splits - 1, self.splits)
        return jnp.clip(mine, 1, self.tiles_per_split)
