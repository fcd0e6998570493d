"""Rows of tables in the host's memory, against the tables themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.engram import COLUMNS, ROW_BYTES, TABLES, TOKENS
from dsv4_jax.engram.pinned_memory import pin
from helpers.arrays import on_device
from helpers.host_tables import addresses_of, table
from helpers.ptx_threads import thread
from pallas_kernels import gather_host_rows, gpu_interpreter
from pallas_kernels.gather_host_rows.op import split_address
from pallas_kernels.gather_host_rows.triton_gpu import load_word

AOT_CASES = [
    (
        f"{num_tokens} tokens",
        functools.partial(gather_host_rows, row_bytes=ROW_BYTES, backend="triton_gpu"),
        [
            jax.ShapeDtypeStruct((num_tokens, TABLES, COLUMNS), jnp.int32),
            jax.ShapeDtypeStruct((TABLES, len(ROW_BYTES), 2), jnp.int32),
        ],
    )
    for num_tokens in TOKENS
]


def case(num_tokens, columns=COLUMNS, row_bytes=ROW_BYTES, offsets=(0, 0), place=addresses_of):
    """Rows, the first and the last of a table among them; addresses; and what lies there.

    `place` gives the addresses of tables for who reads them.
    """
    rng = np.random.default_rng(num_tokens)
    counts = (1000, 77)
    tables = [
        [table(n, size, rng, offset=by) for size, by in zip(row_bytes, offsets, strict=True)]
        for n in counts
    ]
    rows = np.stack([rng.integers(0, n, (num_tokens, columns)) for n in counts], axis=1)
    rows[0, :, 0], rows[-1, :, -1] = 0, np.array(counts) - 1
    wanted = [
        np.stack([planes[p][rows[:, n]] for n, planes in enumerate(tables)], axis=1)
        for p in range(len(row_bytes))
    ]
    return on_device(rows, jnp.int32), place(tables), wanted


CASES = {
    "one token": {"num_tokens": 1},
    "released": {"num_tokens": 5},
    "a word of each row": {"num_tokens": 3, "columns": 1, "row_bytes": (4,), "offsets": (0,)},
    "rows of three words": {"num_tokens": 3, "columns": 5, "row_bytes": (12, 4)},
    "rows that end inside a word": {"num_tokens": 2, "columns": 3, "row_bytes": (7, 1)}
    | {"offsets": (3, 2)},
    "planes that begin inside a word": {"num_tokens": 2, "columns": 3, "offsets": (1, 7)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
def test_rows_are_those_of_the_tables(name, backend):
    given = CASES[name]
    rows, addresses, wanted = case(**given)
    gather = functools.partial(
        gather_host_rows, row_bytes=given.get("row_bytes", ROW_BYTES), backend=backend
    )
    with gpu_interpreter():
        found = jax.jit(gather)(rows, addresses)
    assert len(found) == len(wanted)
    for plane, own in zip(found, wanted, strict=True):
        assert plane.dtype == jnp.uint8
        np.testing.assert_array_equal(plane, own)


def pinned(tables):
    """Addresses of tables that a GPU may read where they are."""
    pin([plane for planes in tables for plane in planes])
    return addresses_of(tables)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, "many"])
def test_a_gpu_reads_rows_where_they_are(name):
    given = CASES.get(name, {"num_tokens": 4096})
    rows, addresses, wanted = case(**given, place=pinned)
    gather = functools.partial(gather_host_rows, row_bytes=given.get("row_bytes", ROW_BYTES))
    for plane, own in zip(jax.jit(gather)(rows, addresses), wanted, strict=True):
        np.testing.assert_array_equal(plane, own)


class HostMemory:
    """Words of one array at its own address; others are not to be read."""

    def __init__(self, array):
        self.begin = array.ctypes.data // 4 * 4
        spare = array.ctypes.data - self.begin
        size = -(-(spare + array.nbytes) // 4)
        whole = np.zeros(4 * size, np.uint8)
        whole[spare : spare + array.nbytes] = array.reshape(-1)
        self.held = whole.view(np.uint32)

    def words(self, address, count):
        place, rest = divmod(address - self.begin, 4)
        assert rest == 0, "a word must be aligned"
        assert place >= 0, "an access before the table"
        assert place + count <= len(self.held), "an access beyond the table"
        return self.held[place : place + count]


@pytest.mark.parametrize("row_bytes", [12, 11, 9, 1])
@pytest.mark.parametrize("offset", range(4))
def test_a_thread_reads_its_word_and_none_beyond_the_table(offset, row_bytes):
    """The text that threads run, instruction by instruction."""
    rng = np.random.default_rng(offset)
    rows = table(9, row_bytes, rng, offset=offset)
    low, high = (half % 2**32 for half in split_address(rows.ctypes.data))
    for row in range(9):
        for word in range(-(-row_bytes // 4)):
            operands = {1: low, 2: high, 3: row, 4: word}
            for _ in thread(load_word(row_bytes), operands, HostMemory(rows)):
                pass
            wanted = rows[row, 4 * word : 4 * word + 4].tobytes()
            assert operands[0].to_bytes(4, "little")[: len(wanted)] == wanted, (row, word)


def test_addresses_beyond_4_gib_have_two_halves():
    address = 0x7FF6_F77F_3C45
    low, high = split_address(address)
    assert np.array([low, high], np.int32).view(np.uint64)[0] == address


def test_as_many_planes_as_sizes_have_addresses():
    rows, addresses, _ = case(1)
    with pytest.raises(ValueError, match=r"addresses must be \[L, P, 2\]"):
        gather_host_rows(rows, addresses, row_bytes=(256,))
