"""Random ways to cut sequences into calls, and running them through a cache of fixed shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from helpers.arrays import on_device

jit_prefill_all = jax.jit(ds.prefill, static_argnames=("config", "all_logits"))


@dataclasses.dataclass
class Run:
    """A cache and, for every request, the logits of every token."""

    cache: ds.ModelCache
    logits: list[list[np.ndarray]]


def random_cuts(rng, length, max_chunk):
    """Chunk sizes of 1 to max_chunk tokens that add up to length; single tokens are frequent."""
    cuts = []
    while sum(cuts) < length:
        size = 1 if rng.random() < 0.4 else int(rng.integers(1, max_chunk + 1))
        cuts.append(min(size, length - sum(cuts)))
    return cuts


def step_input(tokens, rows, slots, *, num_tokens, rng=None):
    """Packs each row's tokens into a bucket of num_tokens, with padding anywhere between rows."""
    pieces = [(row, list(ids)) for row, ids in zip(rows, tokens, strict=True) if len(ids)]
    spare = num_tokens - sum(len(ids) for _, ids in pieces)
    token_ids, request_ids = [], []
    for row, ids in pieces:
        gap = int(rng.integers(0, spare + 1)) if rng is not None else 0
        spare -= gap
        token_ids += [7] * gap + ids
        request_ids += [-1] * gap + [row] * len(ids)
    tail = num_tokens - len(token_ids)
    return ds.StepInput(
        token_ids=on_device(token_ids + [3] * tail, jnp.int32),
        request_ids=on_device(request_ids + [-1] * tail, jnp.int32),
        request_slots=on_device(slots, jnp.int32),
    )


def run_cuts(config, params, cache, sequences, cuts, *, slots, num_tokens, rng=None):
    """Appends every sequence to its slot, call by call; row order is shuffled when rng is given."""
    logits = [[] for _ in sequences]
    done = [0] * len(sequences)
    queues = [list(c) for c in cuts]
    while any(queues):
        order = list(range(len(sequences)))
        if rng is not None:
            rng.shuffle(order)
        chunks, budget = {}, num_tokens
        for i in order:
            if queues[i] and queues[i][0] <= budget:
                chunks[i] = queues[i].pop(0)
                budget -= chunks[i]
        row_of = {i: row for row, i in enumerate(order)}
        call = step_input(
            [sequences[i][done[i] : done[i] + chunks.get(i, 0)] for i in order],
            range(len(order)),
            [slots[i] if i in chunks else -1 for i in order],
            num_tokens=num_tokens,
            rng=rng,
        )
        cache, out = jit_prefill_all(params, cache, call, config=config, all_logits=True)
        request_ids, out = np.asarray(call.request_ids), np.asarray(out)
        for i in chunks:
            logits[i] += list(out[request_ids == row_of[i]])
            done[i] += chunks[i]
    return Run(cache, logits)


def poison(cache):
    """The same empty cache with every float NaN and every byte 0xFF, as a former tenant left it."""

    def fill(leaf):
        value = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 255
        if leaf.committed:  # as on a mesh
            return jnp.full_like(leaf, value)
        return on_device(np.full(leaf.shape, value), leaf.dtype)

    state, paged = jax.tree.map(fill, (cache.state, cache.paged))
    return dataclasses.replace(cache, state=state, paged=paged)


def live_rows(cache, slot, *, shards=1):
    """Everything that a slot's length makes readable, as a dict of NumPy arrays.

    On a mesh of several data shards, tables hold blocks of the slot's own shard.
    """
    length = int(cache.length_tokens[slot])
    shard = slot * shards // cache.max_requests
    table = np.asarray(cache.block_table[slot]) + shard * (cache.num_blocks // shards)
    live = {"length": np.asarray(length)}
    for attn, pool in cache.paged.items():
        entries = np.arange(length // pool.schema.compression_ratio)
        per_block = pool.schema.entries_per_block
        blocks, offsets = table[entries // per_block], entries % per_block
        for family in ("entries", "index_keys"):
            for name, plane in (getattr(pool, family) or {}).items():
                live[f"{attn}.{family}.{name}"] = np.asarray(plane)[:, blocks, offsets]
    for attn, pool in cache.state.items():
        schema = pool.schema
        _ring(live, f"{attn}.window", pool.window, slot, length, schema.swa_window_size)
        # Of the previous window, only the b-stream is read again; all of the open window is.
        size = schema.tail_buffer_size
        open_tokens = length % schema.compression_ratio
        if pool.tail is not None:
            keep = schema.tail_buffer_size_b + open_tokens
            _ring(live, f"{attn}.tail", pool.tail, slot, length, size, keep=keep)
            _ring(live, f"{attn}.index_tail", pool.index_tail, slot, length, size, keep=keep)
        if pool.running is not None and open_tokens:
            live[f"{attn}.running"] = np.asarray(pool.running)[:, slot]
    return live


def assert_same_bytes(actual, expected):
    """Both dicts of live rows hold the same bytes."""
    assert actual.keys() == expected.keys()
    for name in expected:
        a, b = np.ascontiguousarray(actual[name]), np.ascontiguousarray(expected[name])
        assert a.shape == b.shape, name
        np.testing.assert_array_equal(
            a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8), err_msg=name
        )


def _ring(live, name, planes, slot, length, size, keep=None):
    positions = np.arange(max(0, length - min(size, keep or size)), length)
    for plane_name, plane in planes.items():
        live[f"{name}.{plane_name}"] = np.asarray(plane)[:, slot, positions % size]
