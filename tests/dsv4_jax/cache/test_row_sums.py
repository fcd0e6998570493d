"""Checksums of packed rows: on the devices what they are on the host, and other for other bytes."""

import jax
import numpy as np
import pytest

from dsv4_jax.cache.row_sums import as_number, row_sums, sum_of_row


@pytest.mark.parametrize("width", [1, 4, 7, 1026])
def test_devices_and_host_agree_and_every_bit_counts(width):
    rng = np.random.default_rng(width)
    rows = rng.integers(0, 256, (5, width), np.uint8)
    sums = [as_number(one) for one in np.asarray(jax.jit(row_sums)(rows))]
    assert sums == [sum_of_row(row) for row in rows]
    row, found = rows[0], {sums[0]}
    for bit in range(0, 8 * width, 1 + width // 50):
        changed = row.copy()
        changed[bit // 8] ^= 1 << bit % 8
        found.add(sum_of_row(changed))
    assert len(found) == 1 + len(range(0, 8 * width, 1 + width // 50))


def test_bytes_that_change_places_and_zeros_that_are_added_count():
    row = np.arange(64, dtype=np.uint8)
    others = [np.roll(row, 4), row[::-1], row.reshape(2, 32)[::-1].ravel()]
    sums = {sum_of_row(one) for one in (row, *others, np.zeros(64, np.uint8), row[:60])}
    assert len(sums) == 6


def test_a_checksum_stays_what_it_is():
    """Files have it too."""
    assert sum_of_row(np.arange(10, dtype=np.uint8)) == 10795913284440002090
