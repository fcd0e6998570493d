"""An engine whose upper layers rest for most of a prompt draws what one draws where all run.

Storage that is freed is full of NaN, and every step is verified (`debug`).
"""

import functools

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from helpers.v41_cache import model

pytestmark = [pytest.mark.unoptimised, pytest.mark.slow]

WANTED = {"stop_token_ids": (), "max_new_tokens": 6}
SIZES = {
    "max_requests": 3,
    "max_context_tokens": 1024,
    "cache_format": "f32",
    "prefill_tokens": (16, 64),
    "debug": True,
}


def make(**options):
    return ds.Engine(*model(), **SIZES | options)


@functools.cache
def engine():
    return make()


@functools.cache
def everywhere():
    """All its layers run all tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4_jax.serving.sizing._upper_sizes", lambda sizes, decoding: {})
        return make()


def prompt(length, seed=0):
    config, _ = model()
    return np.random.default_rng(seed).integers(3, config.vocab_size, length).tolist()


def finish(engine, request_id):
    while engine.requests[request_id].finish_reason is None:
        engine.step()
    return engine.completion(request_id).token_ids


def both(*prompts):
    """Answers of the two engines, to prompts that are served at once; they are equal."""
    found = [
        [completion.token_ids for completion in one.generate(list(prompts), **WANTED)]
        for one in (engine(), everywhere())
    ]
    assert found[0] == found[1]
    return found[0]


def rings(engine, slot):
    return [
        np.asarray(leaf)[:, slot].tobytes()
        for pool in engine.cache.state.values()
        for leaf in pool.window.values()
    ]


def test_answers_and_rings_are_those_of_all_layers():
    found, tokens = [], prompt(500, 1)
    for one in (engine(), everywhere()):
        before = one.metrics.rested_tokens
        request = one.requests[one.submit(tokens, **WANTED)]
        while not request.num_drawn:
            one.step()
        rested = one.metrics.rested_tokens - before
        assert rested == (320 if one is engine() else 0)
        found.append((rings(one, request.slot), finish(one, request.request_id)))
    assert found[0] == found[1]


def test_prompts_beside_each_other_and_beside_who_decodes():
    both(prompt(400, 2), prompt(30, 3), prompt(333, 4), prompt(129, 5), prompt(270, 6))


def test_who_leaves_a_prefix_in_its_middle_resumes_where_enough_follows():
    """The first leaves snapshots that ask for more tokens, the second exact ones where it left."""
    text, hits = prompt(500, 10), []
    both([*text, *prompt(400, 11)])
    for seed, length in ((12, 3), (13, 3), (14, 30), (15, 200)):
        before = engine().metrics.hit_tokens
        both([*text, *prompt(length, seed)])
        hits.append(engine().metrics.hit_tokens - before)
    # 22 tokens have to follow up to the last boundary, which is 384 itself of 503 tokens.
    assert hits == [256, 384, 384, 384]


def test_an_answer_goes_on_from_the_last_boundary_of_its_prompt():
    text = prompt(390, 20)
    both(text)
    before = engine().metrics.hit_tokens
    both([*text, *prompt(5, 21)])
    assert engine().metrics.hit_tokens - before == 384


@pytest.mark.parametrize("steps", [1, 3, 6, 7])
def test_forks_and_who_was_preempted_in_their_prompt_go_on(steps):
    tokens = prompt(420, 30 + steps)
    wanted = [completion.token_ids for completion in everywhere().generate([tokens], **WANTED)]
    first = engine().submit(tokens, **WANTED)
    for _ in range(steps):
        engine().step()
    second = engine().fork(first, seed=0)
    engine().preempt(first)
    assert [finish(engine(), second)] == [finish(engine(), first)] == wanted


@pytest.mark.parametrize("steps", [2, 6])
def test_a_request_that_is_taken_elsewhere_in_its_prompt_goes_on(steps):
    """Also where all layers run there, and what it leaves behind is as good as its own."""
    text = prompt(430, 40 + steps)
    wanted = [completion.token_ids for completion in everywhere().generate([text], **WANTED)]
    first = engine().submit(text, **WANTED)
    for _ in range(steps):
        engine().step()
    taken = engine().snapshot(first)
    engine().cancel(first)
    for one in (engine(), everywhere()):
        assert [finish(one, one.restore(taken))] == wanted
    both([*text, *prompt(9, 50)])


def test_samples_of_one_prompt_part_before_its_last_token():
    found = []
    for one in (engine(), everywhere()):
        ids = one.submit_many(prompt(300, 60), 2, seed=5, temperature=1.0, **WANTED)
        found.append([finish(one, request_id) for request_id in ids])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_drafts_are_those_of_all_layers():
    """Rings of the draft too, which read what goes into the last layers."""
    drafting, drafted = make(draft_tokens=3), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4_jax.serving.sizing._upper_sizes", lambda sizes, decoding: {})
        every = make(draft_tokens=3)
    for one in (drafting, every):
        request = one.requests[one.submit(prompt(300, 70), **WANTED)]
        while not request.num_drawn:
            one.step()
        drafted.append((request.drafts, rings(one, request.slot), finish(one, request.request_id)))
    assert drafted[0] == drafted[1]
    assert drafting.metrics.rested_tokens
    assert not every.metrics.rested_tokens


def test_models_whose_layers_all_make_entries_have_no_further_programs():
    config = ds.DSV4Config.tiny()
    plan = ds.Engine(config, ds.init_params(config, jax.random.key(0)), prefill_tokens=(64,)).plan
    assert plan.upper is None
    assert make(decode_tokens=16).plan.upper.sizes == {}
    assert engine().plan.upper.sizes == {16: 8, 64: 8}
