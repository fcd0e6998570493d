"""One token per request: norm, RoPE, encode, keep, and compress what closes, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.append_and_flush import reference, triton_gpu
from pallas_kernels.append_and_flush.reference import Appended, Arguments
from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import (
    check_call,
    check_instance,
    check_integer,
    check_is_codec,
    check_same_length,
    check_stored,
)
from pallas_kernels.common.codecs import Codec
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.common.norm_rope import NormRope
from pallas_kernels.compressor.op import check_compressor
from pallas_kernels.compressor.reference import Compressor
from pallas_kernels.encode_tokens.op import check_tokens
from pallas_kernels.round_index_queries.op import check_index_queries

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.append_and_flush,
    Backend.TRITON_GPU: triton_gpu.append_and_flush,
}


def append_and_flush(
    queries: jax.Array,
    kv: jax.Array,
    ring: LayerPlanes,
    compressors: Sequence[Compressor],
    call: CallIndices,
    norm_rope: NormRope,
    *,
    compression_ratio: int,
    index_queries: jax.Array | None = None,
    index_codec: Codec | None = None,
    backend: Backend | None = None,
) -> Appended:
    """Everything that a decode step's token leaves in a layer's cache, and its queries.

    With one token per request nothing that the call still reads is overwritten: the ring row that
    the token takes is one that no query sees any more, and a closing window takes the token's own
    projections from the call. With more, see `encode_tokens`, `flush_csa` and `append_tokens`, and
    `round_index_queries` for the index queries, which go along.

    In plain JAX, of a CSA layer with one compressor whose window token t closes, with `norm` and
    `rope` as in `encode_tokens`:

        layer, slots, position = ring.layer, call.slots, call.positions     # i32[], i32[T] twice
        rotated = rope(norm(queries))                                       # [T, H, C]
        rows = ring.codec.encode(rope(norm(kv) * norm_rope.weight), R)      # planes [T, ...]
        window = {n: p.at[layer, slots, position % W].set(rows[n]) for n, p in ring.planes.items()}
        new, at = compressors[0].rows, (layer, slots, position % (2 * M))
        state = {n: p.at[at].set(new[n]) for n, p in compressors[0].state.items()}

        def two_windows(plane):                                             # f32[2 M, C]
            tokens = jnp.roll(plane[layer, slots[t]], -position[t] - 1, axis=0)  # the oldest first
            return jnp.concatenate([tokens[:M, :C], tokens[M:, C:]])

        values, scores = two_windows(state["values"]), two_windows(state["scores"])
        mean = jnp.sum(jax.nn.softmax(scores, axis=0) * values, axis=0)     # f32[C]
        rounded = index_codec.decode(index_codec.encode(rope(index_queries), 0), IC)

    The window's entry is the mean, normed, rotated to the window's first position and encoded.

    Args:
      queries: [T, H, C], as projected; each head is normed without a weight, if `norm_rope` says
        so.
      kv: [T, C], as projected, in the same dtype, that of activations.
      ring: the window, planes [L, NS, W, ...]; its layer is that of states and pools too.
      compressors: none on SWA layers; on CSA layers the main one and the indexer's; one on HCA.
      call: where the call's tokens belong. A segment has one token at most, and a position is also
        how many tokens its request has kept.
      norm_rope: norm of the window entries, and the layer's RoPE.
      compression_ratio: M, tokens per window; not read without compressors.
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
    check_call(call)
    check_tokens(queries, kv, norm_rope, call.positions)
    num_tokens, dim = kv.shape
    check_stored("ring", ring, dim)
    _check_index_queries(index_queries, index_codec, queries, norm_rope.frequencies)
    if not isinstance(compressors, list | tuple):
        check_instance("compressors", compressors, list)
    if compressors:
        compression_ratio = check_integer("compression_ratio", compression_ratio, 1)
    for number, compressor in enumerate(compressors):
        check_compressor(f"compressors[{number}]", compressor, num_tokens, compression_ratio)
    if len(compressors) > 1 and not all(isinstance(c.state, dict) for c in compressors):
        raise ValueError("a running pool is the state of a layer's only compressor")
    return resolve("append_and_flush", backend, _IMPLEMENTATIONS)(
        jax_arrays(
            Arguments(
                queries,
                kv,
                ring,
                compressors,
                call,
                norm_rope,
                compression_ratio,
                index_queries,
                index_codec,
            )
        )
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
    check_is_codec("index_codec", codec)
    check_index_queries("index_queries", index_queries, frequencies, codec)
    check_same_length("T", queries=queries, index_queries=index_queries)
    if index_queries.dtype != queries.dtype:
        raise ValueError(
            f"queries and index_queries must agree, got {queries.dtype} and {index_queries.dtype}"
        )
