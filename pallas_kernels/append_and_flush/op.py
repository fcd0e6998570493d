"""One token per request: norm, rotate, encode, keep, and compress what closes, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.append_and_flush import reference, triton_gpu
from pallas_kernels.append_and_flush.arrays import Appended, Compressor
from pallas_kernels.common.backend import Backend, resolve
from pallas_kernels.common.checks import (
    check_codec,
    check_indices,
    check_rank,
    check_same_length,
    check_shape,
)
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.encode_tokens.op import check_tokens
from pallas_kernels.round_index_queries.op import check_index_queries

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.append_and_flush,
    Backend.TRITON_GPU: triton_gpu.append_and_flush,
}


def append_and_flush(
    queries: jax.Array,
    kv: jax.Array,
    norm: jax.Array,
    frequencies: jax.Array,
    ring: Planes,
    compressors: Sequence[Compressor],
    block_table: jax.Array | None,
    *,
    codec: Codec,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    rate: int,
    eps: float,
    index_queries: jax.Array | None = None,
    index_codec: Codec | None = None,
    backend: Backend | None = None,
) -> Appended:
    """Everything that a decode step's token leaves in a layer's cache, and its queries.

    With one token per request nothing that the call still reads is overwritten: the ring row that
    the token takes is one that no query sees any more, and a closing window takes the token's own
    projections from the call. With more, see `encode_tokens`, `flush_csa` and `append_tokens`, and
    `round_index_queries` for the index queries, which go along.

    Args:
      queries: [T, H, C], as projected; each head is normed without a weight.
      kv: [T, C], as projected, in the same dtype, that of activations.
      norm: [C], weight of the window entries' norm.
      frequencies: f32[R / 2], of the layer's table.
      ring: planes [L, NS, W, ...] of the codec, the window.
      compressors: none on SWA layers; on CSA layers the main one and the indexer's; one on HCA.
      block_table: i32[B, LB], physical block of each logical one, -1 where there is none; None
        without compressors.
      codec: how window entries are stored.
      request_ids: i32[T], row of the table; an entry of row -1 is not written.
      slots: i32[T]; -1 writes nothing. No slot twice.
      positions: i32[T], also how many tokens each request has kept.
      layer: i32[], index into L.
      rate: M, tokens per window; not read without compressors.
      eps: floor of the norms.
      index_queries: [T, IH, IC], as projected, in the dtype of `queries`; None on layers that
        select nothing.
      index_codec: how index keys are stored; None without `index_queries`.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      See `Appended`. Of padding, queries and rows are computed as of any other token.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md sections 1.3, 1.7, 2.2, 2.4, 3 and 4.
    """
    check_tokens(queries, kv, norm, frequencies, positions)
    num_tokens, dim = kv.shape
    check_same_length("T", kv=kv, request_ids=request_ids, slots=slots)
    check_indices(request_ids=request_ids, slots=slots)
    check_codec("ring", ring, codec, dim)
    _check_index_queries(index_queries, index_codec, queries, frequencies)
    if (block_table is None) != (not compressors):
        raise ValueError("block_table goes with compressors; pass both, or None and ()")
    if block_table is not None:
        check_rank(2, block_table=block_table)
        check_indices(block_table=block_table)
    for number, compressor in enumerate(compressors):
        _check_compressor(f"compressors[{number}]", compressor, num_tokens, rate)
    if len(compressors) > 1 and not all(isinstance(c.state, dict) for c in compressors):
        raise ValueError("a running pool is the state of a layer's only compressor")
    return resolve("append_and_flush", backend, _IMPLEMENTATIONS, preferred=Backend.TRITON_GPU)(
        queries,
        kv,
        norm,
        frequencies,
        ring,
        compressors,
        block_table,
        codec=codec,
        request_ids=request_ids,
        slots=slots,
        positions=positions,
        layer=layer,
        rate=rate,
        eps=eps,
        index_queries=index_queries,
        index_codec=index_codec,
    )


def _check_index_queries(
    index_queries: jax.Array | None,
    codec: Codec | None,
    queries: jax.Array,
    frequencies: jax.Array,
) -> None:
    if (index_queries is None) != (codec is None):
        raise ValueError("index_codec goes with index_queries; pass both, or neither")
    if index_queries is None or codec is None:
        return
    check_index_queries("index_queries", index_queries, frequencies, codec)
    check_same_length("T", queries=queries, index_queries=index_queries)
    if index_queries.dtype != queries.dtype:
        raise ValueError(
            f"queries and index_queries must agree, got {queries.dtype} and {index_queries.dtype}"
        )


def _check_compressor(name: str, compressor: Compressor, num_tokens: int, rate: int) -> None:
    state, rows, norm, pool, codec = compressor
    check_rank(1, **{f"{name}.norm": norm})
    dim = norm.shape[0]
    check_codec(f"{name}.pool", pool, codec, dim)
    for part, array in rows.items():
        width = 2 * dim if isinstance(state, dict) else dim
        check_shape(f"{name}.rows[{part!r}]", array, (num_tokens, width), "T, width")
    if isinstance(state, dict):
        found = {part: plane.shape[2:] for part, plane in state.items()}
        wanted = dict.fromkeys(("values", "scores"), (2 * rate, 2 * dim))
    else:
        found, wanted = {"running": state.shape[2:]}, {"running": (3, dim)}
    if found != wanted:
        raise ValueError(f"{name}.state must keep {wanted} per slot, got {found}")
