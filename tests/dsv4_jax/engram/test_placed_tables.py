"""Tables that programs read: the rows that the host finds, wherever the tables lie."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.bench.engram_reads import reduced
from dsv4_jax.config import DSV4Config
from dsv4_jax.engram import EngramTable, EngramTables, device_hashes, hashes, place_tables
from dsv4_jax.engram.placed_tables import PLACES
from helpers import v41

RELEASE = DSV4Config.v41_flash().engram
TINY = DSV4Config.from_hf(v41.contents("tiny")).engram
WIDE = dataclasses.replace(TINY, head_dim=128)
"""With a word of scales in each row."""
FORMS = "E4M3", "float32", "bfloat16"


def tables_of(form, config=WIDE):
    rng = np.random.default_rng(0)
    made = []
    for rows in config.table_rows:
        shape = rows, config.head_dim
        if form != "E4M3":
            dtype = jnp.dtype(form)
            made.append(EngramTable(rng.standard_normal(shape).astype(dtype)))
            continue
        codes = rng.integers(0, 120, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
        made.append(
            EngramTable(codes, rng.integers(120, 134, (rows, -(-shape[1] // 32)), np.uint8))
        )
    return EngramTables.make(config, v41.tokenizer_json(), tuple(made))


def contexts(count, rng):
    """Ids of tokens and of those before them; some begin a sequence."""
    back = rng.integers(0, 160, (count, TINY.max_ngram))
    for short in range(1, TINY.max_ngram):
        back[short, short:] = -1
    return back


@pytest.mark.parametrize(
    "config",
    [
        RELEASE,
        reduced(RELEASE, 5_000),
        TINY,
        dataclasses.replace(TINY, least_prime=2),
        dataclasses.replace(TINY, least_prime=2**25 - 5_000),
        dataclasses.replace(TINY, least_prime=2**28),
    ],
    ids=["released", "reduced", "tiny", "small primes", "primes of 25 bits", "primes of 29 bits"],
)
def test_a_device_finds_the_rows_of_64_bit_products_in_32(config):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, config.num_normalized_ids, (300, config.max_ngram))
    ids[0], ids[1] = 0, config.num_normalized_ids - 1
    found = jax.jit(lambda back: device_hashes.hash_ngrams(config, back))(
        jnp.asarray(ids, np.int32)
    )
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, hashes.hash_ngrams(config, ids))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", PLACES)
def test_a_program_reads_what_the_host_takes(form, where):
    tables = tables_of(form)
    placed, back = place_tables(tables, where), contexts(9, np.random.default_rng(2))
    found = jax.jit(lambda placed, back: placed.take(back))(placed, jnp.asarray(back, jnp.int32))
    wanted = tables.take(back)
    assert found.values.dtype == wanted.values.dtype
    np.testing.assert_array_equal(found.values, wanted.values)
    assert (found.scale is None) == (wanted.scale is None)
    if wanted.scale is not None:
        np.testing.assert_array_equal(found.scale, wanted.scale)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.uint8])
@pytest.mark.parametrize("where", PLACES)
def test_whole_sequences_begin_with_nothing_before_them(where, dtype):
    tables = tables_of("E4M3")
    ids = np.random.default_rng(3).integers(0, 160, (2, 5))
    found = place_tables(tables, where).rows(jnp.asarray(ids, dtype))
    np.testing.assert_array_equal(found, tables.rows(ids))


@pytest.mark.parametrize("head_dim", [100, 40, 32])
@pytest.mark.parametrize("where", PLACES)
def test_the_last_scale_of_a_row_may_be_of_fewer_columns(head_dim, where):
    tables = tables_of("E4M3", dataclasses.replace(TINY, head_dim=head_dim))
    ids = np.random.default_rng(4).integers(0, 160, (1, 7))
    found = place_tables(tables, where).rows(jnp.asarray(ids, jnp.int32))
    np.testing.assert_array_equal(found, tables.rows(ids))


def test_placed_tables_are_leaves_and_know_the_host_s():
    tables = tables_of("E4M3")
    pinned, device = (place_tables(tables, where) for where in PLACES)
    assert [leaf.shape for leaf in jax.tree.leaves(pinned)] == [(160,), (2, 2, 2)]
    assert len(jax.tree.leaves(device)) == 1 + 4
    assert pinned.tables is tables.tables
    assert pinned.tokenizer_json == tables.tokenizer_json
    assert pinned.digest() == device.digest() == tables.digest()
    assert jax.tree.leaves(tables) == []  # static in a tree of parameters
    with pytest.raises(
        ValueError, match=r"where must be one of \('pinned', 'device'\), got 'disk'"
    ):
        place_tables(tables, "disk")


def altered(change):
    tables = tables_of("float32")
    return dataclasses.replace(tables, tables=tuple(map(change, range(2), tables.tables)))


REFUSED = {
    "of another height": (
        lambda n, table: EngramTable(table.values[:50]),
        "tables must be those of their config, of",
    ),
    "of another width": (
        lambda n, table: EngramTable(table.values[:, :64]),
        "tables must be those of their config, of",
    ),
    "of two dtypes": (
        lambda n, table: EngramTable(table.values.astype([np.float32, np.float16][n])),
        r"tables must be of one dtype each, got \[\('float16',\), \('float32',\)\]",
    ),
    "of none that programs have": (
        lambda n, table: EngramTable(table.values.astype(np.float64)),
        "tables must be E4M3, or of one of .*, got float64",
    ),
    "big-endian": (
        lambda n, table: EngramTable(table.values.astype(">f4")),
        "tables must be E4M3, or of one of .*, got >f4",
    ),
    "strided": (
        lambda n, table: EngramTable(np.asfortranarray(table.values)),
        "rows that lie one after the other, got strided ones",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_programs_would_misread_is_refused(name):
    """They check no row's number, and no address."""
    change, told = REFUSED[name]
    with pytest.raises(ValueError, match=told):
        place_tables(altered(change), "pinned")


def test_more_rows_than_programs_can_number_are_refused():
    class Tall:
        dtype, flags = np.dtype(np.float32), np.zeros(0).flags

        def __init__(self, shape):
            self.shape = shape

    config = dataclasses.replace(TINY, least_prime=2**30)
    tables = tuple(EngramTable(Tall((rows, config.head_dim))) for rows in config.table_rows)
    with pytest.raises(ValueError, match="at most 2147483647 rows, by whose numbers"):
        place_tables(EngramTables(config, np.zeros(9, np.int64), tables, ""), "pinned")


def test_tables_are_placed_once():
    with pytest.raises(ValueError, match="tables must be a EngramTables"):
        place_tables(place_tables(tables_of("E4M3"), "device"), "device")


@pytest.mark.parametrize("where", PLACES)
def test_a_copy_reads_the_same_memory_and_another_process_its_own(where):
    placed = place_tables(tables_of("E4M3"), where)
    assert copy.deepcopy(placed) is placed
    again = pickle.loads(pickle.dumps(placed))
    assert again.tables[0].values is not placed.tables[0].values
    back = jnp.asarray(contexts(5, np.random.default_rng(5)), jnp.int32)
    np.testing.assert_array_equal(again.take(back).values, placed.take(back).values)
    if where == "pinned":
        assert (np.asarray(again.addresses) != np.asarray(placed.addresses)).any()


def test_a_digest_tells_sizes_ids_and_rows():
    tables = tables_of("E4M3")
    others = [
        dataclasses.replace(tables, normalized=tables.normalized[::-1].copy()),
        dataclasses.replace(tables, tables=tables.tables[::-1]),
        tables_of("float32"),
    ]
    for plane in ("values", "scale"):
        changed = getattr(tables.tables[1], plane).copy()
        changed.view(np.uint8)[-1, -1] ^= 1
        last = dataclasses.replace(tables.tables[1], **{plane: changed})
        others.append(dataclasses.replace(tables, tables=(tables.tables[0], last)))
    digests = [made.digest() for made in (tables, *others)]
    assert len(set(digests)) == len(digests)
    assert tables_of("E4M3").digest() == digests[0]
