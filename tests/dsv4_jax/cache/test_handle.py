"""One layer of the cache in one call: what the handle takes, gives back, shows and refuses."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers import slow
from helpers.arrays import on_device, zeros
from helpers.schedules import step_input
from pallas_kernels.append_tokens import reference
from pallas_kernels.common.formats import CACHE_FORMATS

pytestmark = pytest.mark.unoptimised

CONFIG = ds.DSV4Config.tiny()  # C = 32, IC = 16, W = 16, M = 4 and 32, blocks of 128 tokens
SWA, CSA, HCA = 0, 1, 4  # layers; the last one is the second of its family
WINDOW, DIM, T = 16, 32, 24
TABLE = [[5, 2, 0], [3, 8, -1], [1, 7, 4], [6, -1, -1]]


def make(cache_format="f32", lengths=(0, 0, 0, 0)):
    cache = ds.init_cache(
        CONFIG, max_requests=4, max_context_tokens=300, cache_format=cache_format, num_blocks=9
    )
    slots = jnp.arange(4, dtype=jnp.int32)
    lengths, table = jnp.asarray(lengths, jnp.int32), jnp.asarray(TABLE, jnp.int32)
    return ds.update_slots(cache, slots, lengths, table)


def call_of(slots, counts, rng=None):
    tokens = [[1] * n for n in counts]
    return step_input(tokens, range(len(slots)), slots, num_tokens=T, rng=rng)


CALL = call_of([2, 0, -1], [9, 6, 5])  # and 4 tokens of padding


def acquire(layer_idx, cache=None, call=CALL):
    cache = make() if cache is None else cache
    return ds.KVCacheManager.acquire(cache, call, layer_idx=layer_idx)


def normal(*shape, seed=0):
    return on_device(
        np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), jnp.float32
    )


def projections(width):
    return ds.cache.Projections(values=normal(T, width, seed=1), scores=normal(T, width, seed=2))


@jax.jit
def written(handle, kv=None):
    """The handle after `write_swa` with the projections that its layer wants."""
    width = {"swa": 0, "csa": 2 * DIM, "hca": DIM}[handle.schema.attn_type]
    index_width = 2 * handle.schema.indexer_head_dim
    return handle.write_swa(
        normal(T, DIM) if kv is None else kv,
        compressor=projections(width) if width else None,
        indexer=projections(index_width) if index_width else None,
    )


@jax.jit
def flushed(handle):
    """Entry i of the call holds i + 1 everywhere, its index key -(i + 1)."""
    count = handle.call.closing_tokens(handle.schema.compression_ratio).shape[0]
    numbers = jnp.arange(1.0, count + 1)[:, None]
    is_csa = handle.schema.attn_type == "csa"
    keys = jnp.broadcast_to(-numbers, (count, 16)) if is_csa else None
    return handle.flush_compression(jnp.broadcast_to(numbers, (count, DIM)), keys)


@jax.jit
def described(handle):
    names = ("request_slots", "request_ids", "positions", "block_table", "block_lens", "tail_len")
    return {name: getattr(handle, name) for name in (*names, "visible_entries")}


attended = jax.jit(lambda handle, queries, sink, selected: handle.attend(queries, sink, selected))
all_visible = jax.jit(lambda handle: handle.all_visible())
ring_of_call = jax.jit(lambda handle: handle.read_swa_view())


def test_a_handle_describes_its_call():
    cache = make(lengths=(126, 0, 3, 0))
    handle = acquire(CSA, cache)
    assert (handle.num_query_heads, handle.head_dim) == (4, DIM)
    found = described(handle)
    np.testing.assert_array_equal(found["request_slots"], [2, 0, -1])
    np.testing.assert_array_equal(found["request_ids"], [0] * 9 + [1] * 6 + [-1] * 9)
    positions = [*range(3, 12), *range(126, 132), *[0] * 9]
    np.testing.assert_array_equal(found["positions"], positions)
    np.testing.assert_array_equal(found["block_table"], [TABLE[2], TABLE[0], [-1, -1, -1]])
    np.testing.assert_array_equal(found["block_lens"], [1, 2, 0])
    np.testing.assert_array_equal(found["tail_len"], [3, 126 % 4, 0])
    visible = [(p + 1) // 4 for p in positions[:15]] + [0] * 9
    np.testing.assert_array_equal(found["visible_entries"], visible)
    assert acquire(SWA, cache).block_table is None
    assert not np.any(acquire(SWA, cache).visible_entries)
    visible = described(acquire(HCA, cache))["visible_entries"]
    np.testing.assert_array_equal(visible[9:15], [3, 4, 4, 4, 4, 4])


@pytest.mark.parametrize(
    ("layer_idx", "cache_format"),
    slow.all_but([(SWA, "fp8_ue8m0")], [(SWA, "fp8_ue8m0"), (HCA, "f32")]),
)
def test_window_of_every_token_of_a_ragged_batch(layer_idx, cache_format):
    """Calls of 0 to 22 tokens a row, round a ring of 16: no row speaks for the batch."""
    cache, rng = make(cache_format), np.random.default_rng(0)
    fmt = CACHE_FORMATS[cache_format]
    round_entry = jax.jit(fmt.round_entry, static_argnums=1)
    decode = jax.jit(fmt.entry.decode, static_argnums=1)
    history = {slot: np.zeros((0, DIM), np.float32) for slot in range(4)}
    spec = ds.layer_schedule(CONFIG)[layer_idx]

    @jax.jit
    def step(cache, call, kv):
        handle = written(acquire(layer_idx, cache, call), kv)
        gathered = handle.gather_swa_kv()
        handle = handle.commit()
        cache = cache.with_layer(handle)
        lengths = cache.length_tokens.at[call.request_slots].add(handle.call.row_counts)
        cache = dataclasses.replace(cache, length_tokens=lengths)
        return cache, gathered, handle.read_swa_view()

    for i, counts in enumerate([(1, 2), (5, 0), (3, 14), (22, 1), (1, 16), (17, 4), (0, 15)]):
        slots, kv = [1, 3][:: (-1) ** i], normal(T, DIM, seed=i)
        call = call_of(slots, counts, rng)
        cache, (gathered, valid), view = step(cache, call, kv)
        gathered, valid, positions, head = jax.tree.map(
            np.asarray, (gathered, valid, view.positions, view.head)
        )
        stored = np.asarray(round_entry(kv, CONFIG.rope_dim))
        for t, row in enumerate(np.asarray(call.request_ids)):
            if row < 0:
                assert not np.any(gathered[t])
                assert not np.any(valid[t])
                continue
            slot = slots[row]
            history[slot] = np.vstack([history[slot], stored[t]])
            expected, there = ring_of(history[slot])
            np.testing.assert_array_equal(valid[t], there)
            np.testing.assert_array_equal(gathered[t], expected)
        decoded = np.asarray(decode(view.planes, DIM))
        for row, slot in enumerate(slots):
            length = len(history[slot])
            expected, there = ring_of(history[slot])
            np.testing.assert_array_equal(np.where(there[:, None], decoded[slot], 0), expected)
            np.testing.assert_array_equal(positions[row] >= 0, there)
            np.testing.assert_array_equal(positions[row][there] % WINDOW, np.nonzero(there)[0])
            assert head[row] == length % WINDOW
            assert positions[row].max() == length - 1
        np.testing.assert_array_equal(view.slots, slots)
    for plane in cache.state[spec.attn].window.values():
        others = np.delete(np.asarray(plane), spec.family_idx, axis=0)
        assert not np.any(others), "another layer of the family was written"


def ring_of(history):
    """The last W tokens, position p in row p % W, and which rows hold one."""
    ring, there = np.zeros((WINDOW, DIM), np.float32), np.zeros(WINDOW, bool)
    for position in range(max(0, len(history) - WINDOW), len(history)):
        ring[position % WINDOW], there[position % WINDOW] = history[position], True
    return ring, there


def test_entries_are_gathered_for_each_token_from_its_own_request():
    cache = make(lengths=(126, 0, 3, 0))
    handle = flushed(acquire(CSA, cache))
    # Row 0 closes windows 0, 1 and 2, row 1 closes 31 and 32, which lie in two blocks.
    closing = handle.call.closing_tokens(4)
    np.testing.assert_array_equal(closing, [0, 4, 8, 10, 14, -1, -1, -1, -1])
    selected = np.full((T, 4), -1, np.int32)
    selected[0] = [0, 2, -1, 1]
    selected[9] = [32, -1, 31, 99]  # 99: no block of the table
    selected[14] = [31, 31, 0, 1]
    selected[20] = [0, 1, 2, 31]  # padding reads nothing
    gather = jax.jit(lambda handle, selected: handle.gather_compressed_kv(selected))
    entries, there = map(np.asarray, gather(handle, selected))
    chex.assert_shape(entries, (T, 4, DIM))
    np.testing.assert_array_equal(entries[0, :, 0], [1, 3, 0, 2])
    np.testing.assert_array_equal(entries[9, :, -1], [5, 0, 4, 0])
    np.testing.assert_array_equal(entries[14, :, 5], [4, 4, 0, 0])
    np.testing.assert_array_equal(there[0], [True, True, False, True])
    np.testing.assert_array_equal(there[9], [True, False, True, False])
    assert not np.any(there[20])
    assert not np.any(entries[20])


def test_all_entries_are_those_each_token_may_see():
    cache = make(lengths=(126, 0, 3, 0))
    handle = flushed(acquire(HCA, cache))
    entries, there = map(np.asarray, jax.jit(lambda h: h.gather_all_compressed_kv())(handle))
    chex.assert_shape(entries, (T, 3 * 4, DIM))
    counts = np.asarray(described(handle)["visible_entries"])
    np.testing.assert_array_equal(there, np.arange(12)[None] < counts[:, None])
    assert counts.max() == 4
    np.testing.assert_array_equal(entries[11:15, 3], np.full((4, DIM), 1.0))  # closed by token 10
    np.testing.assert_array_equal(np.asarray(all_visible(handle))[14], [0, 1, 2, 3, *[-1] * 8])


@pytest.mark.parametrize("layer_idx", slow.all_but([HCA], [CSA, HCA]))
def test_attention_looks_at_no_more_places_than_a_token_sees_entries(layer_idx):
    """Else each layer would pay for all that a request has room for."""
    handle = flushed(written(acquire(layer_idx, make(lengths=(126, 0, 3, 0)))))
    queries, sink, first = normal(T, 4, DIM), normal(4), np.asarray(all_visible(handle))
    assert np.any(first == -1)
    assert np.any(first[:, 0] == 0)
    expected = attended(handle, queries, sink, first)
    filled = np.where(first == -1, 0, first)
    np.testing.assert_array_equal(attended(handle, queries, sink, filled), expected)
    without = attended(handle, queries, sink, np.full_like(first, -1))
    assert np.any(np.asarray(without) != np.asarray(expected))


def test_a_method_returns_a_new_handle_and_leaves_the_old_one():
    first = acquire(CSA)
    before = jax.tree.map(np.array, first)
    second = written(first)
    third = flushed(second)
    fourth = third.commit()
    assert first.new_tokens is None
    assert second.new_tokens is not None
    chex.assert_trees_all_equal(first, before)
    chex.assert_trees_all_equal(second.paged, first.paged)
    chex.assert_trees_all_equal(third.state, first.state)
    assert np.any(third.paged.entries["values"])
    chex.assert_trees_all_equal(fourth.paged, third.paged)
    assert np.any(fourth.state.window["values"])
    assert fourth.new_tokens is None


def test_the_ring_shows_tokens_once_they_are_committed():
    handle = acquire(HCA, make(lengths=(20, 0, 3, 0)))
    before = np.full((3, WINDOW), -1)
    before[0, :3] = [0, 1, 2]
    before[1] = [16, 17, 18, 19, *range(4, 16)]
    view = ring_of_call(written(handle))
    np.testing.assert_array_equal(view.positions, before)
    np.testing.assert_array_equal(view.head, [3, 4, 0])
    view = ring_of_call(written(handle).commit())
    np.testing.assert_array_equal(np.asarray(view.positions)[0], [*range(12), *[-1] * 4])
    np.testing.assert_array_equal(view.head, [12, 10, 0])


def test_the_ring_shows_no_token_that_has_not_been_written():
    """A fresh handle's ring is as the last call left it."""
    view = ring_of_call(acquire(SWA))
    assert not np.any(view.planes["values"])
    np.testing.assert_array_equal(view.positions, -1)
    np.testing.assert_array_equal(view.head, 0)


@pytest.mark.parametrize("layer_idx", [SWA, CSA])
def test_no_two_tokens_of_a_call_race_for_one_ring_row(layer_idx, monkeypatch):
    """A CPU writes duplicates in order, which hides the race that a GPU would lose."""
    written_rows = []

    def append_ring(ring, rows, slots, positions, *, layer):
        size = next(iter(ring.values())).shape[2]
        at = [(int(s), int(p) % size) for s, p in zip(slots, positions, strict=True) if s >= 0]
        assert len(at) == len(set(at))
        written_rows.append((size, len(at)))
        return ring

    monkeypatch.setattr(reference, "append_ring", append_ring)
    call = call_of([0, 3, -1], [22, 2, 0])
    handle = written(acquire(layer_idx, make(lengths=(5, 0, 0, 0)), call))
    with jax.disable_jit():
        handle.commit()
    rings = {SWA: [WINDOW], CSA: [WINDOW, 8, 8]}[layer_idx]
    assert written_rows == [(size, size + 2) for size in rings]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_format", "fp8", "inv_scale", "fp4", "scale", "global_scale"),
    slow.all_but(
        [("fp8_per_entry", True, True, True, True, True)],
        [
            ("f32", False, False, False, False, False),
            ("bf16", False, False, False, False, False),
            ("fp8_ue8m0", True, False, True, True, False),
            ("fp8_ue8m0_fp8_index", True, False, False, True, False),
            ("fp8_per_entry", True, True, True, True, True),
        ],
    ),
)
def test_views_show_the_stored_arrays_and_none_where_the_format_has_none(
    cache_format, fp8, inv_scale, fp4, scale, global_scale
):
    def shape(array):
        return None if array is None else array.shape

    fill = jax.jit(lambda cache: flushed(written(acquire(CSA, cache))).commit())
    handle = fill(make(cache_format))
    swa, entries = handle.read_swa_view(), handle.read_classical_view()
    for view, lead in ((swa, (4, WINDOW)), (entries, (9, 32))):
        assert shape(view[0]) == ((*lead, 24) if fp8 else None)
        assert shape(view[1]) == ((*lead, 8) if fp8 else None)
        assert shape(view[2]) == (lead if inv_scale else None)
    keys = handle.read_indexer_view()
    assert shape(keys.keys_fp4) == ((9, 32, 8) if fp4 else None)
    assert (keys.scale is not None) == scale
    assert shape(keys.global_scale) == ((9,) if global_scale else None)
    assert not global_scale or np.all(keys.global_scale == 1)
    paged, state = handle.paged, handle.state
    for view, stack in ((swa, state.window), (entries, paged.entries), (keys, paged.index_keys)):
        layer = {name: np.asarray(plane)[0] for name, plane in stack.items()}
        chex.assert_trees_all_equal(view.planes, layer)
        assert any(np.any(plane) for plane in view.planes.values())
    for view in (entries, keys):
        np.testing.assert_array_equal(view.block_table, [TABLE[2], TABLE[0], [-1] * 3])
        np.testing.assert_array_equal(view.block_lens, [1, 1, 0])


@pytest.mark.parametrize(
    "cache_format", slow.all_but(["fp8_ue8m0"], ["fp8_ue8m0", "fp8_per_entry"])
)
def test_the_indexers_view_shows_plain_pairs_of_codes(cache_format):
    """As published, whatever their order in memory."""

    @jax.jit
    def shown(cache):
        handle = flushed(written(acquire(CSA, cache))).commit()
        keys = handle.read_indexer_view()
        return keys.keys_fp4, handle.schema.format.index_key.to_pages(keys.planes)

    pairs, page = map(np.asarray, shown(make(cache_format)))
    _, entries, size = pairs.shape
    assert np.any(page[:, : entries * size])
    np.testing.assert_array_equal(pairs.reshape(-1, entries * size), page[:, : entries * size])


FIRST = zeros((T, 1), jnp.int32)


@pytest.mark.parametrize(
    ("layer_idx", "method", "message"),
    [
        (SWA, flushed, "type swa has no entries"),
        (SWA, lambda h: h.gather_compressed_kv(FIRST), "type swa has no entries"),
        (SWA, lambda h: h.gather_all_compressed_kv(), "type swa has no entries"),
        (SWA, lambda h: h.read_classical_view(), "type swa has no entries"),
        (SWA, lambda h: h.read_indexer_view(), "type swa has no entries"),
        (HCA, lambda h: h.read_indexer_view(), "type hca has no indexer"),
        (HCA, lambda h: h.select(normal(T, 2, 16), normal(T, 2)), "hca has no indexer"),
        (CSA, lambda h: h.commit(), "call write_swa first"),
        (CSA, lambda h: h.gather_swa_kv(), "append them first"),
        (SWA, lambda h: h.attend(normal(T, 4, DIM), normal(4), None), "append them first"),
        (CSA, lambda h: written(h).commit().gather_swa_kv(), "append them first"),
        (CSA, lambda h: written(h).commit().commit(), "call write_swa first"),
        (CSA, lambda h: written(written(h).commit()), "the call's tokens are committed already"),
    ],
)
def test_wrong_layers_and_wrong_orders_are_named(layer_idx, method, message):
    with pytest.raises(ValueError, match=message):
        method(acquire(layer_idx))


def scored(projections, scores):
    return dataclasses.replace(projections, scores=scores)


KV, WIDE, NARROW = np.zeros((T, DIM), np.float32), projections(2 * DIM), projections(DIM)


@pytest.mark.parametrize(
    ("layer_idx", "arguments", "message"),
    [
        (SWA, (KV[:-1],), r"kv must be an array \[24, 32\] of floats, got float32\[23, 32\]"),
        (SWA, (KV, NARROW), "compressor must be None on a layer of type swa"),
        (HCA, (KV,), r"compressor must be projections \[T, 32\] on a layer of type hca"),
        (HCA, (KV, WIDE), r"compressor.values must be an array \[24, 32\] of floats, got .*64\]"),
        (HCA, (KV, NARROW, NARROW), "indexer must be None on a layer of type hca"),
        (CSA, (KV, WIDE), r"indexer must be projections \[T, 32\] on a layer of type csa"),
        (
            CSA,
            (KV, WIDE, WIDE),
            r"indexer.values must be an array \[24, 32\] of floats, got .*64\]",
        ),
        (CSA, (KV, scored(WIDE, KV), NARROW), r"compressor.scores must be an array \[24, 64\]"),
        (CSA, (KV, scored(WIDE, None), NARROW), "compressor.scores must be an array, got None"),
        (HCA, (KV, scored(NARROW, KV.astype(int))), "compressor.scores must be .* of floats"),
        (HCA, (KV, scored(NARROW, [[1.0]])), "compressor.scores must be an array, got"),
        (HCA, (KV, (KV, KV)), "compressor must be a Projections, got"),
    ],
)
def test_write_swa_names_what_is_missing_or_not_wanted(layer_idx, arguments, message):
    with pytest.raises(ValueError, match=message):
        acquire(layer_idx).write_swa(*arguments)


@pytest.mark.parametrize(
    ("layer_idx", "arguments", "message"),
    [
        (CSA, (KV[:8], KV[:8, :16]), r"compressed must have shape \(9, 32\), one row per closing"),
        (CSA, (KV[:9],), "indexer_keys go with a CSA layer"),
        (CSA, (KV[:9], KV[:8, :16]), "must agree on n"),
        (HCA, (KV[:3], KV[:3, :16]), "indexer_keys go with a CSA layer"),
    ],
)
def test_flush_compression_names_what_does_not_fit(layer_idx, arguments, message):
    flush = jax.jit(lambda handle, arguments: handle.flush_compression(*arguments))
    with pytest.raises(ValueError, match=message):
        flush(acquire(layer_idx), arguments)
