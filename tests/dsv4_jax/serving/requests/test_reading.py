"""Which tokens all layers read: enough before each place that somebody goes on from."""

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.config.upper_layers import upper_layers
from dsv4_jax.serving.requests.reading import Reading

BACK = 22


def plan(start, num_known, boundaries, sizes=(64,)):
    options = {"look_back": BACK, "sizes": sizes, "rest_cost": 0.55}
    return Reading.of(start, num_known, boundaries, **options)


def read(reading, num_known, length=0):
    """The parts in which a request is read on, by steps of the largest size: (count, rests)."""
    while length < num_known:
        count, rests = reading.next_part(length)
        count = min(reading.sizes[-1], num_known - length if count is None else count)
        yield count, rests
        length += count


def test_the_upper_layers_run_before_the_last_boundary_and_to_the_end():
    reading = plan(0, 301, [256])
    assert reading.spans == ((256 - BACK, 301),)
    assert list(read(reading, 301)) == [(64, True)] * 3 + [(64, False), (45, False)]
    small = list(read(plan(0, 301, [256], sizes=(16, 30)), 301))
    assert small == [(30, True)] * 7 + [(16, True), (30, False), (30, False), (15, False)]


def test_they_run_before_a_boundary_that_others_will_come_back_to():
    reading = plan(0, 700, [640, 256])
    assert reading.spans == ((234, 256), (618, 700))
    assert plan(0, 700, [640, 625]).spans == ((603, 700),)
    assert plan(300, 700, [640, 256]).spans == ((618, 700),)
    assert plan(250, 700, [640, 256]).spans == ((250, 256), (618, 700))


def test_where_it_saves_no_step_they_do_not_rest():
    """82 tokens up to the end take two steps of 64, and so do 120, but not 130."""
    reading = plan(0, 700, [640])
    assert reading.next_part(618 - 38) == (120, False)
    assert reading.next_part(618 - 48) == (48, True)
    assert plan(0, 90, [0]).next_part(0) == (None, False)


def test_they_rest_for_whole_steps_where_the_rest_fits_into_one():
    """Of 5,523 tokens that could rest before 2,669 that do not: each half takes one step."""
    upper = upper_layers(ds.DSV4Config.v41_flash())
    options = {"look_back": upper.look_back, "rest_cost": 0.53}
    reading = Reading.of(0, 32_768, [32_640], sizes=(4096, 8192), **options)
    assert reading.next_part(24_576) == (4096, True)
    assert reading.next_part(28_672) == (4096, False)


@pytest.mark.parametrize("seed", range(40))
def test_however_it_is_cut_every_needed_boundary_is_exact(seed):
    """The bookkeeping of what is exact agrees with which tokens the upper layers have run."""
    rng = np.random.default_rng(seed)
    num_known, size = int(rng.integers(2, 900)), 32
    last = (num_known - 1) // size * size
    other = int(rng.integers(0, num_known // size + 1)) * size
    sizes = tuple(sorted(rng.choice([8, 16, 40, 64], 2, replace=False).tolist()))
    reading = plan(0, num_known, [last, other], sizes)
    ran, upper_from, length = np.zeros(num_known, bool), -1, 0
    while length < num_known:
        count, rests = reading.next_part(length)
        most = int(rng.integers(1, sizes[-1] + 1))  # others read beside it
        count = min(most, num_known - length if count is None else count)
        ran[length : length + count] = not rests
        length += count
        if rests:
            upper_from = length
        for end in range(size, length + 1, size):
            if end <= length - count:
                continue
            is_exact = bool(ran[max(end - BACK, 0) : end].all())
            assert reading.is_exact(end, upper_from) == is_exact
            assert is_exact or end not in (last, other)
    assert ran[max(num_known - BACK, 0) :].all()
