"""Bias, penalties, min-p, log-probabilities and samples of one prompt, through the engine."""

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving.device.drawn_counts import CountKeeper
from dsv4_jax.serving.requests.request import Request
from helpers import slow
from helpers.serving import CONFIG, make_engine, prompt, run_to_end

PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 1.0}
SETTINGS = [
    {"frequency_penalty": 2.0, "logprobs": 20},
    {"temperature": 0.9, "seed": 4, "logit_bias": {3: 6, 80: 5.5, 11: -100}, "logprobs": 2},
    {"temperature": 1.2, "seed": 5, "min_p": 0.02, "top_p": 0.95, **PENALTIES},
    {"logit_bias": {7: 9.0}, "presence_penalty": 2.0, "frequency_penalty": -0.5, "logprobs": 0},
    {"temperature": 0.7, "seed": 6, "logprobs": 5},
]
WANTED = {"max_new_tokens": 40, "stop_token_ids": ()}


def texts():
    rng = np.random.default_rng(21)
    return [prompt(rng, n) for n in (30, 5, 50, 17, 9)]


@pytest.fixture(scope="module")
def alone():
    """Completions without drafts and neighbours."""
    engine = make_engine()
    return [
        run_to_end(engine, engine.submit(text, speculate=False, salt="alone", **WANTED, **asked))[0]
        for text, asked in zip(texts(), SETTINGS, strict=True)
    ]


@pytest.mark.slow
def test_settings_hold_beside_others_with_drafts_preemption_and_forks(alone):
    """Log-probabilities are equal to the bit too; right drafts are proposed now and then."""
    engine = make_engine()
    ids = [
        engine.submit(text, **WANTED, **asked)
        for text, asked in zip(texts(), SETTINGS, strict=True)
    ]
    copies = []
    for step in range(400):
        for request_id, one in zip(ids, alone, strict=True):
            request = engine.requests[request_id]
            if step % 3 and request.drafts:
                request.drafts[:2] = one.token_ids[request.num_drawn :][:2]
        if step in (5, 8):
            engine.preempt(ids[step % 2])
        if step == 6:
            copies = [engine.fork(ids[n], seed=SETTINGS[n].get("seed", 0)) for n in (2, 3)]
        engine.step()
        if not engine.num_unfinished:
            break
    assert [engine.completion(one) for one in ids] == alone
    assert [engine.completion(one) for one in copies] == [alone[2], alone[3]]
    assert engine.metrics.accepted_tokens > 20
    assert engine.metrics.preempted == 2


@pytest.mark.slow
def test_what_is_drawn_is_the_best_after_penalties_and_bias(alone):
    """Greedy rows, from the log-probabilities that they came with."""
    drawn, moved = [], 0
    for token, found in zip(alone[0].token_ids, alone[0].logprobs, strict=True):
        assert [value for _, value in found.top] == sorted(
            (value for _, value in found.top), reverse=True
        )
        scores = {one: value - 2.0 * drawn.count(one) for one, value in found.top}
        assert token == max(scores, key=scores.get)
        assert found.logprob == dict(found.top)[token]
        moved += token != found.top[0][0]
        drawn.append(token)
    assert moved > 5
    assert 11 not in alone[1].token_ids
    assert alone[3].token_ids[0] == 7
    assert {len(found.top) for found in alone[3].logprobs} == {0}
    assert alone[2].logprobs is None


def test_a_stream_brings_log_probabilities(alone):
    engine = make_engine()
    stream = engine.stream(engine.submit(texts()[4], **WANTED, **SETTINGS[4]))
    assert [token.logprobs for token in stream] == alone[4].logprobs


def test_who_finds_no_room_for_counts_waits(alone, monkeypatch):
    """It sits steps out, and gets the same."""
    engine = make_engine()
    monkeypatch.setattr(engine.loop.runner.count_keeper, "_has_room", lambda size: size <= 40)
    ids = [
        engine.submit(text, **WANTED, **asked)
        for text, asked in zip(texts(), SETTINGS, strict=True)
    ]
    sat_out = 0
    while engine.num_unfinished:
        running = engine.loop.queue.table
        engine.step()
        sat_out += len(running) - len(engine.loop.runner.fitting(running))
    assert sat_out > 10
    assert [engine.completion(one) for one in ids] == alone


def drawing_request(request_id, drawn, slot, **penalties):
    sampling = ds.SamplingParams(max_new_tokens=500, **penalties)
    request = Request(request_id, np.array([1, 2, 2]), sampling, 0.0)
    for token in drawn:
        request.add(token, None)
    request.slot = slot
    return request


def test_counts_are_of_drawn_tokens_alone():
    rng = np.random.default_rng(0)
    keeper = CountKeeper(300, slots=4)
    histories = [rng.integers(0, 200, n).tolist() for n in (90, 0, 7)]
    running = {
        slot: drawing_request(slot, drawn, slot, presence_penalty=1)
        for slot, drawn in enumerate(histories)
    }
    running[3] = drawing_request(3, [5, 6], 3)
    for _ in range(3):
        found = keeper.counts_of(running)
        entries = sorted(zip(found.rows, found.token_ids, found.counts, strict=True))
        assert [one for one in entries if one[0] >= 0] == sorted(
            (slot, token, drawn.count(token))
            for slot, drawn in enumerate(histories)
            for token in set(drawn)
        )
        for slot, drawn in enumerate(histories):
            drawn.append(int(rng.integers(0, 200)))
            running[slot].add(drawn[-1], None)
    assert keeper.counts_of({3: running[3]}) is None


def test_the_youngest_sit_out_where_counts_do_not_fit():
    keeper = CountKeeper(10, slots=5)
    running = {
        slot: drawing_request(request_id, range(count), slot, frequency_penalty=1)
        for slot, (request_id, count) in enumerate([(5, 6), (2, 3), (9, 1), (7, 8)])
    }
    running[4] = drawing_request(11, range(50), 4)
    assert sorted(keeper.fitting(running)) == [0, 1, 2, 4]
    assert (np.sum(keeper.counts_of(keeper.fitting(running)).rows >= 0)) == 10


@pytest.mark.parametrize("length", slow.all_but([2, 129], [2, 40, 129]))
def test_samples_of_a_prompt_are_requests_of_their_own(length):
    """Five on four slots: the prompt is read once, and the fifth comes when a slot is free."""
    engine, text = make_engine(), prompt(np.random.default_rng(length), length)
    asked = {"temperature": 1.0, "max_new_tokens": 9, "stop_token_ids": (), "logprobs": 1}
    ids = engine.submit_many(text, 5, seed=[7, 3, 3, -1, 8], **asked)
    assert engine.num_unfinished == 5
    for _ in range(-(-(length - 1) // 24)):
        engine.step()
        assert len(engine.loop.queue.running) == 1
    engine.step()
    assert [engine.requests[one].num_drawn for one in ids] == [1, 1, 1, 1, 0]
    done = run_to_end(engine, *ids)
    for one, seed in zip(done, [7, 3, 3, -1, 8], strict=True):
        (expected,) = run_to_end(engine, engine.submit(text, seed=seed, salt="other", **asked))
        assert one == expected
    assert [one.hit_tokens for one in done][:4] == [0] + [length - 1] * 3
    assert done[1].token_ids != done[0].token_ids


def test_samples_go_on_when_the_first_is_cancelled():
    engine, text = make_engine(), prompt(np.random.default_rng(3), 60)
    asked = {"max_new_tokens": 4, "stop_token_ids": (), "temperature": 1.0}
    ids = engine.submit_many(text, 3, seed=5, **asked)
    others = engine.submit([1, 2, 3], **asked | {"max_new_tokens": 40})
    engine.step()
    engine.cancel(ids[0])
    engine.step()
    assert {one.request_id for one in engine.loop.queue.running.values()} == {ids[1], others}
    engine.preempt(ids[1])
    done = run_to_end(engine, *ids[1:])
    expected = [
        run_to_end(engine, engine.submit(text, seed=seed, salt="other", **asked))[0]
        for seed in (6, 7)
    ]
    assert done == expected
    run_to_end(engine, others)
    (short,) = run_to_end(engine, *engine.submit_many([9], 1, **asked))
    assert short == run_to_end(engine, engine.submit([9], **asked))[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 129}, "n must be at most 128, got 129"),
        ({"n": 2, "seed": [1, 2, 3]}, r"seed must be one, or one per sample \(2\), got 3"),
        ({"n": 2, "logit_bias": {CONFIG.vocab_size: 1}}, "logit_bias must name token ids in 0"),
    ],
)
def test_samples_that_cannot_be_are_refused(arguments, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.submit_many([1, 2], **arguments)
    assert engine.metrics.submitted == 0
