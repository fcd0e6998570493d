"""`draft_cut`: which drafts are checked follows from their confidences, and changes no answer."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import taught
from helpers.serving import prompt, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.compiles_for_others]

BLOCK = taught.SMALL.dspark.block_size
WANTED = {"max_new_tokens": 30, "stop_token_ids": ()}
SURE = 9.0
"""Logit of a chance that hardly falls over a block: 0.9999 each."""


def model_sure_after(is_sure):
    """The taught model, sure of a draft where it is of the token before it.

    One column of the Markov table says so, which corrects no logits.

    Args:
      is_sure: bool[V], the tokens after which a draft is likely.
    """
    made = taught.params(taught.SMALL)
    draft = made.mtp
    mark = jnp.where(jnp.asarray(is_sure), SURE, -SURE).astype(jnp.float32)
    confidence = np.zeros(draft.confidence.shape, np.float32)
    confidence[taught.SMALL.hidden_size] = 1
    draft = dataclasses.replace(
        draft,
        markov_w1=draft.markov_w1.at[:, 0].set(mark),
        markov_w2=draft.markov_w2.at[:, 0].set(0),
        confidence=jnp.asarray(confidence),
    )
    return dataclasses.replace(made, mtp=draft)


def set_least(engine, monkeypatch, *least):
    """What each slot's drafts have to be worth."""
    devices, value = engine.loop.runner.devices, np.array(least, np.float32)
    launch = devices.launch

    def launch_with(*arguments, is_plain, **options):
        *first, _, upper = arguments
        given = None if is_plain else value
        return launch(*first, given, upper, is_plain=is_plain, **options)

    monkeypatch.setattr(devices, "launch", launch_with)


def record(engine, monkeypatch):
    """i32[slots] of each step that is read: drafts that were checked."""
    devices, found = engine.loop.runner.devices, []
    read = devices.read

    def note(back):
        output = read(back)
        found.append(np.array(output.num_drafts)[:, 0])
        return output

    monkeypatch.setattr(devices, "read", note)
    return found


def submit_all(engine, **asked):
    rng = np.random.default_rng(4)
    return [
        engine.submit(prompt(rng, length), seed=length, temperature=temperature, **(WANTED | asked))
        for length, temperature in ((30, 0.0), (5, 0.3), (77, 0.0), (120, 0.8))
    ]


def cut_engine(model=None, **changes):
    return taught.make_small(model=model, draft_cut=True, **changes)


@pytest.fixture(scope="module")
def without():
    engine = cut_engine()
    return run_to_end(engine, *submit_all(engine, speculate=False))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_cut_changes_no_answer(without, overlap):
    """With the table of the engine, random confidences, and stops of others on the way."""
    engine = cut_engine(overlap=overlap, debug=not overlap)
    assert engine.plan.least_survival is not None
    assert run_to_end(engine, *submit_all(engine, salt="cut")) == without
    assert engine.metrics.drafted_tokens > 0
    assert not engine.verify().problems


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_are_checked_as_far_as_they_are_likely(without, monkeypatch, overlap):
    """Where each is as likely as not, so many are checked as the least survival of the row says.

    Those left out are not counted.
    """
    model = model_sure_after(np.ones(taught.SMALL.vocab_size))
    even = dataclasses.replace(model.mtp, confidence=0 * model.mtp.confidence)
    engine = cut_engine(dataclasses.replace(model, mtp=even), overlap=overlap)
    set_least(engine, monkeypatch, 0.6, 0.5, 0.2, 0.0)  # 0.5 ** n is the chance of n
    found = record(engine, monkeypatch)
    ids = submit_all(engine)
    while engine.num_unfinished == len(ids):
        engine.step()
    checked = np.stack(found)
    assert checked.max(axis=0).tolist() == [0, 1, 2, BLOCK]
    done = run_to_end(engine, *ids)
    counted = engine.metrics.drafted_at
    assert engine.metrics.drafted_tokens <= np.sum(found)
    assert counted["1"] > counted["2"] > counted["3"] > 0
    assert [one.token_ids for one in done] == [one.token_ids for one in without]


def test_a_draft_left_out_is_never_counted(without, monkeypatch):
    model = model_sure_after(np.zeros(taught.SMALL.vocab_size))
    engine = cut_engine(model)
    set_least(engine, monkeypatch, *[0.5] * 4)
    found = record(engine, monkeypatch)
    done = run_to_end(engine, *submit_all(engine))
    assert [one.token_ids for one in done] == [one.token_ids for one in without]
    assert not np.any(found)
    assert engine.metrics.drafted_tokens == engine.metrics.accepted_tokens == 0
    assert not any(engine.metrics.drafted_at.values())


def test_each_draft_has_the_confidence_of_the_token_before_it(monkeypatch):
    """Sure after half of the tokens: as many are checked as follow each other from the anchor on.

    The rows have different anchors and drafts at any time.
    """
    is_sure = np.random.default_rng(0).random(taught.SMALL.vocab_size) < 0.7
    engine = cut_engine(model_sure_after(is_sure), overlap=False)
    set_least(engine, monkeypatch, *[0.9] * 4)
    found = record(engine, monkeypatch)
    ids = submit_all(engine, max_new_tokens=60)
    seen = set()
    while not all(engine.requests[one].num_drawn for one in ids):
        engine.step()  # prompts leave drafts no room
    for _ in range(40):
        expected = {}
        for request in (engine.requests[one] for one in ids):
            if request.num_drawn and request.finish_reason is None and request.drafts:
                before = [int(request.known[-1]), *request.drafts[:-1]]
                likely = int(np.cumprod(is_sure[before]).sum())
                expected[request.slot] = min(likely, request.num_wanted - 1)
        num_read = len(found)
        engine.step()
        assert len(found) == num_read + 1
        for slot, count in expected.items():
            assert found[-1][slot] == count, (slot, found[-1])
            seen.add(count)
    assert seen == set(range(BLOCK + 1))


def test_drafts_that_the_host_gives_are_never_left_out(without, monkeypatch):
    """The device says of its own guesses how sure it is, not of these."""
    engine = cut_engine(model_sure_after(np.zeros(taught.SMALL.vocab_size)), overlap=False)
    set_least(engine, monkeypatch, *[0.5] * 4)
    ids = submit_all(engine)
    while engine.num_unfinished:
        for request_id, plain in zip(ids, without, strict=True):
            request = engine.requests[request_id]
            if request.num_drawn and request.finish_reason is None:
                right = plain.token_ids[request.num_drawn :][:BLOCK]
                # A chain that is the device's own would be cut.
                own = list(request.drafts)[: len(right)]
                request.drafts = right if right != own else []
        engine.step()
    done = [engine.completion(one) for one in ids]
    assert [one.token_ids for one in done] == [one.token_ids for one in without]
    assert engine.metrics.acceptance == 1
    assert engine.metrics.accepted_tokens > 60
