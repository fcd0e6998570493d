"""Random lives of an engine: whatever else happens, a request gets what it gets alone.

All runs are steps of one program, so that equal means equal to the bit, in tokens and in every
byte of the cache that a request could read.
"""

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from helpers.engine_life import Life, alone, plain_engine, rows_alone
from helpers.schedules import assert_same_bytes
from helpers.serving import (
    BUCKET,
    EVERY_TYPE,
    SIZES,
    byte_tokenizer,
    limit,
    make_engine,
    prompt,
    rows_of,
    run_to_end,
)


@pytest.mark.parametrize(
    ("seed", "scarce"),
    [
        (0, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(0, True, marks=pytest.mark.slow),
    ],
)
def test_whatever_happens_a_request_gets_what_it_gets_alone(scarce, seed):
    """Chunks, batches, forks, preemptions, hits and drafts, mixed at random.

    Plenty of blocks and every freed byte NaN, verified after each step; or so few blocks that
    requests push each other out. Known bugs B1, B8, B19, B32, B34.
    """
    engine = limit(make_engine(), num_blocks=4) if scarce else make_engine(debug=True)
    life = Life(engine, seed)
    for _ in range(120):
        life.event()
    life.finish()
    metrics = engine.metrics
    if scarce:
        assert metrics.evicted_blocks > 0
        return
    rare = {} if seed == 0 else {"look": 1}
    assert min((life.counts | rare).values()) >= 1, life.counts
    assert metrics.hit_tokens > 500
    assert metrics.drafted_tokens > 100
    assert metrics.snapshots > 2


@pytest.mark.slow
def test_a_life_of_a_model_whose_trunk_has_a_layer_of_the_window_alone():
    params = ds.init_params(EVERY_TYPE, jax.random.key(0))
    engine, plain = (
        ds.Engine(EVERY_TYPE, params, **SIZES, **changes)
        for changes in ({"debug": True}, {"overlap": False})
    )
    life = Life(engine, 0, limit(plain, num_snapshots=0))
    for _ in range(120):
        life.event()
    life.finish()
    assert engine.metrics.drafted_tokens > 100


@pytest.mark.slow
def test_a_long_life():
    """Twenty thousand events."""
    for seed in range(20):
        life = Life(limit(make_engine(), num_blocks=6) if seed % 2 else make_engine(), 100 + seed)
        for _ in range(1000):
            life.event()
        life.finish()


def test_a_fork_and_its_parent_have_the_bytes_of_requests_alone():
    """Sampled apart from here on: the open block and the rings of neither show in the other's."""
    engine, text = make_engine(debug=True), prompt(np.random.default_rng(13), 150)
    options = {"max_new_tokens": 60, "temperature": 1.0, "stop_token_ids": (), "seed": 1}
    parent = engine.submit(text, **options)
    while engine.requests[parent].num_drawn < 4:
        engine.step()
    known = engine.requests[parent].known.tolist()
    fork = engine.fork(parent, seed=2)
    for _ in range(8):
        engine.step()
    branch = options | {"seed": 2, "max_new_tokens": 60 - (len(known) - len(text))}
    for request_id, start, wanted in ((parent, text, options), (fork, known, branch)):
        rows = rows_of(engine, request_id)
        drawn = engine.requests[request_id].known.tolist()[len(start) :]
        assert len(drawn) >= 8
        assert_same_bytes(rows, rows_alone(start, drawn, int(rows["length"]), wanted))
    assert engine.requests[parent].known.tolist() != engine.requests[fork].known.tolist()
    usage = [engine.requests[one].completion(None).hit_tokens for one in (parent, fork)]
    assert usage == [0, len(text)]


@pytest.mark.slow
def test_what_was_admitted_is_served_when_blocks_run_out():
    """Four answers of 2 or 3 blocks on 4 blocks: the youngest wait, nobody fails (bug B4)."""
    engine = limit(make_engine(), num_blocks=4, num_snapshots=0)
    rng = np.random.default_rng(0)
    texts = [prompt(rng, n) for n in (120, 125, 100, 90)]
    options = {"max_new_tokens": 140, "stop_token_ids": ()}
    plain = plain_engine()  # of blocks for all of them
    ids = [plain.submit(text, **options, speculate=False) for text in texts]
    expected = run_to_end(plain, *ids)
    assert run_to_end(engine, *(engine.submit(text, **options) for text in texts)) == expected
    assert engine.metrics.preempted > 0
    assert engine.metrics.used_blocks == 0


def test_a_short_prompt_does_not_wait_for_long_ones():
    """Three prompts of 500 tokens come first: the short one is answered long before they are."""
    engine, rng = make_engine(), np.random.default_rng(1)
    long = [engine.submit(prompt(rng, 500), max_new_tokens=2) for _ in range(3)]
    short = engine.submit(prompt(rng, 20), max_new_tokens=2)
    steps = 0
    while not engine.requests[short].num_drawn:
        engine.step()
        steps += 1
    assert steps <= 3
    assert all(engine.requests[i].num_drawn == 0 for i in long)


def test_an_answer_goes_on_while_long_prompts_are_read():
    engine, rng = make_engine(), np.random.default_rng(2)
    answer = engine.submit(prompt(rng, 5), max_new_tokens=30, stop_token_ids=(), speculate=False)
    engine.step()
    for _ in range(3):
        engine.submit(prompt(rng, 500), max_new_tokens=2)
    for _ in range(10):
        before = engine.requests[answer].num_drawn
        engine.step()
        assert engine.requests[answer].num_drawn == before + 1


class Lost(Exception):
    """What a failing device raises."""


@pytest.mark.parametrize("takes_the_cache", [False, True])
def test_a_step_that_raises_harms_nobody(monkeypatch, takes_the_cache):
    """The manager has counted nothing, and the requests get what they would have got."""
    engine, rng = make_engine(debug=True), np.random.default_rng(4)
    texts = [prompt(rng, n) for n in (140, 30)]
    options = {"max_new_tokens": 12, "stop_token_ids": ()}
    ids = [engine.submit(text, **options) for text in texts]
    for _ in range(9):
        engine.step()
    run = engine.loop.runner.run

    def fail(*arguments):
        if takes_the_cache:
            for leaf in jax.tree.leaves(engine.cache):
                leaf.delete()
        raise Lost

    monkeypatch.setattr(engine.loop.runner, "run", fail)
    before = engine.loop.shards.length_tokens.copy()
    with pytest.raises(Lost):
        engine.step()
    if not takes_the_cache:
        np.testing.assert_array_equal(engine.loop.shards.length_tokens, before)
    monkeypatch.setattr(engine.loop.runner, "run", run)
    for done, text in zip(run_to_end(engine, *ids), texts, strict=True):
        assert done == alone(text, options)
    assert not engine.verify().problems


@pytest.mark.parametrize("place", ["advance", "keep_snapshot"])
def test_a_step_that_fails_while_it_is_counted_harms_nobody(monkeypatch, place):
    """The device is ahead of the manager then: all is computed again, to the same tokens."""
    engine, rng = make_engine(debug=True), np.random.default_rng(12)
    texts = [prompt(rng, n) for n in (140, 30, 128 + 20)]
    options = {"max_new_tokens": 12, "stop_token_ids": ()}
    ids = [engine.submit(text, **options) for text in texts]
    calls = iter(range(1000))

    def fail(*arguments):
        if next(calls) == 1:
            raise Lost
        return method(*arguments)

    manager = engine.loop.shards.managers[0]
    owner = engine.loop.shards if place == "advance" else manager.prefixes
    method = getattr(owner, place)
    monkeypatch.setattr(owner, place, fail)
    with pytest.raises(Lost):
        run_to_end(engine, *ids)
    for done, text in zip(run_to_end(engine, *ids), texts, strict=True):
        assert done == alone(text, options)
    assert engine.loop.shards.managers[0] is not manager
    assert not engine.verify().problems


def test_an_error_in_one_request_is_that_requests_alone(monkeypatch):
    """A text decoder that fails ends its request; the others run on."""
    engine, rng = make_engine(tokenizer=byte_tokenizer(), grammars=False), np.random.default_rng(6)
    wanted = {"max_new_tokens": 9, "stop_token_ids": ()}
    good = engine.submit(prompt(rng, 20), **wanted)
    bad = engine.submit(prompt(rng, 20), stop_texts=("never",), **wanted)

    def fail(*arguments):
        raise Lost

    monkeypatch.setattr(engine.requests[bad], "add", fail)
    (done,) = run_to_end(engine, good)
    assert len(done.token_ids) == 9
    failed = engine.completion(bad)
    assert (failed.finish_reason, failed.error) == ("error", "Lost: ")
    assert engine.metrics.finished == {"error": 1, "length": 1}
    assert engine.metrics.used_blocks == 0


def test_cancelling():
    engine, rng = make_engine(), np.random.default_rng(7)
    ids = [engine.submit(prompt(rng, 30), max_new_tokens=20, stop_token_ids=()) for _ in range(6)]
    for _ in range(6):
        engine.step()
    assert engine.metrics.waiting == 2
    assert engine.cancel(ids[0])
    assert not engine.cancel(ids[0])
    assert engine.cancel(ids[5])
    with pytest.raises(ValueError, match="request_id must be one that submit gave, got 6"):
        engine.cancel(6)
    with pytest.raises(ValueError, match="request_id must be one that submit gave, got -1"):
        engine.cancel(-1)
    got = engine.completion(ids[0])
    assert got.finish_reason == "cancelled"
    assert 0 < len(got.token_ids) < 20
    assert not engine.cancel(ids[0])
    with pytest.raises(ValueError, match="has not finished, or has been taken already"):
        engine.completion(ids[0])
    with pytest.raises(ValueError, match="unfinished request"):
        engine.fork(ids[0], seed=1)
    run_to_end(engine, *ids[1:5])
    assert engine.metrics.finished == {"cancelled": 2, "length": 4}


def test_streams_of_several_requests_take_turns():
    """Two streams of one engine, read a token each: all tokens, in order; one closed early."""
    engine, rng = make_engine(), np.random.default_rng(8)
    options = {"max_new_tokens": 10, "stop_token_ids": ()}
    texts = [prompt(rng, 10) for _ in range(3)]
    ids = [engine.submit(text, **options) for text in texts]
    streams = [engine.stream(i) for i in ids]
    got = [[next(stream).token_id] for stream in streams]
    streams[2].close()
    assert engine.completion(ids[2]).finish_reason == "cancelled"
    for number in (0, 1):
        got[number] += [token.token_id for token in streams[number]]
        assert got[number] == alone(texts[number], options).token_ids
        assert engine.completion(ids[number]).finish_reason == "length"


@pytest.mark.slow
def test_memory_is_flat_over_many_requests():
    """Hundreds of requests later the engine holds what it held: no request, block or place more."""
    engine, rng = make_engine(), np.random.default_rng(9)
    arrays = len(jax.live_arrays())
    for round_number in range(6):
        ids = [engine.submit(prompt(rng, int(n)), max_new_tokens=2)
               for n in rng.integers(1, 200, 20)]  # fmt: skip
        run_to_end(engine, *ids)
        if not round_number:
            arrays = len(jax.live_arrays())
    assert len(jax.live_arrays()) <= arrays
    assert not engine.requests
    tree = engine.loop.shards.managers[0].prefixes.tree
    assert len(tree._leaves) <= 64 + 4 * len(tree.nodes)
    assert not engine.verify().problems


def test_waiting_requests_are_served_in_order():
    """More requests than slots: first come, first served."""
    engine, rng = make_engine(), np.random.default_rng(10)
    ids = [engine.submit(prompt(rng, 20), max_new_tokens=4, stop_token_ids=()) for _ in range(12)]
    first = []
    while engine.num_unfinished:
        first += [t.request_id for t in engine.step() if t.request_id not in first]
    assert first == ids
    assert engine.metrics.queue_s.count == 12


def test_buckets_are_what_the_tests_assume():
    sizes = make_engine().plan.step_sizes
    assert (sizes.prompts, sizes.decoding, sizes.is_plain) == ((BUCKET,), (BUCKET,), False)
