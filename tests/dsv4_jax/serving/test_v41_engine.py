"""An engine of a DeepSeek-V4.1 model draws what its steps draw, whatever happens to a request.

Storage that is freed is full of NaN, and every step is verified (`debug`).
"""

import functools
import types

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving.device.engram_rows import RowStager, stage_rows
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.schedule.scheduler import RowPlan, StepPlan, StepRows
from helpers.v41_cache import greedy, model

pytestmark = pytest.mark.unoptimised

WANTED = {"stop_token_ids": ()}


@functools.cache
def engine():
    return ds.Engine(
        *model(),
        max_requests=3,
        max_context_tokens=256,
        cache_format="f32",
        prefill_tokens=(16,),
        debug=True,
    )


def prompt(length, seed=0):
    config, _ = model()
    return np.random.default_rng(seed).integers(3, config.vocab_size, length).tolist()


def answer(request_id):
    while engine().requests[request_id].finish_reason is None:
        engine().step()
    return engine().completion(request_id).token_ids


@pytest.mark.slow
def test_prompts_of_any_length_are_answered_beside_each_other():
    prompts = [prompt(41, 1), prompt(1, 2), prompt(18, 3), prompt(33, 4)]  # one has to wait
    found = engine().generate(prompts, max_new_tokens=6, **WANTED)
    for tokens, completion in zip(prompts, found, strict=True):
        assert completion.token_ids == greedy(tokens, 6)
    assert not engine().verify().problems


@pytest.mark.slow
@pytest.mark.parametrize("tail", [1, 6, 13])
def test_a_prefix_hit_goes_on_as_the_prompt_did(tail):
    """With the n-grams of tokens that it did not read, and pairs that begin at the boundary."""
    head = prompt(128, 5)
    engine().generate([head + prompt(9, 6)], max_new_tokens=2, **WANTED)
    before, tokens = engine().metrics.hit_tokens, head + prompt(tail, 7 + tail)
    (completion,) = engine().generate([tokens], max_new_tokens=5, **WANTED)
    assert engine().metrics.hit_tokens - before == 128
    assert completion.token_ids == greedy(tokens, 5)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_fork_and_who_was_preempted_go_on(steps):
    """At odd and even lengths: a token waits for its second, or none does."""
    tokens = prompt(12, 20)
    first = engine().submit(tokens, max_new_tokens=9, **WANTED)
    for _ in range(steps):
        engine().step()
    second = engine().fork(first, seed=0)
    engine().preempt(first)
    wanted = greedy(tokens, 9)
    assert answer(second) == answer(first) == wanted


def test_rows_that_the_host_stages_are_those_that_a_step_looks_up():
    """Of rows at any place of a request, and of the first tokens, which look back to nothing."""
    _, params = model()
    tables = params.engram
    requests = [prompt(20, 30), prompt(9, 31), prompt(7, 32)]
    lengths, counts = np.array([11, 0, 2]), np.array([4, 9, 1])
    starts, token_ids = np.array([0, 5, 14]), np.zeros(16, np.int32)
    for ids, length, start, count in zip(requests, lengths, starts, counts, strict=True):
        token_ids[start : start + count] = ids[length : length + count]
    rows = stage_rows(tables, token_ids, requests, lengths, starts, counts)
    assert rows.values.shape == tables.shapes(16).values.shape
    for ids, length, start, count in zip(requests, lengths, starts, counts, strict=True):
        wanted = tables.rows(np.array(ids))[length : length + count]
        for table in range(2):
            found = np.asarray(rows.of_table(table))[start : start + count]
            np.testing.assert_array_equal(found, wanted[:, table])
    assert not rows.values[[4, 15]].any()


def test_what_is_read_of_tables_is_counted(monkeypatch):
    """Rows of a step's tokens, and pages for which the gathering thread waited; not idle steps."""
    config, params = model()
    faults = iter((3, 10, 20, 20))
    monkeypatch.setattr("dsv4_jax.serving.device.engram_rows._major_faults", lambda: next(faults))
    metrics = Metrics()
    stager = RowStager(params.engram, metrics)
    ids = np.array(prompt(20, 33), np.int32)
    running = {1: types.SimpleNamespace(token_ids=ids)}
    plan = StepPlan(StepRows.of([RowPlan(1, 5, 2, True)]), 16, False)
    step_input = ds.StepInput(
        token_ids=np.pad(ids[:7], (0, 9)), request_ids=np.full(16, -1), request_slots=np.arange(3)
    )
    place = {"lengths": np.zeros(3, int), "starts": np.zeros(1, int)}
    staged = stager.stage(step_input, plan, running, **place, is_fed=np.array([False]))
    np.testing.assert_array_equal(
        staged.engram.values[:7], params.engram.take(back_of(ids[:7])).values
    )
    assert metrics.engram_rows == 7 * config.engram.num_columns * 2
    assert (metrics.engram_waits, sum(metrics.engram_s.counts)) == (7, 1)
    idle = StepPlan.idle(16)
    nobody = {"lengths": np.zeros(3, int), "starts": np.zeros(0, int)}
    empty = stager.stage(step_input, idle, {}, **nobody, is_fed=np.zeros(0, bool))
    assert not empty.engram.values.any()
    assert (metrics.engram_waits, sum(metrics.engram_s.counts)) == (7, 1)
    assert stager.stage(step_input, plan, running, **place, is_fed=np.array([True])) is step_input


def back_of(ids):
    """Each id and those before it, the nearest first; -1 is none."""
    padded = np.concatenate([np.full(3, -1), ids])
    return np.stack([padded[3 - back : len(padded) - back] for back in range(4)], axis=1)


@pytest.mark.slow
def test_several_steps_a_call_look_their_rows_up_themselves():
    several = ds.Engine(
        *model(),
        max_requests=2,
        max_context_tokens=128,
        cache_format="f32",
        prefill_tokens=(16,),
        steps_per_call=4,
    )
    tokens = prompt(19, 40)
    (found,) = several.generate([tokens], max_new_tokens=9, **WANTED)
    assert found.token_ids == greedy(tokens, 9)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
def test_drafts_change_no_answer(cut):
    """Of random weights hardly any is kept, so that nearly every step takes tokens back."""
    drafting = ds.Engine(
        *model(),
        max_requests=2,
        max_context_tokens=256,
        cache_format="f32",
        prefill_tokens=(16,),
        draft_tokens=3,
        draft_cut=cut,
        debug=True,
    )
    prompts = [prompt(21, 50), prompt(128, 51)]
    found = drafting.generate(prompts, max_new_tokens=9, **WANTED)
    for tokens, completion in zip(prompts, found, strict=True):
        assert completion.token_ids == greedy(tokens, 9)
    assert drafting.metrics.drafted_tokens or cut
