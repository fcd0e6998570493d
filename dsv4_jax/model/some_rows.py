"""Some of a call's tokens as a call of their own, which the upper layers run alone.

They are all tokens of some rows, and none of the others': a row is read on by all layers or by the
lower ones. What layers make of them comes back to their places, and zeros to all others.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4_jax.collectives import join_rows, rows_of_a_device, take_rows
from dsv4_jax.model.hyper_connections import Residual
from pallas_kernels.common.addressing import drop_absent
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.pending import finish


def pick(x: jax.Array, places: jax.Array) -> jax.Array:
    """[T, ...] -> [U, ...]: the rows at i32[U] places; of -1, which is none, any."""
    return x[jnp.maximum(places, 0)]


def spread(x: jax.Array, places: jax.Array, num_rows: int) -> jax.Array:
    """[U, ...] -> [T, ...]: rows at their places, zeros at all others."""
    zeros = jnp.zeros((num_rows, *x.shape[1:]), x.dtype)
    return zeros.at[drop_absent(places, num_rows)].set(x, mode="drop")


def pick_residual(residual: Residual, places: jax.Array, num_rows: int) -> Residual:
    """The residual of some tokens; on a mesh of those that this device has of them.

    Args:
      residual: of all T tokens, on a mesh of this device's.
      places: i32[U].
      num_rows: T.
    """

    def of(x: jax.Array) -> jax.Array:
        picked = pick(join_rows(x, num_rows), places)
        return take_rows(picked, rows_of_a_device(len(places)))

    return jax.tree.map(of, residual._replace(output=finish(residual.output)))


def pick_call(call: CallIndices, places: jax.Array) -> CallIndices:
    """The call of some tokens, in the rows and at the positions that they have in the whole one.

    Args:
      call: of T tokens.
      places: i32[U], ascending, then -1; a row's tokens are all among them or none is.
    """
    row = jnp.where(places >= 0, pick(call.segment_ids, places), -1)
    is_there = row >= 0
    member = row[:, None] == jnp.arange(len(call.row_slots))[None]
    return dataclasses.replace(
        call,
        segment_ids=row,
        slots=jnp.where(is_there, pick(call.slots, places), -1),
        positions=jnp.where(is_there, pick(call.positions, places), 0),
        lengths=jnp.where(is_there, pick(call.lengths, places), 0),
        row_counts=jnp.sum(member, axis=0, dtype=jnp.int32),
        row_offsets=jnp.argmax(member, axis=0).astype(jnp.int32),
        max_row_tokens=min(call.max_row_tokens, len(places)),
    )
