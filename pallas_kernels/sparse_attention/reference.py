"""Definition of `sparse_attention`: one softmax over window and entries, with a sink.

    l[h, i] = q[h] . k_i scale
    o[h] = sum_i exp(l[h, i]) k_i / (sum_i exp(l[h, i]) + exp(sink[h]))

A sink of minus infinity is none; a query without keys gets zeros. With frequencies, o is rounded,
and inverse RoPE follows, by the query's position.

Source: deepseek_v4.md section 1.3, step 9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.chunks import map_tokens
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.common.norm_rope import rms_norm_by_pairs, rotate
from pallas_kernels.common.rounding import round_to
from pallas_kernels.gather_entries.reference import gather_entries, gather_window
from pallas_kernels.sparse_attention.call_shapes import FLOOR, LOG2_E


class Arguments(NamedTuple):
    """The arguments of `op.sparse_attention`, which describes and checks them."""

    queries: jax.Array
    sink: jax.Array
    ring: LayerPlanes
    rows: Planes
    pool: LayerPlanes | None
    selected: jax.Array | None
    call: CallIndices
    scale: float
    frequencies: jax.Array | None = None
    query_eps: float | None = None
    apart: bool = False


class AttentionPart(NamedTuple):
    """Attention to some of the keys, before sink and division, or such parts of all keys, stacked.

    Attributes:
      sums: f32[..., T, H, C], values weighted by exponentials relative to the largest logit.
      statistics: f32[..., T, 2, H], the largest logit times log2(e), `call_shapes.FLOOR` without
        keys, and the sum of the weights.
    """

    sums: jax.Array
    statistics: jax.Array


class JoinArguments(NamedTuple):
    """The arguments of `parts.join_parts`, which describes and checks them."""

    parts: AttentionPart
    sink: jax.Array
    positions: jax.Array
    frequencies: jax.Array | None
    dtype: DTypeLike


def attend(
    queries: jax.Array, keys: jax.Array, valid: jax.Array, sink: jax.Array, *, scale: float
) -> jax.Array:
    """The formula above, on dense keys, which are values too; leading axes broadcast.

    Args:
      queries: [..., H, C].
      keys: f32[..., S, C]; finite where not valid too, since 0 * NaN is NaN.
      valid: bool[..., S].
      sink: f32[H].
      scale: factor of the logits.

    Returns:
      f32[..., H, C].
    """
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.matmul(queries.astype(jnp.float32), keys.mT, precision=highest)  # f32[..., H, S]
    logits = jnp.where(valid[..., None, :], logits * scale, -jnp.inf)
    sink = jnp.expand_dims(sink, range(queries.ndim - 2))  # f32[..., H]
    # Finite even without keys and without a sink, where -inf - -inf would be NaN.
    largest = jnp.maximum(jnp.max(logits, axis=-1), jnp.maximum(sink, np.finfo(np.float32).min))
    weights = jnp.exp(logits - largest[..., None])  # f32[..., H, S]
    total = jnp.sum(weights, axis=-1) + jnp.exp(sink - largest)  # f32[..., H]
    total = jnp.where(total > 0, total, 1.0)
    return jnp.matmul(weights, keys, precision=highest) / total[..., None]


def sparse_attention(arguments: Arguments) -> jax.Array:
    """Gathers each token's keys, window first, and attends to them; some tokens at a time."""
    queries, sink, call, frequencies = (
        arguments.queries,
        arguments.sink,
        arguments.call,
        arguments.frequencies,
    )

    def attend_some(some: jax.Array, keys: jax.Array, valid: jax.Array) -> jax.Array:
        attended = attend(some, keys, valid, sink, scale=arguments.scale)
        return round_to(attended, queries.dtype)

    positions = call.positions[:, None]  # i32[T, 1]
    if arguments.query_eps is not None and frequencies is not None:
        normed = rms_norm_by_pairs(queries, None, eps=arguments.query_eps)
        arguments = arguments._replace(queries=rotate(normed, positions, frequencies))
    attended = _map_keys(attend_some, arguments)  # [T, H, C]
    if frequencies is None:
        return attended
    return rotate(attended, positions, frequencies, inverse=True)


def attend_in_part(arguments: Arguments) -> AttentionPart:
    """See `parts.attend_in_part`; there is no sink yet."""

    def attend_some(some: jax.Array, keys: jax.Array, valid: jax.Array) -> jax.Array:
        sums, largest, total = _weigh(some, keys, valid, scale=arguments.scale)
        # A token's results in one array, for they come in chunks of tokens.
        return jnp.concatenate([sums, largest[..., None], total[..., None]], axis=-1)

    found = _map_keys(attend_some, arguments)  # f32[T, H, C + 2]
    return AttentionPart(found[..., :-2], jnp.moveaxis(found[..., -2:], -1, -2))


def join_parts(arguments: JoinArguments) -> jax.Array:
    """See `parts.join_parts`."""
    parts = arguments.parts
    largest, total = parts.statistics[:, :, 0], parts.statistics[:, :, 1]  # f32[n, T, H] each
    sink = arguments.sink[None] * LOG2_E  # f32[1, H]
    top = jnp.maximum(jnp.max(largest, axis=0), jnp.maximum(sink, FLOOR))  # f32[T, H]
    weight = jnp.exp2(largest - top[None])  # f32[n, T, H]
    whole = jnp.sum(total * weight, axis=0) + jnp.exp2(sink - top)  # f32[T, H]
    # A sum too large for f32 is that of a part which counts for nothing.
    sums = jnp.where(weight[..., None] == 0, 0.0, parts.sums * weight[..., None])  # f32[n, T, H, C]
    whole = jnp.where(whole > 0, whole, 1.0)  # f32[T, H]
    attended = round_to(jnp.sum(sums, axis=0) / whole[..., None], arguments.dtype)  # [T, H, C]
    if arguments.frequencies is None:
        return attended
    return rotate(attended, arguments.positions[:, None], arguments.frequencies, inverse=True)


def _weigh(
    queries: jax.Array, keys: jax.Array, valid: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums [..., H, C], largest logits [..., H], times log2(e), and sums of weights [..., H]."""
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.matmul(queries.astype(jnp.float32), keys.mT, precision=highest)
    logits = jnp.where(valid[..., None, :], logits * (scale * LOG2_E), -jnp.inf)
    largest = jnp.maximum(jnp.max(logits, axis=-1), FLOOR)  # f32[..., H]
    weights = jnp.exp2(logits - largest[..., None])  # f32[..., H, S]
    return jnp.matmul(weights, keys, precision=highest), largest, jnp.sum(weights, axis=-1)


def _map_keys(
    function: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], arguments: Arguments
) -> jax.Array:
    """function(queries [n, H, C], keys f32[n, S, C], valid bool[n, S]) of some tokens at a time."""
    ring, pool, selected, call = arguments.ring, arguments.pool, arguments.selected, arguments.call
    dim = arguments.queries.shape[-1]
    places = {
        "queries": arguments.queries,
        "segment_ids": call.segment_ids,
        "slots": call.slots,
        "positions": call.positions,
        "lengths": call.lengths,
    }
    num_keys = first_plane(ring.planes).shape[2]
    if pool is not None and selected is not None:
        if call.visible is not None:
            number = jnp.arange(selected.shape[1], dtype=jnp.int32)[None]
            selected = jnp.where(number < call.visible[:, None], selected, -1)
        places["selected"] = selected
        num_keys += selected.shape[1]

    dense = {"dim": dim, "dtype": jnp.float32}

    def map_some(some: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        here = dataclasses.replace(
            call,
            segment_ids=some["segment_ids"],
            slots=some["slots"],
            positions=some["positions"],
            lengths=some["lengths"],
        )
        keys, valid = gather_window(ring, arguments.rows, here, tokens=tokens, **dense)
        if pool is not None and selected is not None:
            entries, present = gather_entries(pool, here, some["selected"], **dense)
            keys = jnp.concatenate([keys, entries], axis=1)
            valid = jnp.concatenate([valid, present], axis=1)
        return function(some["queries"], keys, valid)

    return map_tokens(map_some, places, elements_per_token=num_keys * dim)
