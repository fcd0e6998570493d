"""Rings and drafts of DSpark stages are those of the whole history, however a request came there.

What a request has at any moment is compared with one prompt run of all its tokens: every byte that
it could read, the rings of the stages among them, and the drafts for what comes next.
"""

import numpy as np
import pytest

from helpers import slow, taught
from helpers.engine_life import Life
from helpers.schedules import assert_same_bytes
from helpers.serving import limit, prompt, rows_of, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.compiles_for_others]

WANTED = {"max_new_tokens": 150, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def cold():
    """Whose requests share nothing."""
    return limit(taught.make_small(overlap=False), num_snapshots=0)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def check(engine, request_id, cold):
    """What a running request has, beside a prompt of all tokens but the one drawn last.

    Drafts are drawn with the noise of their places, so that its seed and temperature go with it.
    """
    request = engine.requests[request_id]
    assert request.num_drawn > 0
    assert request.finish_reason is None
    known, drafts = request.known.tolist(), list(request.drafts)
    sampling = request.sampling
    again = cold.submit(
        known[:-1], seed=sampling.seed, temperature=sampling.temperature, speculate=False, **WANTED
    )
    while not cold.requests[again].num_drawn:
        cold.step()
    assert cold.requests[again].known.tolist() == known
    expected = rows_of(cold, again)
    assert {"swa.window", "csa.window"} <= {name.rsplit(".", 1)[0] for name in expected}
    assert_same_bytes(rows_of(engine, request_id), expected)
    assert drafts == list(cold.requests[again].drafts)
    assert len(drafts) == taught.SMALL.dspark.block_size
    cold.cancel(again)


def steps(engine, request_id, count, cold):
    """Steps that draw, each with a check after it."""
    for _ in range(count):
        before = engine.requests[request_id].num_drawn
        while engine.requests[request_id].num_drawn == before:
            engine.step()
        check(engine, request_id, cold)


@pytest.mark.parametrize("shared", slow.all_but([128], [128, 256]))
def test_a_prefix_hit_brings_the_rings(rng, cold, shared):
    engine = taught.make_small(debug=True)
    head = prompt(rng, shared)
    run_to_end(engine, engine.submit(head + prompt(rng, 40), **WANTED))
    # A CSA tail's a-stream is not read again, and no snapshot has it: eight tokens later it is new.
    second = engine.submit(head + prompt(rng, 8), temperature=0.3, seed=2, **WANTED)
    steps(engine, second, 4, cold)
    assert engine.metrics.hit_tokens == shared


def test_a_prefix_without_a_snapshot_is_run_again(rng, cold):
    """Its blocks are there; the one snapshot is of the boundary after it."""
    engine = limit(taught.make_small(debug=True), num_snapshots=1)
    head = prompt(rng, 300)
    run_to_end(engine, engine.submit(head, **WANTED))
    assert engine.metrics.snapshots > 0
    second = engine.submit(head[:200] + prompt(rng, 3), **WANTED)
    steps(engine, second, 3, cold)
    assert engine.metrics.hit_tokens == 0


def test_an_answer_with_kept_drafts_is_a_prefix(rng, cold):
    """Boundaries are crossed inside blocks of drafts that were right."""
    engine = taught.make_small(overlap=False)
    text = prompt(rng, 124)
    (plain,) = run_to_end(engine, engine.submit(text, speculate=False, salt="plain", **WANTED))
    request = engine.requests[engine.submit(text, **WANTED)]
    while request.finish_reason is None:
        if request.num_drawn:
            request.drafts = plain.token_ids[request.num_drawn :][:5]
        engine.step()
    assert engine.metrics.acceptance == 1
    turn = engine.submit([*text, *plain.token_ids, 1, 2, 3], **WANTED)
    steps(engine, turn, 3, cold)
    assert engine.metrics.hit_tokens == 256


def test_forks_have_the_rings_of_their_request(rng, cold):
    """Of a request in the middle of its answer, with its seed and with another one."""
    engine = taught.make_small(debug=True)
    first = engine.submit(prompt(rng, 125), temperature=0.3, seed=1, **WANTED)
    steps(engine, first, 2, cold)
    same, other = engine.fork(first, seed=1), engine.fork(first, seed=9)
    for request_id in (first, same, other):
        steps(engine, request_id, 3, cold)
    done = run_to_end(engine, first, same, other)
    assert done[0].token_ids == done[1].token_ids != done[2].token_ids


def test_a_preempted_request_comes_back_with_its_rings(rng, cold):
    """Within a block of 128 it is run again from its start, beyond one from the snapshot."""
    engine = taught.make_small(debug=True)
    first, second = (engine.submit(prompt(rng, length), **WANTED) for length in (60, 120))
    steps(engine, first, 2, cold)
    while len(engine.requests[second].known) < 140:
        engine.step()
    for request_id in (first, second):
        engine.preempt(request_id)
        steps(engine, request_id, 2, cold)
    assert engine.metrics.preempted == 2
    assert engine.metrics.hit_tokens == 128


def test_a_slot_that_is_used_again_has_nothing_of_the_request_before(cold):
    """One slot, three requests; the second has fewer tokens than a window."""
    rng = np.random.default_rng(6)
    engine = taught.make_small(debug=True, overlap=False)
    for length in (90, 1, 20):
        ids = [engine.submit(prompt(rng, length), **WANTED) for _ in range(4)]
        for request_id in ids:
            steps(engine, request_id, 1, cold)
            engine.cancel(request_id)


def test_rows_that_do_not_speculate_write_their_rings(rng, cold):
    """Beside one that does, and beside a prompt that leaves drafts no room."""
    engine = taught.make_small(debug=True)
    quiet = engine.submit(prompt(rng, 30), speculate=False, **WANTED)
    loud = engine.submit(prompt(rng, 9), temperature=0.3, **WANTED)
    steps(engine, quiet, 4, cold)
    engine.submit(prompt(rng, 90), **WANTED)
    steps(engine, quiet, 2, cold)
    steps(engine, loud, 2, cold)
    assert engine.metrics.accepted_tokens > 0


@pytest.mark.parametrize("length", [121, 124, 127])
@pytest.mark.parametrize("how", ["stop", "length"])
def test_tokens_after_an_end_inside_a_block_are_dropped(cold, how, length):
    """Five drafts are right, and the third drawn token is the last; the next turn has its rings."""
    rng = np.random.default_rng(length)
    engine = taught.make_small(overlap=False)
    text, end = prompt(rng, length), 3
    (plain,) = run_to_end(engine, engine.submit(text, speculate=False, salt="plain", **WANTED))
    wanted = {"max_new_tokens": end, "stop_token_ids": ()}
    if how == "stop":
        wanted = {"max_new_tokens": 150, "stop_token_ids": (plain.token_ids[end - 1],)}
        end = plain.token_ids.index(plain.token_ids[end - 1]) + 1
    request = engine.requests[engine.submit(text, **wanted)]
    while request.finish_reason is None:
        if request.num_drawn:
            request.drafts = plain.token_ids[request.num_drawn :][:5]
        engine.step()
    done = engine.completion(request.request_id)
    assert done.token_ids == plain.token_ids[:end]
    assert done.finish_reason == how
    assert engine.metrics.used_blocks == 0
    turn = engine.submit([*text, *done.token_ids, 7, 8, 9], **WANTED)
    steps(engine, turn, 2, cold)
    assert not engine.verify().problems


@pytest.mark.parametrize(
    ("seed", "overlap"), slow.all_but([(0, True)], [(n, n % 2 == 0) for n in range(6)])
)
def test_random_lives_get_what_a_request_alone_gets(cold, seed, overlap):
    """Stops, forks, cancels, preemptions, hits, drafts, penalties, in any order."""
    engine = taught.make_small(overlap=overlap)
    life = Life(engine, 70 + seed, cold)
    for _ in range(400 if seed else 60):
        life.event()
    life.finish()
    assert engine.metrics.accepted_tokens > 0
