"""Compressor: one compressor of a layer, as every op takes it."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.common.codecs import Codec, Planes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressor:
    """One compressor of a layer: what it keeps, what the call gives it, where its entries go.

    Attributes:
      state: CSA: `values` and `scores`, f32[L, NS, 2 * M, 2 * C], token p in row p % (2 * M).
        HCA: f32[L, NS, 3, C], the running pool of the open window.
      rows: the call's projections, `values` and `scores`, f32[T, 2 * C] of CSA or f32[T, C] of
        HCA, position bias added; the tokens of a segment lie next to each other.
      norm: [C], norm weight of the entries, in the dtype of activations.
      pool: planes [L, NB, EB, ...] of the codec, where entries are stored.
      codec: how entries are stored; static.
    """

    state: Planes | jax.Array
    rows: Planes
    norm: jax.Array
    pool: Planes
    codec: Codec = dataclasses.field(metadata={"static": True})
