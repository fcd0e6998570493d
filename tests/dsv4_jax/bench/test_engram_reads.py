"""Engram tables of a benchmark: heights, bytes, and steps that wait for rows of them."""

import dataclasses

import numpy as np
import pytest

from dsv4_jax.bench.engram_reads import make_tables, reduced, table_bytes, time_reads
from dsv4_jax.config import DSV4Config

FLASH = DSV4Config.v41_flash()


def test_the_real_height_takes_what_the_release_has():
    assert table_bytes(reduced(FLASH.engram, None)) == 202_758_032_400


def test_a_reduced_height_is_about_what_is_asked_for():
    heights = reduced(FLASH.engram, 100_000).table_rows
    assert all(100_000 <= rows < 110_000 for rows in heights)


@pytest.mark.parametrize("rows", [1, 47, 10**9])
def test_other_heights_are_refused(rows):
    with pytest.raises(ValueError, match=rf"--engram-rows must be in 48..\d+ or all, got {rows}"):
        reduced(FLASH.engram, rows)


def test_tables_are_whole_and_steps_get_rows_of_them():
    tables = make_tables(FLASH, 1000)
    assert tables.num_bytes == table_bytes(tables.config)
    for table in tables.tables:
        assert np.isfinite(table.values.astype(np.float32)).all()
        assert len(np.unique(table.values.view(np.uint8)[:100], axis=0)) == 100
        assert (table.scale == table.scale[0, 0]).all()
    given = []

    def step(state, rows):
        given.append(rows)
        return state + 1

    sizes = {"batch": 3, "calls": 4, "limit_s": 60, "put": lambda rows: rows}
    row, state = time_reads(tables, 0, step=step, rewind=lambda _: 0, **sizes)
    assert state == 4
    assert row["engram_step_ms"] >= row["engram_ms"] + row["engram_put_ms"] > 0
    assert row["engram_rows_read"] == 3 * 2 * 24
    assert given[0].values.shape == (3, 2, 24, 256)
    assert not np.array_equal(given[0].values, given[1].values)


def test_one_table_is_enough():
    one = dataclasses.replace(FLASH.engram, layers=(1,))
    config = dataclasses.replace(FLASH, engram=one)
    assert len(make_tables(config, 100).tables) == 1
