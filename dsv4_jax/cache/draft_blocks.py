"""What a draft runs behind settled tokens: where it stands, and attention inside blocks.

Nothing of it is kept: the rings of the cache hold settled tokens alone.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax.cache.state_cache import StateCachePool
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes

_HEADS = 64
"""Of which kernels take multiples, where there are more of them."""


@flax.struct.dataclass(kw_only=True)
class Blocks:
    """Where the blocks of a pass stand: N rows for each of B requests.

    Attributes:
      slots: i32[B], slot of each request; -1 where there is no block, whose rows are padding.
      lengths: i32[B], settled tokens, which lie in the rings: the position of the first row.
      size: N; static.
    """

    slots: jax.Array
    lengths: jax.Array
    size: int = flax.struct.field(pytree_node=False)

    @property
    def positions(self) -> jax.Array:
        """i32[B * N], of each row."""
        ahead = jnp.arange(self.size, dtype=jnp.int32)[None]
        return (self.lengths[:, None] + ahead).reshape(-1)

    @property
    def segment_ids(self) -> jax.Array:
        """i32[B * N], the block of each row; -1 of padding."""
        block = jnp.arange(self.slots.shape[0], dtype=jnp.int32)
        return jnp.repeat(jnp.where(self.slots >= 0, block, -1), self.size)


def next_call(slots: jax.Array, lengths: jax.Array) -> CallIndices:
    """The call of one token for each of B rows, in window layers alone.

    Args:
      slots: i32[B], slot of each row; -1 of padding.
      lengths: i32[B], tokens before it, which is its position.
    """
    row, live = jnp.arange(slots.shape[0], dtype=jnp.int32), slots >= 0
    lengths = jnp.where(live, lengths, 0)
    return CallIndices(
        segment_ids=jnp.where(live, row, -1),
        slots=slots,
        positions=lengths,
        lengths=lengths,
        row_slots=slots,
        row_lengths=lengths,
        row_counts=live.astype(jnp.int32),
        row_offsets=row,
        block_table=jnp.full((slots.shape[0], 1), -1),
        max_row_tokens=1,
    )


def attend_in_blocks(
    queries: jax.Array,
    sink: jax.Array,
    state: StateCachePool,
    family_idx: int,
    own: Planes,
    blocks: Blocks,
) -> jax.Array:
    """Attends to the last W settled tokens and to all rows of the block.

    Every row of a block sees the same keys, so that the op takes a block as one token with N * H
    heads. Its window is that of the last settled token, and its entries are the block's own rows.

    Args:
      queries: [B * N, H, C], normed and rotated.
      sink: f32[H].
      state: the pool of window layers.
      family_idx: index of the layer into the pool's stacked arrays.
      own: planes [B * N, ...], the rows' own window entries, encoded.
      blocks: where the rows stand.

    Returns:
      [B * N, H, C], before the inverse RoPE.

    Source: dspark.md section 4.
    """
    num_blocks, size, (_, num_heads, dim) = blocks.slots.shape[0], blocks.size, queries.shape
    codec, block = state.schema.format.ring, jnp.arange(num_blocks, dtype=jnp.int32)
    live = blocks.slots >= 0
    # One number of a layer serves ring and entries: the rings of all layers as those of one.
    rings = {name: plane.reshape(1, -1, *plane.shape[2:]) for name, plane in state.window.items()}
    rows = {name: plane.reshape(num_blocks, size, *plane.shape[1:]) for name, plane in own.items()}
    layer = jnp.zeros((), jnp.int32)
    call = CallIndices(
        segment_ids=jnp.where(live, block, -1),
        slots=jnp.where(live, family_idx * state.num_slots + blocks.slots, -1),
        positions=jnp.maximum(blocks.lengths - 1, 0),
        lengths=blocks.lengths,
        row_slots=blocks.slots,
        row_lengths=blocks.lengths,
        row_counts=live.astype(jnp.int32),
        row_offsets=block,
        block_table=block[:, None],
        visible=jnp.full(num_blocks, size, jnp.int32),
        max_row_tokens=1,
    )
    spare = -size * num_heads % _HEADS if size * num_heads > _HEADS else 0
    folded = queries.reshape(num_blocks, size * num_heads, dim)
    attended = pk.sparse_attention(
        jnp.pad(folded, ((0, 0), (0, spare), (0, 0))),
        jnp.pad(jnp.tile(sink, size), (0, spare)),
        LayerPlanes(rings, layer, codec),
        {name: plane[:, 0] for name, plane in rows.items()},  # none of them is in the window
        LayerPlanes({name: plane[None] for name, plane in rows.items()}, layer, codec),
        jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (num_blocks, size)),
        call,
        scale=dim**-0.5,
    )
    return attended[:, : size * num_heads].reshape(queries.shape)
