"""Which snapshots ask for more tokens, of requests whose upper layers have rested."""

import types

import numpy as np
import pytest

from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.schedule import snapshot_policy
from dsv4_jax.serving.schedule.snapshot_policy import plan_request, plan_restored, take_boundaries
from dsv4_jax.serving.sizing import UpperSteps
from dsv4_jax.step.sampling import SamplingParams

BACK, SIZE = 22, 32
RESTS = UpperSteps(sizes={64: 8}, step_sizes=(64,), look_back=BACK, share=0.5)
RUNS = UpperSteps(sizes={}, step_sizes=(64,), look_back=BACK, share=0.5)


@pytest.fixture
def _each_boundary(monkeypatch):
    monkeypatch.setattr(snapshot_policy, "SPACED_SNAPSHOTS", 100)


@pytest.mark.parametrize(
    ("num_blocks", "num_snapshots", "spacing"),
    [(1, 200, 1), (8, 200, 1), (9, 200, 2), (62, 200, 8), (128, 200, 16), (800, 200, 16),
     (800, 20, 80), (62, 8, 16), (62, 1, 62)],
)  # fmt: skip
def test_snapshots_of_a_prompt_are_eight_or_one_in_sixteen_blocks(
    num_blocks, num_snapshots, spacing
):
    """Nor do they take more than half of all places."""
    request, shards = admitted(num_blocks * SIZE + 1)
    shards.managers[0].plan.num_snapshots = num_snapshots
    plan_request(request, shards, 0)
    assert request.snapshot_spacing == spacing
    found = asked(request, shards, 0, num_blocks * SIZE)
    every = {*range(spacing, num_blocks + 1, spacing), num_blocks}
    assert list(found) == [number * SIZE for number in sorted(every)]


def admitted(num_known, *, hit=0, is_exact=True):
    """A request, and shards that keep what it is asked to keep."""
    request = Request(0, np.zeros(num_known, np.int32), SamplingParams(), 0.0)
    request.slot = 0
    places = iter(range(100))
    prefixes = types.SimpleNamespace(
        hit_tokens=lambda slot: hit,
        is_exact_hit=lambda slot: is_exact,
        is_resumable=lambda *of: False,
        begin_snapshot=lambda: next(places),
    )
    plan = types.SimpleNamespace(block_tokens=SIZE, num_snapshots=200)
    manager = types.SimpleNamespace(plan=plan, prefixes=prefixes)
    return request, types.SimpleNamespace(of=lambda slot: (manager, slot), managers=[manager])


def asked(request, shards, length, end):
    """What snapshots of a step ask for, by boundary."""
    return {one.end: one.must_follow for one in take_boundaries(request, shards, length, end)}


@pytest.mark.usefixtures("_each_boundary")
def test_boundaries_near_behind_what_rested_ask_for_more():
    request, shards = admitted(300)
    plan_request(request, shards, 0, RESTS)
    assert request.reading.spans == ((288 - BACK, 300),)
    request.upper_from = 75
    assert asked(request, shards, 60, 130) == {64: BACK, 96: BACK, 128: 0}


def test_a_hit_that_asked_for_more_is_not_exact_from_there_on():
    request, shards = admitted(300, hit=64, is_exact=False)
    plan_request(request, shards, 0, RESTS)
    assert request.upper_from == 64
    request, shards = admitted(300, hit=64)
    plan_request(request, shards, 0, RESTS)
    assert request.upper_from == -1


@pytest.mark.usefixtures("_each_boundary")
@pytest.mark.parametrize("upper", [RESTS, RUNS])
def test_who_comes_from_elsewhere_may_have_rested_up_to_there(upper):
    """Also where nobody rests here."""
    request, shards = admitted(300)
    plan_restored(request, shards, 80, upper)
    assert asked(request, shards, 80, 128) == {96: BACK, 128: 0}
    plan_restored(request, shards, 280, upper)  # whoever read it ran all layers from 266 on
    assert asked(request, shards, 280, 300) == {288: 0}
    assert bool(request.reading.spans) == (upper is RESTS)
    short, shards = admitted(31)
    plan_restored(short, shards, 20, upper)
    assert short.upper_from == -1
