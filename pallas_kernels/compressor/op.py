"""Writes entries to their blocks: finished ones, or whatever windows a call closes."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.common.backend import Backend, resolve
from pallas_kernels.common.checks import (
    check_codec,
    check_indices,
    check_planes,
    check_rank,
    check_same_length,
    check_shape,
    first_plane,
)
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.compressor import reference, triton_gpu

_WRITE = {Backend.REFERENCE: reference.flush_write}
_CSA = {Backend.REFERENCE: reference.flush_csa, Backend.TRITON_GPU: triton_gpu.flush_csa}
_HCA = {Backend.REFERENCE: reference.flush_hca, Backend.TRITON_GPU: triton_gpu.flush_hca}


def flush_write(
    pool: Planes,
    rows: Planes,
    block_table: jax.Array,
    request_ids: jax.Array,
    entries: jax.Array,
    *,
    layer: jax.Array,
    backend: Backend | None = None,
) -> Planes:
    """Scatters encoded entries, or index keys, through the block table.

    Args:
      pool: planes [L, NB, EB, ...].
      rows: planes [n, ...].
      block_table: i32[B, LB], physical block of each logical one; -1 where there is none.
      request_ids: i32[n], row of the table; -1 writes nothing.
      entries: i32[n], logical entry numbers; -1, or one without a block, writes nothing.
      layer: i32[], index into L.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The pool with the rows written.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: original_cache.md, flush; deepseek_v4.md section 2.4.
    """
    check_planes(pool, rows, stacked_name="pool", rows_name="rows")
    check_rank(2, block_table=block_table)
    check_same_length("n", request_ids=request_ids, entries=entries, rows=first_plane(rows))
    check_indices(block_table=block_table, request_ids=request_ids, entries=entries)
    return resolve("flush_write", backend, _WRITE)(
        pool, rows, block_table, request_ids, entries, layer=layer
    )


def flush_csa(
    pools: Sequence[Planes],
    states: Sequence[Planes],
    rows: Sequence[Planes],
    norms: Sequence[jax.Array],
    frequencies: jax.Array,
    block_table: jax.Array,
    *,
    codecs: Sequence[Codec],
    closing: jax.Array,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    backend: Backend | None = None,
) -> tuple[Planes, ...]:
    """Compresses the CSA windows that a call closes and writes their entries.

    Several compressors of one layer, the main one and the indexer's, share the call and the table;
    pools, states, rows, norms and codecs have one item for each.

    Args:
      pools: planes [L, NB, EB, ...] of the codec.
      states: `values` and `scores`, f32[L, NS, 2 * M, 2 * C], as before the call.
      rows: `values` and `scores`, f32[T, 2 * C], the call's projections, position bias added; a
        request's tokens next to each other.
      norms: [C], in the dtype of activations.
      frequencies: f32[R / 2], of the compress table.
      block_table: i32[B, LB], physical block of each logical one; -1 where there is none.
      codecs: how entries are stored.
      closing: i32[n], tokens of the call that close a window, in any order; -1 writes nothing.
      request_ids: i32[T], row of the table; an entry of row -1 is not written.
      slots: i32[T].
      positions: i32[T].
      lengths: i32[T], tokens of each token's request before the call.
      layer: i32[], index into L.
      rate: M, tokens per window.
      eps: floor of the norm.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The pools with the entries written: pooled, normed, rotated to the window's first position,
      rounded after each, and encoded. An entry without a block writes nothing.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md sections 2.2, 2.4 and 4.
    """
    _check_call(block_table, closing, request_ids, slots, positions, lengths)
    count = len(pools)
    if not count or {len(states), len(rows), len(norms), len(codecs)} != {count}:
        raise ValueError(
            "pools, states, rows, norms and codecs must have one item per compressor, got "
            f"{count}, {len(states)}, {len(rows)}, {len(norms)} and {len(codecs)}"
        )
    for pool, state, new, norm, codec in zip(pools, states, rows, norms, codecs, strict=True):
        check_rank(1, norms=norm)
        width = 2 * norm.shape[0]
        check_codec("pools", pool, codec, norm.shape[0])
        _check_projections(new, (positions.shape[0], width))
        shapes = {name: plane.shape[2:] for name, plane in state.items()}
        if shapes != dict.fromkeys(("values", "scores"), (2 * rate, width)):
            raise ValueError(
                "states must keep 2 * rate rows of 2 * C values and scores, got "
                f"{shapes} for {rate=} and {norm.shape=}"
            )
    return resolve("flush_csa", backend, _CSA, preferred=Backend.TRITON_GPU)(
        pools,
        states,
        rows,
        norms,
        frequencies,
        block_table,
        codecs=codecs,
        closing=closing,
        request_ids=request_ids,
        slots=slots,
        positions=positions,
        lengths=lengths,
        layer=layer,
        rate=rate,
        eps=eps,
    )


def flush_hca(
    pool: Planes,
    running: jax.Array,
    rows: Planes,
    norm: jax.Array,
    frequencies: jax.Array,
    block_table: jax.Array,
    *,
    codec: Codec,
    closing: jax.Array,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    max_count: int,
    backend: Backend | None = None,
) -> Planes:
    """Compresses the HCA windows that a call closes and writes their entries.

    Args:
      pool: planes [L, NB, EB, ...] of the codec.
      running: f32[L, NS, 3, C], pools of the open windows as they were before the call.
      rows: `values` and `scores`, f32[T, C], as in `flush_csa`, and so are all arguments not
        named here.
      norm: [C].
      frequencies: f32[R / 2].
      block_table: i32[B, LB].
      codec: how entries are stored.
      closing: i32[n].
      request_ids: i32[T].
      slots: i32[T].
      positions: i32[T].
      lengths: i32[T].
      layer: i32[].
      rate: M, tokens per window.
      eps: floor of the norm.
      max_count: the most tokens of one request there can be in the call; static.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The pool with the entries written.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md sections 2.2, 2.4 and 4.
    """
    _check_call(block_table, closing, request_ids, slots, positions, lengths)
    check_rank(1, norm=norm)
    check_rank(4, running=running)
    check_codec("pool", pool, codec, norm.shape[0])
    _check_projections(rows, (positions.shape[0], norm.shape[0]))
    if running.shape[2:] != (3, *norm.shape):
        raise ValueError(
            f"running must keep 3 rows of C values, norm C, got {running.shape=} and {norm.shape=}"
        )
    return resolve("flush_hca", backend, _HCA, preferred=Backend.TRITON_GPU)(
        pool,
        running,
        rows,
        norm,
        frequencies,
        block_table,
        codec=codec,
        closing=closing,
        request_ids=request_ids,
        slots=slots,
        positions=positions,
        lengths=lengths,
        layer=layer,
        rate=rate,
        eps=eps,
        max_count=max_count,
    )


def _check_call(
    block_table: jax.Array,
    closing: jax.Array,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
) -> None:
    check_rank(2, block_table=block_table)
    check_rank(1, closing=closing)
    per_token = {
        "request_ids": request_ids,
        "slots": slots,
        "positions": positions,
        "lengths": lengths,
    }
    check_same_length("T", **per_token)
    check_indices(block_table=block_table, closing=closing, **per_token)


def _check_projections(rows: Planes, shape: tuple[int, int]) -> None:
    if rows.keys() != {"values", "scores"}:
        raise ValueError(f"rows must have values and scores, got {sorted(rows)}")
    for name, array in rows.items():
        check_shape(f"rows[{name!r}]", array, shape, "T, width")
