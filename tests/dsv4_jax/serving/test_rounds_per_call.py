"""A call that makes several steps with drafts gives what as many calls of one step give.

With an MTP block and with DSpark stages; the tests that run an engine are slow. Prompts are read by
steps of as many tokens as the calls have, so that all products have the same shapes.
"""

import collections
import functools

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving.schedule.scheduler import plan_decoding
from dsv4_jax.serving.step_sizes import StepSizes
from helpers import serving, taught
from helpers.engine_life import Life
from helpers.serving import limit, prompt, run_to_end, same_tokens

WANTED = {"max_new_tokens": 80, "stop_token_ids": ()}
KINDS = ["dspark", "mtp"]
ALONE = {"logprobs": 0}
"""Asked for, each call makes one step."""


def make_engine(kind="dspark", steps_per_call=3, **changes):
    if kind == "dspark":
        sizes = {"decode_tokens": None, "steps_per_call": steps_per_call, "cache_format": "f32"}
        return taught.make_small(**(sizes | changes))
    sizes = {"draft_tokens": 2, "decode_tokens": None, "prefill_tokens": (12,), "max_requests": 4}
    sizes |= {"steps_per_call": steps_per_call, "cache_format": "f32"}
    return ds.Engine(*mtp_model(), **(serving.SIZES | sizes | changes))


@functools.cache
def mtp_model():
    return serving.one_layer(num_mtp_layers=1)


@functools.cache
def other_engine(kind="dspark"):
    """For requests `ALONE`, with programs that are compiled already."""
    return make_engine(kind, overlap=False)


@functools.cache
def without_sharing():
    return limit(make_engine(steps_per_call=1, overlap=False), num_snapshots=0)


def calls_of(engine, monkeypatch):
    """Steps of each call, as they come."""
    made, step = [], engine.loop.runner.devices.launch

    def note(step_input, snapshots, checked, following, num_steps, *more, **options):
        made.append(1 if num_steps is None else int(num_steps.max()))
        return step(step_input, snapshots, checked, following, num_steps, *more, **options)

    monkeypatch.setattr(engine.loop.runner.devices, "launch", note)
    return made


def _counts(engine):
    """Steps, and drafts by depth."""
    metrics = engine.metrics
    return collections.Counter(
        {"steps": metrics.steps}
        | {("checked", depth): count for depth, count in metrics.drafted_at.items()}
        | {("kept", depth): count for depth, count in metrics.accepted_at.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "overlap"), [(k, o) for k in KINDS for o in (True, False)])
def test_answers_are_those_of_single_steps(kind, overlap, monkeypatch):
    """Requests of several lengths, greedy and sampled, that come and end at different times."""
    engine, rng = make_engine(kind, overlap=overlap, debug=not overlap), np.random.default_rng(0)
    made = calls_of(engine, monkeypatch)
    texts = [prompt(rng, int(length)) for length in (3, 150, 40, 127, 5, 61)]
    settings = [
        WANTED | {"seed": seed, "temperature": 0.3 * (seed % 2), "max_new_tokens": 80 - seed}
        for seed in range(6)
    ]
    ids = [engine.submit(text, **one) for text, one in zip(texts, settings, strict=True)]
    for text, one, found in zip(texts, settings, run_to_end(engine, *ids), strict=True):
        single = other_engine(kind)
        same_tokens(found, run_to_end(single, single.submit(text, **one, **ALONE))[0])
    assert 3 in made
    assert not engine.verify().problems


@pytest.mark.slow
def test_drafts_of_an_mtp_block_that_are_right_are_kept():
    """Random weights guess nothing, so that every call begins with two drafts that are known."""
    single, text = other_engine("mtp"), prompt(np.random.default_rng(4), 7)
    [wanted] = run_to_end(single, single.submit(text, speculate=False, **WANTED, **ALONE))
    engine = make_engine("mtp", overlap=False)
    request = engine.requests[engine.submit(text, **WANTED)]
    while request.finish_reason is None:
        if request.num_drawn:
            request.drafts = wanted.token_ids[request.num_drawn :][:2]
        engine.step()
    assert engine.completion(request.request_id).token_ids == wanted.token_ids
    assert engine.metrics.accepted_tokens > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_request_checks_and_keeps_the_same_drafts(kind, monkeypatch):
    """Counted by depth. Calls go on over the ends of blocks; the last steps, which could pass the
    end of the request, are single ones.
    """
    text, counts = prompt(np.random.default_rng(1), 6), []
    engine = make_engine(kind, overlap=False)
    made = calls_of(engine, monkeypatch)
    for asked in ({}, ALONE):
        before, num_calls = _counts(engine), len(made)
        wanted = WANTED | {"max_new_tokens": 160} | asked
        run_to_end(engine, engine.submit(text, salt=str(asked), **wanted))
        counts.append(_counts(engine) - before)
        assert sum(made[num_calls:]) == counts[-1]["steps"]
    assert counts[0] == counts[1]
    assert made[0] == 1  # the prompt
    assert made[1:num_calls] == sorted(made[1:num_calls], reverse=True)
    assert 3 in made
    assert set(made[num_calls - 1 :]) == {1}
    assert engine.metrics.accepted_tokens > 0 or kind == "mtp"


@pytest.mark.slow
def test_who_makes_fewer_steps_than_a_call_has_keeps_the_drafts_of_its_last_one(monkeypatch):
    """One that is near its end, beside one that is not; both have the drafts of single steps."""
    engine, single, of_request = make_engine("mtp", overlap=False), other_engine("mtp"), []
    step = engine.loop.runner.devices.launch

    def note(step_input, snapshots, checked, following, num_steps, *more, **options):
        of_request.append(None if num_steps is None else num_steps.tolist())
        return step(step_input, snapshots, checked, following, num_steps, *more, **options)

    monkeypatch.setattr(engine.loop.runner.devices, "launch", note)
    text, other = prompt(np.random.default_rng(2), 5), prompt(np.random.default_rng(3), 5)

    def drafts_of(engine, **asked):
        """By the number of tokens drawn, what would be checked next."""
        new = [engine.submit(text, **WANTED | asked | {"max_new_tokens": 12})]
        new.append(engine.submit(other, **WANTED | asked))
        request, found = engine.requests[new[0]], {}
        while request.finish_reason is None:
            engine.step()
            found[request.num_drawn] = list(request.drafts)
        run_to_end(engine, *new)
        return found

    found, wanted = drafts_of(engine), drafts_of(single, **ALONE)
    assert any(len(set(steps) - {0}) == 2 for steps in of_request if steps)
    assert len(found) > 4
    assert all(wanted[count] == drafts for count, drafts in found.items() if count < 12)


@pytest.mark.slow
def test_blocks_that_are_filled_within_a_call_can_be_resumed():
    """Snapshots are taken by the step that crosses a boundary, as those of single steps."""
    text, hits = prompt(np.random.default_rng(2), 30), []
    for engine in (make_engine(), make_engine(steps_per_call=1)):
        [found] = run_to_end(engine, engine.submit(text, **WANTED | {"max_new_tokens": 400}))
        for length in (130, 300, 420):
            known = [*text, *found.token_ids][:length]
            before = engine.metrics.hit_tokens
            run_to_end(engine, engine.submit([*known, 1], **WANTED | {"max_new_tokens": 4}))
            hits.append(engine.metrics.hit_tokens - before)
    assert hits == [128, 256, 384] * 2


@pytest.mark.slow
@pytest.mark.parametrize("places", [4, 64])
def test_calls_that_may_reach_several_blocks_leave_prompts_their_snapshots(places, monkeypatch):
    """Calls of 16 rounds of six tokens beside one in flight; answers take places of their own."""
    engine = make_engine(
        "mtp",
        16,
        draft_tokens=5,
        max_requests=1,
        max_context_tokens=1024,
        num_snapshots=places,
        num_blocks=20,
    )
    made, rng = calls_of(engine, monkeypatch), np.random.default_rng(6)
    texts = [prompt(rng, 140) for _ in range(3)]
    for text in texts:
        run_to_end(engine, engine.submit(text, max_new_tokens=2, stop_token_ids=()))
    answer = engine.submit(prompt(rng, 5), max_new_tokens=700, stop_token_ids=())
    (found,) = run_to_end(engine, answer)
    assert made.count(16) > 20
    assert len(found.token_ids) == 700
    before = engine.metrics.hit_tokens
    for text in texts:
        run_to_end(engine, engine.submit(text, max_new_tokens=2, stop_token_ids=()))
    assert engine.metrics.hit_tokens - before == 3 * 128


@pytest.mark.slow
def test_a_stop_token_within_a_call_ends_a_request():
    """What the call drew after it is neither given nor counted."""
    single, text = other_engine(), prompt(np.random.default_rng(3), 9)
    settings = WANTED | {"temperature": 0.6, "seed": 5}
    [whole] = run_to_end(single, single.submit(text, **settings, **ALONE))
    engine = make_engine(debug=True)
    for place in (1, 3, 4, 9, 18):
        stop = whole.token_ids[place]
        length = whole.token_ids.index(stop) + 1
        before = engine.metrics.generated_tokens
        [found] = run_to_end(engine, engine.submit(text, **settings | {"stop_token_ids": (stop,)}))
        assert found.token_ids == whole.token_ids[:length]
        assert found.finish_reason == "stop"
        assert engine.metrics.generated_tokens - before == length
        assert engine.metrics.used_blocks == 0


@pytest.mark.parametrize(
    ("drafts", "most", "steps"),
    [
        ([5, 5], [3, 3], [3, 3]),
        ([5, 0], [3, 9], [3, 3]),
        ([5, 5], [2, 2], None),  # no request takes part in all
        ([5, 5, 5, 5], [3, 1, 1, 1], [3, 1, 1, 1]),
    ],
)
def test_plans_of_several_steps_have_the_drafts_of_each(drafts, most, steps):
    slots = np.arange(len(most), dtype=np.int32)
    drafts, most = np.array(drafts, np.int32), np.array(most, np.int32)
    plan = plan_decoding(
        slots, drafts, np.zeros_like(slots), most_steps=most, steps_per_call=3,
        sizes=StepSizes(prompts=(24,), decoding=(24,), is_plain=False),
    )  # fmt: skip
    assert not plan.is_plain
    assert plan.num_steps == (1 if steps is None else 3)
    assert plan.rows.num_steps.tolist() == (steps or [1] * len(most))
    assert plan.rows.num_drafts.tolist() == drafts.tolist()
    np.testing.assert_array_equal(plan.rows.spread, drafts * plan.rows.num_steps)


@pytest.mark.slow
def test_nothing_compiles_after_warmup():
    engine = make_engine()
    names = [name for name, _ in engine.warmup()]
    assert "3 steps of 24 tokens" in names
    before = engine.metrics.compiles
    rng = np.random.default_rng(6)
    run_to_end(engine, *[engine.submit(prompt(rng, n), **WANTED) for n in (3, 140, 20)])
    assert engine.metrics.compiles == before


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "scarce"), [(0, False), (1, True)])
def test_whatever_happens_a_request_gets_what_it_gets_alone(seed, scarce):
    """Arrivals, forks, preemptions, cancellations and hits at random, in calls of three steps."""
    engine = limit(make_engine(), num_blocks=8) if scarce else make_engine(debug=True)
    life = Life(engine, seed, plain=without_sharing())
    for _ in range(120):
        life.event()
    life.finish()
    assert min((life.counts | {"look": 1}).values()) >= 1, life.counts
