"""Decode steps of several sizes: each has room for those who decode, and none for many more."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving import Grammar, sizing
from dsv4_jax.serving.device import engine_arrays
from helpers.serving import SIZES, byte_tokenizer, one_layer, prompt, run_to_end, same_tokens

LONG = {"max_new_tokens": 12, "stop_token_ids": ()}


def engine_of(*batch_sizes, **changes):
    """Of one layer and four slots, without drafts."""
    sizes = {"draft_tokens": 0, "decode_tokens": None, "cache_format": "f32"}
    options = SIZES | sizes | {"tokenizer": byte_tokenizer()} | changes
    model = one_layer(vocab_size=260, eos_token_ids=(256,))  # all of the tokenizer's
    return ds.Engine(*model, **options, decode_batch_sizes=batch_sizes or None)


@functools.cache
def of_three_sizes():
    return engine_of(1, 2)


@functools.cache
def of_one_size():
    return engine_of()


def sizes_of(engine, monkeypatch):
    """(size, requests) of each step that only decodes, as they come."""
    made, step = [], engine.loop.runner.devices.launch

    def note(step_input, *more, **options):
        if options["is_plain"]:
            made.append((len(step_input.token_ids), int((step_input.request_ids >= 0).sum())))
        return step(step_input, *more, **options)

    monkeypatch.setattr(engine.loop.runner.devices, "launch", note)
    return made


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_has_the_smallest_size_that_holds_who_decodes(overlap, monkeypatch):
    """Requests come and end at different times; what one size drew feeds the next."""
    engine, plain = of_three_sizes(), of_one_size()
    plan = dataclasses.replace(engine.plan, overlap=overlap)
    monkeypatch.setattr(engine.loop, "plan", plan)
    made, rng = sizes_of(engine, monkeypatch), np.random.default_rng(0)
    texts = [prompt(rng, length) for length in (5, 19, 3, 11)]
    settings = [LONG | {"max_new_tokens": 4 + 5 * n, "seed": n, "temperature": n % 2}
                for n in range(4)]  # fmt: skip
    answers = []
    for one in (engine, plain):
        ids = [one.submit(text, **each) for text, each in zip(texts, settings, strict=True)]
        answers.append(run_to_end(one, *ids))
    for found, expected in zip(*answers, strict=True):
        same_tokens(found, expected)
    assert {size for size, _ in made} == {1, 2, 4}
    for size, requests in made:
        assert size == min(fit for fit in (1, 2, 4) if fit >= requests)
    assert not engine.verify().problems


@pytest.mark.parametrize(
    "asked",
    [
        {"top_p": 0.6, "temperature": 1.0},
        {"top_k": 5, "temperature": 1.0},
        {"logit_bias": {7: 4.0, 9: -3.0}},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logprobs": 3},
        {"grammar": Grammar("regex", "[a-z]{30}"), "stop_token_ids": None},
    ],
    ids=["top_p", "top_k", "bias", "penalties", "logprobs", "grammar"],
)
def test_every_setting_draws_as_in_a_step_of_all(asked, monkeypatch):
    made = sizes_of(of_three_sizes(), monkeypatch)
    text = prompt(np.random.default_rng(1), 9)
    found, expected = (
        run_to_end(engine, engine.submit(text, **LONG | {"seed": 3} | asked))[0]
        for engine in (of_three_sizes(), of_one_size())
    )
    same_tokens(found, expected)
    assert {size for size, _ in made} == {1}
    if "logprobs" in asked:
        np.testing.assert_allclose(
            [one.logprob for one in found.logprobs],
            [one.logprob for one in expected.logprobs],
            atol=1e-4,
        )


def test_steps_of_all_sizes_share_the_program_of_draws(monkeypatch):
    engine, draw, given = of_three_sizes(), engine_arrays.jit_plain_draw, set()

    def note(*arguments, **static):
        leaves, structure = jax.tree.flatten(arguments)
        given.add((structure, *[(leaf.shape, leaf.dtype) for leaf in leaves]))
        return draw(*arguments, **static)

    monkeypatch.setattr(engine_arrays, "jit_plain_draw", note)
    made, rng = sizes_of(engine, monkeypatch), np.random.default_rng(4)
    ids = [engine.submit(prompt(rng, 7), **LONG | {"max_new_tokens": 4 + 4 * n}) for n in range(4)]
    run_to_end(engine, *ids)
    assert {size for size, _ in made} == {1, 2, 4}
    assert len(given) == 1


def test_a_gpu_takes_sizes_that_nobody_gave_once_they_are_compiled(monkeypatch):
    """A step would else compile one in the middle of an answer."""
    monkeypatch.setattr(sizing, "is_on_gpu", lambda mesh: True)
    engine = engine_of()
    monkeypatch.setattr(engine.loop.runner, "warmup", list)
    assert engine.loop.pace.sizes.decoding == (4,)
    engine.warmup()
    assert engine.loop.pace.sizes.decoding == (1, 4)


@pytest.mark.slow
def test_warmup_compiles_every_size():
    engine = engine_of(1, 2)
    names = [name for name, _ in engine.warmup()]
    assert {f"decode step of {size} tokens" for size in (1, 2, 4)} <= set(names)
    before, rng = engine.metrics.compiles, np.random.default_rng(2)
    run_to_end(engine, *[engine.submit(prompt(rng, n), **LONG) for n in (3, 140, 20)])
    assert engine.metrics.compiles == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"steps_per_call": 4},
        {"draft_tokens": 2, "prefill_tokens": (12,)},
        {"draft_tokens": 2, "prefill_tokens": (12,), "steps_per_call": 3},
        {"num_snapshots": 0, "debug": True},
    ],
    ids=["several steps", "drafts", "several rounds", "debug"],
)
def test_every_kind_of_step_has_the_sizes(changes, monkeypatch):
    rng, answers = np.random.default_rng(3), []
    texts = [prompt(rng, length) for length in (140, 5, 30)]
    width = changes.get("draft_tokens", 0) + 1
    for batch_sizes in ((1, 2), ()):
        engine = engine_of(*batch_sizes, **changes)
        seen, launch = set(), engine.loop.runner.devices.launch

        def note(step_input, *more, launch=launch, seen=seen, **options):
            seen.add(len(step_input.token_ids))
            return launch(step_input, *more, **options)

        monkeypatch.setattr(engine.loop.runner.devices, "launch", note)
        ids = [engine.submit(text, **LONG | {"max_new_tokens": 9 + 17 * n})
               for n, text in enumerate(texts)]  # fmt: skip
        answers.append(run_to_end(engine, *ids))
        if batch_sizes:
            assert {width, 2 * width, 4 * width} <= seen
    for found, expected in zip(*answers, strict=True):
        same_tokens(found, expected)
