import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import inputs, token_oracle
from helpers.calls import make_call
from helpers.inputs import CASE_LAYER, LAYER, NUM_LAYERS, poison, shuffled_table
from helpers.schedules import assert_same_bytes
from pallas_kernels import (
    CACHE_FORMATS,
    LayerPlanes,
    compressor,
    flush_csa,
    flush_hca,
    gather_entries,
    get_cache_format,
)

C, ROPE, IC = 12, 4, 16
NUM_BLOCKS, LOGICAL, OWNED = 12, 4, (3, 4, 0)
NUM_ROWS = 24
CODECS = {
    f"{name}, {part}": codec
    for name, fmt in CACHE_FORMATS.items()
    for part, codec in (("entry", fmt.entry), ("index key", fmt.index_key))
}

jit_flush_write = jax.jit(compressor)


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
    """First, last and neighbouring entries of every block, ones past it and a -1: (request, entry).

    Request 1 fills its table, so its first entry past the end would be the row's neighbour; request
    2 owns nothing, and -1 is no request.
    """
    places = [(0, -1), (-1, -1), (2, 0), (-1, 0), (-1, entries_per_block)]
    for request, count in ((0, 3), (1, 4)):
        for block in range(count + 1):
            places += [(request, block * entries_per_block)]
            places += [(request, (block + 1) * entries_per_block - 1)] * (entries_per_block > 1)
    return places


@pytest.mark.parametrize("entries_per_block", [1, 2, 53])
@pytest.mark.parametrize("name", CODECS)
def test_entries_go_to_their_place_and_nothing_else_changes(name, entries_per_block):
    """Known bugs B2 and B9: guard blocks, free rows and other layers keep every byte."""
    rng = np.random.default_rng(entries_per_block)
    codec, table = CODECS[name], draw_table(rng)
    places = boundary_entries(entries_per_block)
    places += [(-1, -1)] * (NUM_ROWS - len(places))
    request_ids, entries = rng.permutation(places).T.astype(np.int32)
    rows, pool = draw_rows(rng, codec), empty_pool(codec, entries_per_block)
    expected = token_oracle.flush_write(pool, rows, table, request_ids, entries, layer=LAYER)
    actual = jit_flush_write(pool, rows, table, request_ids, entries, layer=CASE_LAYER)
    assert_same_bytes(actual, expected)


@pytest.mark.parametrize("name", CODECS)
def test_b17_a_full_request_leaves_no_plane_unwritten(name):
    """Every entry once, in any order: all of the request's blocks are written, and only they."""
    rng = np.random.default_rng(0)
    codec, table = CODECS[name], draw_table(rng)
    entries = rng.permutation(4 * 6).astype(np.int32)
    request_ids = np.ones_like(entries)
    rows, pool = draw_rows(rng, codec), empty_pool(codec, 6)
    actual = jit_flush_write(pool, rows, table, request_ids, entries, layer=CASE_LAYER)
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
    for request_ids, entries in ((nothing, zeros), (zeros, nothing), (nothing, nothing)):
        actual = jit_flush_write(pool, rows, table, request_ids, entries, layer=CASE_LAYER)
        assert_same_bytes(actual, pool)
    absent = jit_flush_write(pool, rows, -np.ones_like(table), zeros, zeros, layer=CASE_LAYER)
    assert_same_bytes(absent, pool)


def test_a_later_call_overwrites_an_entry_and_no_other():
    """As a rejected token's entry is overwritten."""
    rng = np.random.default_rng(0)
    codec, table = get_cache_format("fp8_ue8m0").entry, draw_table(rng)
    request_ids, entries = np.zeros(NUM_ROWS, np.int32), np.full(NUM_ROWS, -1, np.int32)
    entries[:5] = 0, 1, 2, 3, 4
    first, second = draw_rows(rng, codec), draw_rows(rng, codec)
    stored = jit_flush_write(
        empty_pool(codec, 2), first, table, request_ids, entries, layer=CASE_LAYER
    )
    only_3 = np.where(entries == 3, 3, -1).astype(np.int32)
    stored = jit_flush_write(stored, second, table, request_ids, only_3, layer=CASE_LAYER)
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
    ("rows", {"other": jnp.ones((3, 8))}, "rows must have the planes of pool"),
    ("rows", {"values": jnp.ones((3, 7))}, r"rows\['values'\] must hold rows of float32\[8\]"),
    ("rows", {"values": jnp.ones((3, 8), jnp.bfloat16)}, r"rows\['values'\] must hold rows of"),
    ("rows", {"values": jnp.ones((4, 8))}, "rows must agree on n"),
    ("block_table", jnp.zeros(3, jnp.int32), "block_table must have rank 2"),
    ("block_table", jnp.zeros((2, 3)), "block_table must be int32"),
    ("request_ids", jnp.zeros(2, jnp.int32), "request_ids.* must agree on n"),
    ("request_ids", jnp.zeros(3, jnp.uint8), "request_ids must be int32"),
    ("entries", jnp.zeros(3, jnp.int16), "entries must be int32"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), ERRORS)
def test_an_error_names_the_argument_that_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        compressor(**inputs.valid_arguments("flush_write") | {name: wrong})


ONES = {"values": jnp.ones((3, 1)), "scores": jnp.ones((3, 1))}
CLOSING_ERRORS = [
    ("closing", jnp.zeros(2), "closing must be int32"),
    ("slots", jnp.zeros(3, jnp.int16), "slots must be int32"),
    ("positions", jnp.zeros(2, jnp.int32), "positions.* must agree on T"),
    ("lengths", jnp.zeros(3), "lengths must be int32"),
    ("block_table", jnp.zeros(3, jnp.int32), "block_table must have rank 2"),
]
CSA_ERRORS = [
    ("rows", [ONES], r"rows\['values'\] must be"),
    ("rows", [], "must have one item per compressor"),
    ("states", [dict.fromkeys(("values", "scores"), jnp.ones((3, 3, 4, 1)))], "states must keep"),
    ("norms", [jnp.ones(7)], "pools must hold the planes"),
    ("rate", 3, r"states must keep 2 \* rate rows"),
]
HCA_ERRORS = [
    ("rows", ONES, r"rows\['values'\] must be"),
    ("rows", {"other": jnp.ones((3, 8))}, "rows must have values and scores"),
    ("running", jnp.ones((3, 3, 8)), "running must have rank 4"),
    ("running", jnp.ones((3, 3, 3, 1)), "running must keep 3 rows of C values"),
    ("norm", jnp.ones(1), "pool must hold the planes"),
]


@pytest.mark.parametrize(
    ("flush", "name", "wrong", "message"),
    [(flush, *error) for flush in (flush_csa, flush_hca) for error in CLOSING_ERRORS]
    + [(flush_csa, *error) for error in CSA_ERRORS]
    + [(flush_hca, *error) for error in HCA_ERRORS],
)
def test_an_error_of_a_flush_names_the_argument_that_is_wrong(flush, name, wrong, message):
    with pytest.raises(ValueError, match=message):
        flush(**inputs.valid_arguments(flush.__name__) | {name: wrong})
