"""A layer's arrays and calls, of the released sizes, for the benchmarks of appends and flushes."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks import draws
from benchmarks.cases.cache import (
    BLOCK_TOKENS,
    COMPRESSION_RATIO,
    DECODE_LENGTH,
    ENTRIES_PER_BLOCK,
    EPS,
    IC,
    RELEASED,
    ROPE,
    WINDOW,
    C,
    state_shape,
)
from pallas_kernels import get_cache_format
from pallas_kernels.compressor import triton_gpu
from pallas_kernels.compressor.reference import Windows

FORMAT = get_cache_format(RELEASED)
FAMILIES = {
    "main": (C, FORMAT.entry, FORMAT.entry_bytes(C, ROPE)),
    "index": (IC, FORMAT.index_key, FORMAT.index_key_bytes(IC)),
}
"""Channels, codec and bytes of an entry."""


def planes(codec, dim, *lead):
    """Planes of zeros, for `draws.make`."""
    shapes = codec.plane_shapes(dim, ROPE)
    return {n: jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype) for n, s in shapes.items()}


def projections(lead, width, count=1):
    """Random values and scores, as often as said, for `draws.make`."""
    return [{name: draws.Draw((*lead, width)) for name in ("values", "scores")}] * count


def states_of(kind, layers, num_slots, *, dim):
    """What a compressor keeps of requests that have read something, for `draws.make`."""
    *lead, width = state_shape(kind, layers, num_slots, dim=dim)
    if kind == "csa":
        return projections(lead, width)
    return [draws.Draw((*lead, width), among=(1.0,))]


def frequencies():
    """f32[R / 2]."""
    return jnp.asarray(160000.0 ** -(np.arange(ROPE // 2) / (ROPE // 2)), jnp.float32)


def decode_positions(compression_ratio, batch, closing):
    """i32[B]; `closing` is "all" of the requests, or "some": one in M."""
    behind = np.arange(batch) if closing == "some" else np.zeros(batch, np.int64)
    return DECODE_LENGTH + (compression_ratio - 1 - behind) % compression_ratio


def shuffled_table(positions, batch):
    """i32[B, LB] for tokens at such positions, and how many blocks there are."""
    logical = int(np.max(positions)) // BLOCK_TOKENS + 1
    table = np.random.default_rng(0).permutation(batch * logical).reshape(batch, logical)
    return jnp.asarray(table, jnp.int32), batch * logical


def call_of(positions, lengths, table, *, slots, counts, offsets, max_row_tokens):
    """`CallIndices` of tokens and rows; the rows' lengths are those of their first tokens."""
    per_token = {
        "segment_ids": np.repeat(np.arange(len(counts)), counts),
        "slots": np.repeat(slots, counts),
        "positions": positions,
        "lengths": lengths,
    }
    per_row = {
        "row_slots": slots,
        "row_lengths": np.asarray(lengths)[offsets],
        "row_counts": counts,
        "row_offsets": offsets,
    }
    return pk.CallIndices(
        **{name: jnp.asarray(value, jnp.int32) for name, value in (per_token | per_row).items()},
        block_table=table,
        max_row_tokens=max_row_tokens,
    )


def prefill_call(num_tokens, table):
    """One request's first tokens."""
    return call_of(
        np.arange(num_tokens),
        np.zeros(num_tokens),
        table,
        slots=[0],
        counts=[num_tokens],
        offsets=[0],
        max_row_tokens=num_tokens,
    )


def pooled_bytes(kind, positions, lengths, families):
    """Bytes that the closing windows pool, and of their entries."""
    compression_ratio = COMPRESSION_RATIO[kind]
    closes = (positions + 1) % compression_ratio == 0
    end, length = positions[closes], lengths[closes]
    first = np.maximum(end - (2 * compression_ratio if kind == "csa" else compression_ratio) + 1, 0)
    tokens = end + 1 - first
    if kind == "hca":  # of tokens before the call, the running pool's three rows
        tokens = end + 1 - np.maximum(first, length) + 1.5 * (first < length)
    per_token = sum(8 * FAMILIES[f][0] for f in families)
    return int(tokens.sum() * per_token + closes.sum() * sum(FAMILIES[f][2] for f in families))


def append_and_flush_case(kind, batch, closing, num_heads, index_heads=0, *, layers):
    """State and inputs of `append_and_flush`, a layer each with arrays of its own."""
    compression_ratio, width = COMPRESSION_RATIO[kind], 2 if kind == "csa" else 1
    positions = decode_positions(compression_ratio, batch, closing)
    table, num_blocks = shuffled_table(positions, batch)
    states, pools, new, norms = [], [], [], []
    for family in decode_families(kind):
        dim, codec, _ = FAMILIES[family]
        states += states_of(kind, layers, batch, dim=dim)
        pools.append(planes(codec, dim, layers, num_blocks, ENTRIES_PER_BLOCK[kind]))
        new.append(projections((batch,), width * dim, layers))
        norms.append(jnp.asarray(np.ones(dim), jnp.bfloat16))
    made = draws.make(
        {
            "state": (planes(FORMAT.entry, C, layers, batch, WINDOW), states, pools),
            "new": new,
            "queries": [draws.Draw((batch, num_heads, C), jnp.bfloat16)] * layers,
            "kv": [draws.Draw((batch, C), jnp.bfloat16)] * layers,
            "index_queries": index_queries(batch, index_heads, layers),
        }
    )
    slots = np.random.default_rng(1).permutation(batch)
    each = np.arange(batch)
    call = call_of(
        positions,
        positions,
        table,
        slots=slots,
        counts=np.ones_like(each),
        offsets=each,
        max_row_tokens=1,
    )
    norm_rope = pk.NormRope(jnp.asarray(np.ones(C), jnp.bfloat16), frequencies(), EPS)
    shared = (call, norm_rope)
    inputs = []
    for layer in range(layers):
        rows = [per_layer[layer] for per_layer in made["new"]]
        queries, kv = made["queries"][layer], made["kv"][layer]
        index = made["index_queries"][layer] if index_heads else None
        inputs.append((queries, kv, index, rows, norms, shared, jnp.int32(layer)))
    return made["state"], inputs


def index_queries(num_tokens, num_heads, layers):
    """As projected, for `draws.make`; none of no heads."""
    shape = (num_tokens, num_heads, IC)
    return [draws.Draw(shape, jnp.bfloat16)] * layers if num_heads else []


def append_and_flush_bytes(kind, batch, closing, num_heads, index_heads=0):
    """That a call of `append_and_flush` must move."""
    positions = decode_positions(COMPRESSION_RATIO[kind], batch, closing)
    kept = 2 * 16 * (C + IC) if kind == "csa" else 16 * C + 2 * 12 * C
    kept += 2 * C + 2 * FAMILIES["main"][2] + 4 * num_heads * C + 6 * index_heads * IC
    return batch * kept + pooled_bytes(kind, positions, positions, decode_families(kind))


def decode_families(kind):
    """Compressors of a layer."""
    return ("main", "index") if kind == "csa" else ("main",)


def append_and_flush(kept, queries, kv, index, new, norms, shared, layer, *, kind):
    """One layer's decode step."""
    ring, states, pools = kept
    codecs = [FORMAT.entry, FORMAT.index_key]
    compressors = [
        pk.Compressor(*arrays) for arrays in zip(states, new, norms, pools, codecs, strict=False)
    ]
    done = pk.append_and_flush(
        queries,
        kv,
        pk.LayerPlanes(ring, layer, FORMAT.entry),
        compressors,
        *shared,
        compression_ratio=COMPRESSION_RATIO[kind],
        index_queries=index,
        index_codec=None if index is None else FORMAT.index_key,
    )
    updated = (done.ring, list(done.states), list(done.pools))
    return updated, (done.queries, done.rows, done.index_queries)


def flush_case(kind, families, num_tokens, *, layers):
    """State and inputs of a flush: one request's first tokens."""
    compression_ratio, width = COMPRESSION_RATIO[kind], 2 if kind == "csa" else 1
    positions = np.arange(num_tokens)
    table, num_blocks = shuffled_table(positions, 1)
    closing = np.flatnonzero((positions + 1) % compression_ratio == 0)
    closing = np.pad(
        closing, (0, num_tokens // compression_ratio + 1 - len(closing)), constant_values=-1
    )
    pools, states, new, norms = [], [], [], []
    for family in families:
        dim, codec, _ = FAMILIES[family]
        pools.append(planes(codec, dim, layers, num_blocks, ENTRIES_PER_BLOCK[kind]))
        states += states_of(kind, layers, 1, dim=dim)
        new.append(projections((num_tokens,), width * dim, layers))
        norms.append(jnp.asarray(np.ones(dim), jnp.bfloat16))
    pools, states, new = draws.make((pools, states, new))
    call = prefill_call(num_tokens, table)
    shared = (call, frequencies(), jnp.asarray(closing, jnp.int32))
    inputs = [
        (states, [per_layer[layer] for per_layer in new], norms, shared, jnp.int32(layer))
        for layer in range(layers)
    ]
    return pools, inputs


def flush_bytes(kind, families, num_tokens):
    """That a flush of `flush_case` must move."""
    positions = np.arange(num_tokens)
    return pooled_bytes(kind, positions, np.zeros_like(positions), families)


def flush(pools, states, new, norms, shared, layer, *, kind, families, run=None):
    """One layer's flush, by the op's kernel; `run` stands for it.

    Which tokens close a window is given: a step finds that beside the kernels.
    """
    codecs = [FAMILIES[family][1] for family in families]
    compressors = [
        pk.Compressor(*arrays) for arrays in zip(states, new, norms, pools, codecs, strict=True)
    ]
    windows = Windows(*shared, layer, COMPRESSION_RATIO[kind], EPS)
    if kind == "csa":
        return list((run or triton_gpu.flush_csa)(compressors, windows)), ()
    (compressor,) = compressors
    return [(run or triton_gpu.flush_hca)(compressor, windows)], ()
