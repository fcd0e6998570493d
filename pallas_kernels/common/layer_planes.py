"""LayerPlanes: one layer of a stacked family of arrays, as ops take it."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.common.codecs import Codec, Planes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerPlanes:
    """One layer of stacked planes, and how a vector is stored in them.

    Attributes:
      planes: planes of all layers, [L, NB, EB, ...] of blocks or [L, NS, W, ...] of a ring. An op
        that writes returns them whole, with one layer changed.
      layer: i32[], index into L.
      codec: how a vector is stored; static.
    """

    planes: Planes
    layer: jax.Array
    codec: Codec = dataclasses.field(metadata={"static": True})
