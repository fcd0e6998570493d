"""RequestView: one request of a cache, layer by layer, in NumPy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerView:
    """What one layer holds of a request; values are decoded, whatever the format.

    Attributes:
      layer_idx: place in the model; those of the draft come last.
      attn_type: "swa", "csa" or "hca".
      compression_ratio: M, tokens of an entry; 1 for SWA, which has none.
      ring_positions: i32[W], the position that each ring row holds; -1 where it holds none.
      ring: f32[W, C], the ring's rows; NaN where there is none.
      cursor: the ring row that the next token goes to.
      tail_positions: i32[2 M] of a CSA layer, the position that each tail row holds, those of the
        previous window among them; -1 where it holds none. Else i32[0].
      tail_values: f32[2 M, 2 C] of a CSA layer, what the compressor keeps of those tokens: the
        a-stream, then the b-stream; NaN where there is none. Else f32[0, 0].
      tail_scores: the same of its pooling scores, position bias included.
      running: f32[3, C] of an HCA layer, the open window's largest scores, sums of exponentials and
        weighted sums; NaN if no token is in it. Else f32[0, 0].
      entries: f32[E, C], the request's entries in order.
      index_keys: f32[E, IC] of a CSA layer, as scores see them; else f32[E, 0].
      blocks: i32[E], the physical block of each entry.
      offsets: i32[E], its place in the block.
      entries_per_block: EB; 0 for SWA.
      selected: bool[E], the entries that the next token attends to, of a CSA layer where `inspect`
        was given that token; else None. An entry that the token itself would close is not counted.
    """

    layer_idx: int
    attn_type: str
    compression_ratio: int
    ring_positions: np.ndarray
    ring: np.ndarray
    cursor: int
    tail_positions: np.ndarray
    tail_values: np.ndarray
    tail_scores: np.ndarray
    running: np.ndarray
    entries: np.ndarray
    index_keys: np.ndarray
    blocks: np.ndarray
    offsets: np.ndarray
    entries_per_block: int
    selected: np.ndarray | None

    @property
    def num_open_tokens(self) -> int:
        """Tokens that no entry holds yet; 0 for SWA."""
        newest = int(self.ring_positions.max(initial=-1))
        return (newest + 1) % self.compression_ratio


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RequestView:
    """One request of a cache.

    Attributes:
      slot: its slot.
      length_tokens: its tokens.
      block_tokens: tokens that a block stands for.
      block_table: i32[n], its physical blocks in order.
      layers: the layers in order, those of the draft last.
    """

    slot: int
    length_tokens: int
    block_tokens: int
    block_table: np.ndarray
    layers: tuple[LayerView, ...]

    def plot(self, layer_idx: int) -> Figure:
        """A picture of one layer: its ring, its open window and its blocks.

        Raises:
          ValueError: there is no such layer, or matplotlib is not installed.
        """
        from dsv4_jax.inspection.picture import plot_layer

        return plot_layer(self, layer_idx)
