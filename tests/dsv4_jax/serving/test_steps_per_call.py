"""A call that makes several decode steps gives what as many calls of one step give.

Engines have the step that only decodes, beside that of prompts, and a cache in f32.
"""

import functools

import jax
import numpy as np
import pytest

from dsv4_jax.serving.device import engine_arrays
from dsv4_jax.serving.schedule.scheduler import plan_decoding
from dsv4_jax.serving.step_sizes import StepSizes
from helpers import slow
from helpers.engine_life import Life
from helpers.serving import engine_of_calls, limit, prompt, run_to_end, same_tokens, single_steps

pytestmark = pytest.mark.unoptimised

LONG = {"max_new_tokens": 61, "stop_token_ids": ()}


@functools.cache
def one_step_engine():
    return single_steps(overlap=False)


@functools.cache
def without_sharing():
    return limit(single_steps(overlap=False), num_snapshots=0)


def calls_of(engine, monkeypatch):
    """Steps of each call that only decodes, as they come."""
    made, step = [], engine.loop.runner.devices.launch

    def note(step_input, snapshots, checked, following, num_steps, *more, **options):
        if options["is_plain"]:
            made.append(1 if num_steps is None else int(num_steps.max()))
        return step(step_input, snapshots, checked, following, num_steps, *more, **options)

    monkeypatch.setattr(engine.loop.runner.devices, "launch", note)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("overlap", slow.all_but([True], [False, True]))
def test_tokens_are_those_of_single_steps(overlap, monkeypatch):
    """Requests of several lengths, greedy and sampled, that come and end at different times."""
    engine, rng = engine_of_calls(overlap=overlap, debug=not overlap), np.random.default_rng(0)
    made = calls_of(engine, monkeypatch)
    texts = [prompt(rng, int(length)) for length in (3, 150, 40, 127, 5, 61)]
    settings = [
        LONG | {"seed": seed, "temperature": seed % 2, "max_new_tokens": 61 - seed}
        for seed in range(6)
    ]
    ids = [engine.submit(text, **one) for text, one in zip(texts, settings, strict=True)]
    for text, one, found in zip(texts, settings, run_to_end(engine, *ids), strict=True):
        plain = one_step_engine()
        same_tokens(found, run_to_end(plain, plain.submit(text, **one))[0])
    assert sum(made) < 2 * sum(one for one in made if one == 4)
    assert not engine.verify().problems


@pytest.mark.slow
def test_an_engine_of_single_steps_gives_the_same_tokens():
    """Its programs are others, which hold what one step draws alone."""
    text = prompt(np.random.default_rng(9), 140)
    for settings in (LONG, LONG | {"seed": 1, "temperature": 1.0}):
        held, own = one_step_engine(), engine_of_calls(1, overlap=False)
        one, other = (run_to_end(e, e.submit(text, **settings))[0] for e in (held, own))
        same_tokens(one, other)


@pytest.mark.slow
def test_a_lone_request_takes_whole_calls_once_it_stands_at_a_block(monkeypatch):
    """Its first block ends 125 tokens after its prompt; then calls of four fill the others."""
    engine = engine_of_calls(overlap=False)
    made = calls_of(engine, monkeypatch)
    text = prompt(np.random.default_rng(1), 3)
    [found] = run_to_end(engine, engine.submit(text, **LONG | {"max_new_tokens": 300}))
    assert len(found.token_ids) == 300
    before, after = made[:32], made[32:]
    assert before == [4] * 31 + [1]  # 1 + 124 + ... up to 128
    assert after[:32] == [4] * 32
    assert sum(made) == 299  # the prompt's step drew the first
    assert engine.metrics.steps == 300
    assert engine.metrics.step_calls == 1 + len(made)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", slow.all_but([True], [False, True]))
def test_without_snapshots_a_call_goes_on_into_the_next_block(overlap, monkeypatch):
    engine = limit(engine_of_calls(overlap=overlap), num_snapshots=0)
    made = calls_of(engine, monkeypatch)
    text = prompt(np.random.default_rng(8), 2)  # a call begins at 126 tokens and ends at 130
    [found] = run_to_end(engine, engine.submit(text, **LONG | {"max_new_tokens": 301}))
    assert made[:75] == [4] * 75
    plain = without_sharing()
    same_tokens(found, run_to_end(plain, plain.submit(text, **LONG | {"max_new_tokens": 301}))[0])


@pytest.mark.slow
@pytest.mark.parametrize("overlap", slow.all_but([True], [False, True]))
def test_every_block_that_is_filled_can_be_resumed(overlap):
    """Snapshots are those of single steps."""
    text, hits = prompt(np.random.default_rng(2), 30), []
    for engine in (engine_of_calls(overlap=overlap), single_steps(overlap=overlap)):
        [found] = run_to_end(engine, engine.submit(text, **LONG | {"max_new_tokens": 400}))
        for length in (130, 300, 420):
            known = [*text, *found.token_ids][:length]
            before = engine.metrics.hit_tokens
            run_to_end(engine, engine.submit([*known, 1], **LONG | {"max_new_tokens": 4}))
            hits.append(engine.metrics.hit_tokens - before)
    assert hits == [128, 256, 384] * 2


@pytest.mark.slow
def test_a_stop_token_in_the_middle_of_a_call_ends_a_request(monkeypatch):
    """What the call drew after it is neither given nor counted."""
    plain, text = one_step_engine(), prompt(np.random.default_rng(3), 9)
    settings = LONG | {"temperature": 1.0, "seed": 5}
    [whole] = run_to_end(plain, plain.submit(text, **settings))
    for place in (1, 2, 3, 4, 18):
        stop = whole.token_ids[place]
        length = whole.token_ids.index(stop) + 1
        engine = stops_engine()
        before = engine.metrics.generated_tokens
        [found] = run_to_end(engine, engine.submit(text, **settings | {"stop_token_ids": (stop,)}))
        assert found.token_ids == whole.token_ids[:length]
        assert found.finish_reason == "stop"
        assert engine.metrics.generated_tokens - before == length
        assert engine.metrics.used_blocks == 0


@functools.cache
def stops_engine():
    return engine_of_calls(debug=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{"logprobs": 2}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5}]
)
def test_what_needs_the_host_between_two_tokens_takes_single_steps(asked, monkeypatch):
    engine = stops_engine()
    made = calls_of(engine, monkeypatch)
    text = prompt(np.random.default_rng(4), 5)
    asking = engine.submit(text, **LONG | asked | {"max_new_tokens": 9})
    run_to_end(engine, asking, engine.submit(text, **LONG | {"max_new_tokens": 9}))
    assert set(made) == {1}
    run_to_end(engine, engine.submit(text, **LONG))
    assert 4 in made


@pytest.mark.slow
def test_on_a_gpu_calls_of_several_steps_have_simple_draws(monkeypatch):
    """XLA's conditionals wait for the host in every step."""
    engine = stops_engine()
    monkeypatch.setattr(engine.loop.runner, "simplifies", True)
    text = prompt(np.random.default_rng(5), 5)
    for asked, steps in (({"top_p": 0.9, "temperature": 1.0}, {1}), ({"min_p": 0.1}, {1, 4})):
        made = calls_of(engine, monkeypatch)
        run_to_end(engine, engine.submit(text, **LONG | asked | {"max_new_tokens": 12}))
        assert set(made) == steps


@pytest.mark.parametrize(
    ("most", "steps"),
    [
        ([9, 4], [4, 4]),
        ([4, 1, 3], [4, 1, 3]),
        ([4, 1, 1], [4, 1, 1]),
        ([4, 1, 1, 1], None),  # more than half of the call would be idle
        ([3, 3], None),
        ([1], None),
    ],
)
def test_a_call_of_several_steps_is_worth_it(most, steps):
    slots = np.arange(len(most), dtype=np.int32)
    none, most = np.zeros_like(slots), np.array(most, np.int32)
    sizes = {"sizes": StepSizes(prompts=(8,), decoding=(4,), is_plain=True)}
    plan = plan_decoding(slots, none, none, most_steps=most, steps_per_call=4, **sizes)
    assert plan.is_plain
    assert plan.num_steps == (1 if steps is None else 4)
    assert plan.rows.num_steps.tolist() == (steps or [1] * len(most))
    alone = plan_decoding(slots, none, none, most_steps=most, steps_per_call=1, **sizes)
    assert alone.num_steps == 1


@pytest.mark.slow
def test_nothing_compiles_after_warmup():
    engine = engine_of_calls()
    names = [name for name, _ in engine.warmup()]
    assert "4 decode steps of 4 tokens" in names
    before = engine.metrics.compiles
    rng = np.random.default_rng(6)
    run_to_end(engine, *[engine.submit(prompt(rng, n), **LONG) for n in (3, 140, 20)])
    assert engine.metrics.compiles == before


@pytest.mark.slow
def test_inputs_that_stay_are_not_brought_again_and_none_moves(monkeypatch):
    """A CUDA graph is written anew where an array has moved."""
    engine, calls = engine_of_calls(), []
    arrays = engine.loop.runner.devices
    launcher = arrays.launcher

    def note(program, *arguments, **static):
        result = launcher(program, *arguments, **static)
        if program is engine_arrays.jit_plain_decode_steps:
            leaves = jax.tree.leaves((arguments[-2], result))
            calls.append((tuple(map(id, jax.tree.leaves(arguments[-2]))), [
                leaf.unsafe_buffer_pointer() for leaf in leaves
            ]))  # fmt: skip
        return result

    monkeypatch.setattr(arrays, "launcher", note)
    run_to_end(engine, engine.submit(prompt(np.random.default_rng(7), 5), **LONG))
    whole = calls[2:12]
    assert len({inputs for inputs, _ in whole}) == 1
    assert all(places == whole[0][1] for _, places in whole)


class CloseLife(Life):
    """Of an engine whose programs round otherwise, so that tokens alone are equal."""

    def check_rows(self, rows, wanted):
        assert rows.keys() == wanted.keys()
        for name, row in wanted.items():
            np.testing.assert_allclose(rows[name], row, rtol=1e-4, atol=1e-5, err_msg=name)

    def check_logprobs(self, logprobs, wanted):
        for one, other in zip(logprobs, wanted, strict=True):
            np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "scarce"), slow.all_but([(1, True)], [(0, False), (1, True)]))
def test_whatever_happens_a_request_gets_what_it_gets_alone(seed, scarce):
    """Arrivals, forks, preemptions, cancellations and hits at random, in calls of four steps."""
    engine = limit(engine_of_calls(), num_blocks=4) if scarce else engine_of_calls(debug=True)
    life = CloseLife(engine, seed, plain=without_sharing())
    for _ in range(120):
        life.event()
    life.finish()
    assert min((life.counts | {"look": 1}).values()) >= 1, life.counts
    if scarce:
        assert engine.metrics.evicted_blocks > 0


@pytest.mark.parametrize("drafts", [0, 2])
def test_it_needs_steps_that_only_decode(drafts):
    with pytest.raises(ValueError, match=r"steps_per_call=4 needs .* decode_tokens=24; leave one"):
        engine_of_calls(decode_tokens=24, draft_tokens=drafts)


@pytest.mark.parametrize("steps", [0, -1, 65, 2.0, True, "4"])
def test_steps_per_call_is_checked(steps):
    with pytest.raises(ValueError, match="steps_per_call must be"):
        engine_of_calls(steps)
