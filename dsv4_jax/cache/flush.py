"""Compresses the windows that a call closes: tail -> entry -> block, masked, on the device.

Called in every forward with the same call sequence, whether a window closes or not; any number may
close per request. The tail needs no rotation afterwards: its rows are addressed by position.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.schema import LayerCacheSchema, same_sizes
from dsv4_jax.cache.step_input import CallIndices
from dsv4_jax.layer_schedule import AttentionType


def maybe_flush_csa(
    handle: LayerCacheHandle,
    schema: LayerCacheSchema,
    m: int,
    *,
    norm: jax.Array,
    indexer_norm: jax.Array,
    frequencies: jax.Array,
    eps: float,
) -> LayerCacheHandle:
    """Writes the entry and the index key of every CSA window that closes in this call.

    Args:
      handle: after `write_swa`.
      schema: of the layer.
      m: tokens per window; must be the schema's.
      norm: [C], norm weight of the compressor.
      indexer_norm: [IC], norm weight of the indexer's compressor.
      frequencies: f32[R / 2], of the compress table.
      eps: floor of the norms.

    Returns:
      The handle with the entries written; `commit` still has to follow.

    Raises:
      ValueError: the layer is of another type or rate, or `write_swa` has not been called.

    Source: deepseek_v4.md sections 2.2 and 3.
    """
    _check(handle, schema, m, AttentionType.CSA)
    state, rows, call, paged = handle.state, handle.rows, handle.call, handle.paged
    if rows is None or rows.compressor is None or rows.indexer is None:
        raise ValueError("the call's projections are not there yet; call write_swa first")
    if state.tail is None or state.index_tail is None:
        raise ValueError("the state pool was built for another type of layer than this CSA one")
    assert paged is not None
    assert paged.index_keys is not None
    entries, index_keys = pk.flush_csa(
        (paged.entries, paged.index_keys),
        (state.tail, state.index_tail),
        (rows.compressor.planes, rows.indexer.planes),
        (norm, indexer_norm),
        frequencies,
        call.block_table,
        codecs=(schema.format.entry, schema.format.index_key),
        closing=_closing_tokens(call, m),
        request_ids=call.request_ids,
        slots=call.slots,
        positions=call.positions,
        lengths=call.lengths,
        layer=handle.layer,
        rate=m,
        eps=eps,
    )
    paged = dataclasses.replace(paged, entries=entries, index_keys=index_keys)
    return dataclasses.replace(handle, paged=paged)


def maybe_flush_hca(
    handle: LayerCacheHandle,
    schema: LayerCacheSchema,
    m_prime: int,
    *,
    norm: jax.Array,
    frequencies: jax.Array,
    eps: float,
) -> LayerCacheHandle:
    """Writes the entry of every HCA window that closes in this call.

    Args:
      handle: after `write_swa`.
      schema: of the layer.
      m_prime: tokens per window; must be the schema's.
      norm: [C], norm weight of the compressor.
      frequencies: f32[R / 2], of the compress table.
      eps: floor of the norm.

    Returns:
      The handle with the entries written; `commit` still has to follow.

    Raises:
      ValueError: the layer is of another type or rate, or `write_swa` has not been called.

    Source: deepseek_v4.md section 2.2.
    """
    _check(handle, schema, m_prime, AttentionType.HCA)
    rows, call, paged = handle.rows, handle.call, handle.paged
    if rows is None or rows.compressor is None:
        raise ValueError("the call's projections are not there yet; call write_swa first")
    if handle.state.running is None:
        raise ValueError("the state pool was built for another type of layer than this HCA one")
    assert paged is not None
    entries = pk.flush_hca(
        paged.entries,
        handle.state.running,
        rows.compressor.planes,
        norm,
        frequencies,
        call.block_table,
        codec=schema.format.entry,
        closing=_closing_tokens(call, m_prime),
        request_ids=call.request_ids,
        slots=call.slots,
        positions=call.positions,
        lengths=call.lengths,
        layer=handle.layer,
        rate=m_prime,
        eps=eps,
        max_count=call.max_row_tokens,
    )
    return dataclasses.replace(handle, paged=dataclasses.replace(paged, entries=entries))


def _closing_tokens(call: CallIndices, rate: int) -> jax.Array:
    """`call.closing_tokens`, but where every token has a place anyway, each stays in its own.

    A decode step then compacts nothing.
    """
    num_tokens = call.positions.shape[0]
    if num_tokens > num_tokens // rate + call.row_slots.shape[0]:
        return call.closing_tokens(rate)
    closes = (call.request_ids >= 0) & ((call.positions + 1) % rate == 0)
    return jnp.where(closes, jnp.arange(num_tokens, dtype=jnp.int32), -1)


def _check(
    handle: LayerCacheHandle, schema: LayerCacheSchema, rate: int, attn: AttentionType
) -> None:
    if schema.attn_type != attn:
        raise ValueError(f"layer {schema.layer_idx} is {schema.attn_type}, not {attn}")
    own = handle.schema
    if rate != own.compression_ratio or same_sizes(schema) != same_sizes(own):
        raise ValueError(
            f"schema and rate must be the handle's, got a rate of {rate} for a layer that "
            f"compresses {own.compression_ratio} tokens, and {schema} for {own}"
        )
