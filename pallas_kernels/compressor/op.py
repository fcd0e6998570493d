"""Writes entries to their blocks: finished ones, or those of the windows that a call closes."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import (
    check_call,
    check_codec,
    check_floats,
    check_frequencies,
    check_indices,
    check_instance,
    check_integer,
    check_layer,
    check_list,
    check_names,
    check_number,
    check_planes,
    check_rank,
    check_same_length,
    check_shape,
    check_stacked,
    first_plane,
)
from pallas_kernels.common.codecs import Planes
from pallas_kernels.compressor import reference, triton_gpu, triton_write
from pallas_kernels.compressor.closing import find_closing
from pallas_kernels.compressor.reference import Compressor, Entries, Windows

_WRITE = {
    Backend.REFERENCE: reference.flush_write,
    Backend.TRITON_GPU: triton_write.flush_write,
}
_CSA = {Backend.REFERENCE: reference.flush_csa, Backend.TRITON_GPU: triton_gpu.flush_csa}
_HCA = {Backend.REFERENCE: reference.flush_hca, Backend.TRITON_GPU: triton_gpu.flush_hca}


def flush_write(
    pool: Planes,
    rows: Planes,
    block_table: jax.Array,
    segment_ids: jax.Array,
    entries: jax.Array,
    *,
    layer: jax.Array,
    backend: Backend | None = None,
) -> Planes:
    """Writes encoded entries, or index keys, through the block table.

    In plain JAX, where every entry has a block:

        block, offset = jnp.divmod(entries, EB)                             # i32[n] each
        block = block_table[segment_ids, block]                             # i32[n]
        written = {n: p.at[layer, block, offset].set(rows[n]) for n, p in pool.items()}

    Args:
      pool: planes [L, NB, EB, ...].
      rows: planes [n, ...].
      block_table: i32[B, LB], physical block of each logical one; -1 where there is none.
      segment_ids: i32[n], row of the table; -1 writes nothing.
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
    check_layer("layer", layer, first_plane(pool))
    check_rank(2, block_table=block_table)
    check_rank(1, segment_ids=segment_ids, entries=entries)
    check_same_length("n", segment_ids=segment_ids, entries=entries, rows=first_plane(rows))
    check_indices(block_table=block_table, segment_ids=segment_ids, entries=entries)
    return resolve("flush_write", backend, _WRITE)(
        jax_arrays(Entries(pool, rows, block_table, segment_ids, entries, layer))
    )


def flush_csa(
    compressors: Sequence[Compressor],
    call: CallIndices,
    frequencies: jax.Array,
    *,
    layer: jax.Array,
    compression_ratio: int,
    eps: float,
    backend: Backend | None = None,
) -> tuple[Planes, ...]:
    """Compresses the CSA windows that a call closes and writes their entries.

    In plain JAX, the mean of the window that token t of the call closes, if the window before it
    lies in the call too:

        def two_windows(rows):                                              # f32[2 M, C]
            before, own = slice(t - 2 * M + 1, t - M + 1), slice(t - M + 1, t + 1)
            return jnp.concatenate([rows[before, :C], rows[own, C:]])

        values, scores = two_windows(rows["values"]), two_windows(rows["scores"])
        mean = jnp.sum(jax.nn.softmax(scores, axis=0) * values, axis=0)     # f32[C]

    Args:
      compressors: one or more of a layer, which share the call and its block table: the main one
        and the indexer's. Their states are as they were before the call.
      call: where the call's tokens belong.
      frequencies: f32[R / 2], radians per position, of the compressors' RoPE.
      layer: i32[], index into L.
      compression_ratio: M, tokens per window.
      eps: floor of the norms.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The pool of each compressor with the entries written: pooled, normed, rotated to the window's
      first position, rounded after each of these, and encoded. An entry without a block is not
      written.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md sections 2.2, 2.4 and 4.
    """
    check_call(call)
    check_list("compressors", compressors, of="compressors")
    compression_ratio = check_integer("compression_ratio", compression_ratio, 1)
    eps = check_number("eps", eps, 0)
    for number, compressor in enumerate(compressors):
        name = f"compressors[{number}]"
        check_compressor(name, compressor, call.positions.shape[0], compression_ratio)
        if not isinstance(compressor.state, dict):
            raise ValueError(f"{name}.state must be values and scores on a CSA layer")
        check_frequencies("frequencies", frequencies, compressor.norm.shape[0])
        check_layer("layer", layer, first_plane(compressor.pool))
    closing = find_closing(call, compression_ratio)
    return resolve("flush_csa", backend, _CSA)(
        *jax_arrays(compressors, Windows(call, frequencies, closing, layer, compression_ratio, eps))
    )


def flush_hca(
    compressor: Compressor,
    call: CallIndices,
    frequencies: jax.Array,
    *,
    layer: jax.Array,
    compression_ratio: int,
    eps: float,
    backend: Backend | None = None,
) -> Planes:
    """Compresses the HCA windows that a call closes and writes their entries.

    In plain JAX, the mean of the window that token t of the call closes, if all of it lies there:

        window = slice(t - M + 1, t + 1)
        weights = jax.nn.softmax(rows["scores"][window], axis=0)            # f32[M, C]
        mean = jnp.sum(weights * rows["values"][window], axis=0)            # f32[C]

    Args:
      compressor: the layer's only one, its state as it was before the call.
      call: where the call's tokens belong.
      frequencies: f32[R / 2], radians per position, of the compressor's RoPE.
      layer: i32[], index into L.
      compression_ratio: M, tokens per window.
      eps: floor of the norm.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The pool with the entries written, as by `flush_csa`.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md sections 2.2, 2.4 and 4.
    """
    check_call(call)
    compression_ratio = check_integer("compression_ratio", compression_ratio, 1)
    eps = check_number("eps", eps, 0)
    check_compressor("compressor", compressor, call.positions.shape[0], compression_ratio)
    if isinstance(compressor.state, dict):
        raise ValueError("compressor.state must be a running pool on an HCA layer")
    check_frequencies("frequencies", frequencies, compressor.norm.shape[0])
    check_layer("layer", layer, first_plane(compressor.pool))
    closing = find_closing(call, compression_ratio)
    return resolve("flush_hca", backend, _HCA)(
        *jax_arrays(compressor, Windows(call, frequencies, closing, layer, compression_ratio, eps))
    )


def check_compressor(
    name: str, compressor: Compressor, num_tokens: int, compression_ratio: int
) -> None:
    """The arrays of a compressor fit each other, T tokens and windows of so many tokens."""
    check_instance(name, compressor, Compressor)
    state, norm = compressor.state, compressor.norm
    check_rank(1, **{f"{name}.norm": norm})
    check_floats(**{f"{name}.norm": norm})
    dim = norm.shape[0]
    check_codec(f"{name}.pool", compressor.pool, compressor.codec, dim)
    check_names(f"{name}.rows", compressor.rows, ("values", "scores"))
    width = 2 * dim if isinstance(state, dict) else dim
    for part, array in compressor.rows.items():
        check_shape(f"{name}.rows[{part!r}]", array, (num_tokens, width), "T, width")
        check_floats(**{f"{name}.rows[{part!r}]": array})
    if isinstance(state, dict):
        check_names(f"{name}.state", state, ("values", "scores"))
        check_stacked(f"{name}.state", state)
        check_floats(**{f"{name}.state[{part!r}]": plane for part, plane in state.items()})
        found = {part: plane.shape[2:] for part, plane in state.items()}
        wanted = dict.fromkeys(("values", "scores"), (2 * compression_ratio, width))
    else:
        check_floats(**{f"{name}.state": state})
        found, wanted = {"running": state.shape[2:]}, {"running": (3, dim)}
    if found != wanted:
        raise ValueError(f"{name}.state must keep {wanted} per slot, got {found}")
    layers = {f"{name}.pool": first_plane(compressor.pool)}
    layers |= {f"{name}.state": first_plane(state) if isinstance(state, dict) else state}
    check_same_length("L", **layers)
