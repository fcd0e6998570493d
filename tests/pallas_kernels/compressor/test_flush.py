import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import inputs, slow, token_oracle
from helpers.arrays import ones, zeros
from helpers.calls import make_call
from helpers.inputs import CASE_LAYER, LAYER, NUM_LAYERS, poison, shuffled_table
from helpers.schedules import assert_same_bytes
from pallas_kernels import (
    CACHE_FORMATS,
    LayerPlanes,
    flush_csa,
    flush_hca,
    flush_write,
    gather_entries,
    get_cache_format,
)
from pallas_kernels.compressor.closing import find_closing

C, ROPE, IC = 12, 4, 16
NUM_BLOCKS, LOGICAL, OWNED = 12, 4, (3, 4, 0)
NUM_ROWS = 24
CODECS = {
    f"{name}, {part}": codec
    for name, fmt in CACHE_FORMATS.items()
    for part, codec in (("entry", fmt.entry), ("index key", fmt.index_key))
}

jit_flush_write = jax.jit(flush_write, static_argnames="backend")


def draw_rows(rng, codec):
    dim, rope = (IC, 0) if codec.rotated else (C, ROPE)
    (rows,), _ = inputs.encode(codec, [rng.normal(size=(NUM_ROWS, dim))], rope)
    return rows


def empty_pool(codec, entries_per_block):
    shapes = codec.plane_shapes(*((IC, 0) if codec.rotated else (C, ROPE)))
    return poison(shapes, NUM_LAYERS, NUM_BLOCKS, entries_per_block)


def draw_table(rng):
    return shuffled_table(rng, OWNED, num_logical=LOGICAL, num_physical=NUM_BLOCKS)


def boundary_entries(entries_per_block):
    """First, last and neighbouring entries of every block, ones past it and a -1: (segment, entry).

    Request 1 fills its table, so its first entry past the end would be the row's neighbour; request
    2 owns nothing, and -1 is no segment.
    """
    places = [(0, -1), (-1, -1), (2, 0), (-1, 0), (-1, entries_per_block)]
    for request, count in ((0, 3), (1, 4)):
        for block in range(count + 1):
            places += [(request, block * entries_per_block)]
            places += [(request, (block + 1) * entries_per_block - 1)] * (entries_per_block > 1)
    return places


@pytest.mark.parametrize(
    ("name", "entries_per_block"),
    slow.all_but(
        [("fp8_ue8m0, entry", 53), ("f32, entry", 1), *((name, 2) for name in CODECS)],
        list(itertools.product(CODECS, [1, 2, 53])),
    ),
)
def test_entries_go_to_their_place_and_nothing_else_changes(name, entries_per_block):
    """Known bugs B2 and B9: guard blocks, free rows and other layers keep every byte."""
    check_places(name, entries_per_block, backend="reference")


@pytest.mark.parametrize(
    ("name", "entries_per_block"),
    slow.all_but(
        [("fp4_e4m3, entry", 2), ("fp8_per_entry, entry", 53)],
        list(itertools.product(CODECS, [1, 2, 53])),
    ),
)
def test_the_kernel_writes_to_the_same_places(lane, name, entries_per_block):
    """Planes of words, of bytes, and of one number an entry."""
    check_places(name, entries_per_block, backend="triton_gpu")


def check_places(name, entries_per_block, *, backend):
    rng = np.random.default_rng(entries_per_block)
    codec, table = CODECS[name], draw_table(rng)
    places = boundary_entries(entries_per_block)
    places += [(-1, -1)] * (NUM_ROWS - len(places))
    segment_ids, entries = rng.permutation(places).T.astype(np.int32)
    rows, pool = draw_rows(rng, codec), empty_pool(codec, entries_per_block)
    expected = token_oracle.flush_write(pool, rows, table, segment_ids, entries, layer=LAYER)
    given = pool, rows, table, segment_ids, entries
    assert_same_bytes(jit_flush_write(*given, layer=CASE_LAYER, backend=backend), expected)


@pytest.mark.parametrize("name", slow.all_but(["fp8_ue8m0, entry"], list(CODECS)))
def test_b17_a_full_request_leaves_no_plane_unwritten(name):
    """Every entry once, in any order: all of the request's blocks are written, and only they."""
    rng = np.random.default_rng(0)
    codec, table = CODECS[name], draw_table(rng)
    entries = rng.permutation(4 * 6).astype(np.int32)
    segment_ids = np.ones_like(entries)
    rows, pool = draw_rows(rng, codec), empty_pool(codec, 6)
    actual = jit_flush_write(pool, rows, table, segment_ids, entries, layer=CASE_LAYER)
    in_order = {plane: row[np.argsort(entries)] for plane, row in rows.items()}
    for plane, stored in actual.items():
        stored = np.asarray(stored)
        blocks = stored[LAYER, table[1]].reshape(in_order[plane].shape)
        guards = np.delete(stored[LAYER], table[1], axis=0)
        poisoned = np.delete(pool[plane][LAYER], table[1], axis=0)
        assert_same_bytes(
            {"blocks": blocks, "guards": guards, "other layers": stored[[0, 2]]},
            {"blocks": in_order[plane], "guards": poisoned, "other layers": pool[plane][[0, 2]]},
        )


def test_b5_a_call_that_closes_no_window_writes_nothing():
    rng = np.random.default_rng(0)
    codec = get_cache_format("fp8_ue8m0").entry
    rows, pool, table = draw_rows(rng, codec), empty_pool(codec, 2), draw_table(rng)
    nothing, zeros = np.full(NUM_ROWS, -1, np.int32), np.zeros(NUM_ROWS, np.int32)
    for segment_ids, entries in ((nothing, zeros), (zeros, nothing), (nothing, nothing)):
        actual = jit_flush_write(pool, rows, table, segment_ids, entries, layer=CASE_LAYER)
        assert_same_bytes(actual, pool)
    absent = jit_flush_write(pool, rows, -np.ones_like(table), zeros, zeros, layer=CASE_LAYER)
    assert_same_bytes(absent, pool)


@pytest.mark.slow
def test_a_later_call_overwrites_an_entry_and_no_other():
    """As a rejected token's entry is overwritten."""
    rng = np.random.default_rng(0)
    codec, table = get_cache_format("fp8_ue8m0").entry, draw_table(rng)
    segment_ids, entries = np.zeros(NUM_ROWS, np.int32), np.full(NUM_ROWS, -1, np.int32)
    entries[:5] = 0, 1, 2, 3, 4
    first, second = draw_rows(rng, codec), draw_rows(rng, codec)
    stored = jit_flush_write(
        empty_pool(codec, 2), first, table, segment_ids, entries, layer=CASE_LAYER
    )
    only_3 = np.where(entries == 3, 3, -1).astype(np.int32)
    stored = jit_flush_write(stored, second, table, segment_ids, only_3, layer=CASE_LAYER)
    expected = {plane: first[plane].copy() for plane in first}
    for plane in expected:
        expected[plane][3] = second[plane][3]
    read, valid = gather_entries(
        LayerPlanes(stored, CASE_LAYER, codec),
        make_call(table, [0]),
        np.arange(5, dtype=np.int32)[None],
        dim=C,
    )
    assert valid.all()
    np.testing.assert_array_equal(read[0], codec.decode(jax.device_put(expected), C)[:5])


ERRORS = [
    ("rows", {"other": ones((3, 8))}, "rows must have the planes of pool"),
    ("rows", {"values": ones((3, 7))}, r"rows\['values'\] must hold rows of float32\[8\]"),
    ("rows", {"values": ones((3, 8), jnp.bfloat16)}, r"rows\['values'\] must hold rows of"),
    ("rows", {"values": ones((4, 8))}, "rows must agree on n"),
    ("block_table", zeros(3, jnp.int32), "block_table must have rank 2"),
    ("block_table", zeros((2, 3)), "block_table must be int32"),
    ("segment_ids", zeros(2, jnp.int32), "segment_ids.* must agree on n"),
    ("segment_ids", zeros(3, jnp.uint8), "segment_ids must be int32"),
    ("entries", zeros(3, jnp.int16), "entries must be int32"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), ERRORS)
def test_an_error_names_the_argument_that_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        flush_write(**inputs.valid_arguments("flush_write") | {name: wrong})


ONES = {"values": ones((3, 1)), "scores": ones((3, 1))}
NARROW = {"values": ones((3, 1)), "scores": ones((3, 1))}
STATE = dict.fromkeys(("values", "scores"), ones((3, 3, 4, 1)))
CALL_ERRORS = [
    ("call.slots", zeros(3, jnp.int16), "call.slots must be int32"),
    ("call.positions", zeros(2, jnp.int32), "call.positions.* must agree on T"),
    ("call.lengths", zeros(3), "call.lengths must be int32"),
    ("call.block_table", zeros(3, jnp.int32), "call.block_table must have rank 2"),
]
CSA_ERRORS = [
    ("rows", NARROW, r"compressors\[0\].rows\['values'\] must be"),
    ("state", STATE, r"compressors\[0\].state must keep"),
    ("state", ones((3, 3, 4, 8)), r"compressors\[0\].rows\['values'\] must be .* = \[3, 8\]"),
    ("norm", ones(7), r"compressors\[0\].pool must hold the planes"),
]
HCA_ERRORS = [
    ("compressor.rows", NARROW, r"compressor.rows\['values'\] must be"),
    ("compressor.rows", {"other": ones((3, 8))}, "compressor.rows must be values and scores"),
    ("compressor.state", ones((3, 3, 8)), "compressor.state must keep"),
    ("compressor.state", ones((3, 3, 3, 1)), "compressor.state must keep"),
    ("compressor.norm", ones(1), "compressor.pool must hold the planes"),
]


@pytest.mark.parametrize(
    ("flush", "name", "wrong", "message"),
    [(flush, *error) for flush in (flush_csa, flush_hca) for error in CALL_ERRORS]
    + [(flush_hca, *error) for error in HCA_ERRORS],
)
def test_an_error_of_a_flush_names_the_argument_that_is_wrong(flush, name, wrong, message):
    arguments = inputs.valid_arguments(flush.__name__)
    with pytest.raises(ValueError, match=message):
        flush(**inputs.replace_argument(arguments, name, wrong))


@pytest.mark.parametrize(("field", "wrong", "message"), CSA_ERRORS)
def test_an_error_of_flush_csa_names_the_compressor_that_is_wrong(field, wrong, message):
    arguments = inputs.valid_arguments("flush_csa")
    (right,) = arguments["compressors"]
    with pytest.raises(ValueError, match=message):
        flush_csa(
            **arguments | {"compressors": [dataclasses.replace(right, **{field: wrong}), right]}
        )


def test_flushes_need_a_compressor_of_their_type():
    csa, hca = (inputs.valid_arguments(op) for op in ("flush_csa", "flush_hca"))
    with pytest.raises(ValueError, match="compressors must hold one or more"):
        flush_csa(**csa | {"compressors": []})
    with pytest.raises(ValueError, match=r"compressors\[1\].state must be values and scores"):
        flush_csa(**csa | {"compressors": [*csa["compressors"], hca["compressor"]]})
    with pytest.raises(ValueError, match=r"compressor\.state must be a running pool"):
        flush_hca(**hca | {"compressor": csa["compressors"][0]})


@pytest.mark.parametrize(
    ("num_tokens", "lengths", "counts", "num_closing"),
    [(40, [0, 5, 3], [14, 3, 9], 7), (3, [0, 7, 3], [1, 1, 1], 2)],
)
def test_closing_tokens_of_a_call_are_found(num_tokens, lengths, counts, num_closing):
    """Compacted where that is shorter; else each token in its own place."""
    rng, compression_ratio = np.random.default_rng(0), 4
    call = inputs.pack_call(rng, [3, 1, 4], lengths, counts, num_tokens=num_tokens)
    found = np.asarray(find_closing(call.indices(), compression_ratio))
    expected = np.flatnonzero((call.slots >= 0) & ((call.positions + 1) % compression_ratio == 0))
    assert len(expected) == num_closing
    wanted = np.full(min(num_tokens, num_tokens // compression_ratio + 3), -1)
    wanted[expected if num_tokens == 3 else slice(num_closing)] = expected
    np.testing.assert_array_equal(found, wanted)
