"""The token that closes a window, and how its program stores the entry, inside a Triton kernel.

`closing.py` finds these tokens in a call; `triton_means.py` pools their windows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.codecs import Codec, rope_dim_of
from pallas_kernels.gpu import triton_codecs, triton_rope

Ref = Any
Place = tuple[jax.Array, jax.Array, jax.Array]
"""An entry's layer, its block, -1 where there is none, and its offset in it."""
PLACE_FIELDS = 4
"""Of a place in memory, with the position of the window's first token."""


class Closing(NamedTuple):
    """The token with which a program's window ends.

    Attributes:
      layer: i32[].
      token: i32[], its index in the call.
      segment: i32[], row of the table, -1 for none.
      slot: i32[], 0 for none.
      position: i32[].
      length: i32[], tokens of its request before the call.
      compression_ratio: tokens per window.
      table: of blocks, i32[B, LB].
    """

    layer: jax.Array
    token: jax.Array
    segment: jax.Array
    slot: jax.Array
    position: jax.Array
    length: jax.Array
    compression_ratio: int
    table: Ref

    @property
    def begin(self) -> jax.Array:
        """i32[], position of the window's first token."""
        return self.position - (self.compression_ratio - 1)

    def locate(self, planes: Mapping[str, Ref]) -> Place:
        """Of the entry in planes [L, NB, EB, ...]."""
        entries_per_block = next(iter(planes.values())).shape[2]
        entry = self.position // self.compression_ratio  # the window's number
        logical = entry // entries_per_block
        # No request, or beyond the table: block -1, for which nothing is stored.
        inside = (self.segment >= 0) & (logical < self.table.shape[1])
        block = self.table[jnp.maximum(self.segment, 0), jnp.where(inside, logical, 0)]
        return self.layer, jnp.where(inside, block, -1), entry % entries_per_block


class CallArrays(NamedTuple):
    """What programs read of the call, and in them its refs.

    Attributes:
      layer: i32[1].
      closing: i32[n], the token that closes each window, -1 for none.
      segment_ids, slots, positions, lengths: i32[T], as in `CallIndices`.
      table: i32[B, LB].
    """

    layer: Any
    closing: Any
    segment_ids: Any
    slots: Any
    positions: Any
    lengths: Any
    table: Any


def read_closing(call: CallArrays, token: jax.Array, compression_ratio: int) -> Closing:
    """What the call says of the token i32[] with which a window of so many tokens ends."""
    # A slot that is none reads slot 0, so that the address is one of the array; what it loads is
    # dropped.
    segment, slot = call.segment_ids[token], jnp.maximum(call.slots[token], 0)
    return Closing(
        layer=call.layer[0],
        token=token,
        segment=segment,
        slot=slot,
        position=call.positions[token],
        length=call.lengths[token],
        compression_ratio=compression_ratio,
        table=call.table,
    )


def prepare_store(
    planes: dict[str, Ref],
    codec: Codec,
    norm: Ref,
    frequencies: Ref,
    *,
    width: int,
    eps: float,
) -> Callable[[jax.Array, jax.Array, Place], None]:
    """Loads what it takes to finish a window; what it returns does so, and writes the entry.

    It is called with the window's mean, f32[width], rounded to the dtype of activations, the
    position of its first token, and the entry's place.
    """
    table = triton_rope.load_rope_table(
        norm, frequencies, dim=norm.shape[0], width=width, dtype=norm.dtype, eps=eps
    )
    rope_dim = rope_dim_of(planes)

    def store(mean: jax.Array, begin: jax.Array, place: Place) -> None:
        # An entry is rotated by the position of its window's first token.
        entry = triton_rope.norm_and_rotate(mean, table, begin)
        encoded = triton_codecs.encode(codec, entry, dim=table.dim, rope_dim=rope_dim)
        # Block -1 is no place: what was computed is dropped.
        pl.when(place[1] >= 0)(functools.partial(triton_codecs.store_entry, planes, place, encoded))

    return store


def store_place(
    places: Ref, number: jax.Array, live: jax.Array, begin: jax.Array, place: Place
) -> None:
    """Leaves a window's place and first position for another launch; none where it is not live."""
    layer, block, offset = place
    for column, value in enumerate((layer, jnp.where(live, block, -1), offset, begin)):
        places[number, column] = value


def load_place(places: Ref, number: jax.Array) -> tuple[jax.Array, Place]:
    """A window's first position and its place, from i32[n, PLACE_FIELDS]."""
    layer, block, offset, begin = (places[number, column] for column in range(PLACE_FIELDS))
    return begin, (layer, block, offset)
