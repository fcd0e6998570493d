"""Engine: prompts of different lengths in one batch, waiting, stopping, and bad input."""

import dataclasses

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from helpers import targets

pytestmark = pytest.mark.unoptimised


@pytest.fixture(scope="module")
def model():
    """Of one layer: the engine here has one program, which `test_boundary.py` takes too."""
    return targets.CONFIG, targets.params()


@pytest.fixture(scope="module")
def engine():
    return targets.make_engine(max_context_tokens=200, tokenizer=None)


PROMPTS = [[1, 2, 3], list(range(90)), [50], [7] * 33, [9, 8, 7, 6, 5]]


def test_each_prompt_gets_what_it_gets_alone(engine):
    """More prompts than slots, chunked prefill, rows that come and go."""
    together = engine.generate(PROMPTS, max_new_tokens=20, stop_token_ids=())
    for prompt, completion in zip(PROMPTS, together, strict=True):
        (alone,) = engine.generate([prompt], max_new_tokens=20, stop_token_ids=())
        assert completion == alone
        assert len(completion.token_ids) == 20
        assert completion.finish_reason == "length"
        assert completion.text is None


def test_greedy_tokens_are_those_of_the_whole_history(model, engine):
    config, params = model
    prompts = PROMPTS[:2][::-1]
    completions = engine.generate(prompts, max_new_tokens=10, stop_token_ids=())
    histories = [prompt + done.token_ids for prompt, done in zip(prompts, completions, strict=True)]
    rows = jax.numpy.asarray([ids + [0] * (100 - len(ids)) for ids in histories])
    logits = jax.jit(ds.forward, static_argnames="config")(params, rows, config=config)
    for prompt, done, row in zip(prompts, completions, logits, strict=True):
        expected = np.argmax(row[len(prompt) - 1 :][:10], axis=-1)
        np.testing.assert_array_equal(done.token_ids, expected)


def test_sampling_depends_on_the_seed_and_on_nothing_else(engine):
    settings = {"max_new_tokens": 12, "temperature": 1.0, "stop_token_ids": ()}
    a, b, c = engine.generate([[1, 2], [1, 2], [1, 2]], seed=[3, 4, 3], **settings)
    assert a == c
    assert a != b
    assert engine.generate([[9], [1, 2]], seed=[8, 3], **settings)[1] == a


def test_a_sampling_value_is_what_its_fields_are(engine):
    """One value for all prompts or one for each; keywords replace its fields."""
    warm = ds.SamplingParams(max_new_tokens=9, temperature=1.0, seed=5, stop_token_ids=())
    prompts = [[1, 2], [3]]
    fields = {"max_new_tokens": 9, "temperature": 1.0, "seed": [5, 6], "stop_token_ids": ()}
    expected = engine.generate(prompts, **fields)
    assert engine.generate(prompts, sampling=warm, seed=[5, 6]) == expected
    each = [warm, dataclasses.replace(warm, seed=6)]
    assert engine.generate(prompts, sampling=each) == expected
    request = engine.submit(prompts[1], sampling=warm, seed=6)
    drawn = [token.token_id for token in engine.stream(request)]
    assert drawn == engine.completion(request).token_ids == expected[1].token_ids


def test_a_stop_token_ends_its_prompt_and_is_returned(engine):
    (free,) = engine.generate([[1, 2, 3]], max_new_tokens=20, stop_token_ids=())
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    (halted,) = engine.generate([[1, 2, 3]], max_new_tokens=20, stop_token_ids=(stop,))
    assert halted.token_ids == free.token_ids[: first + 1]
    assert halted.finish_reason == "stop"


def test_a_stream_that_is_dropped_gives_its_slots_back(engine):
    ids = [engine.submit(p, max_new_tokens=20, stop_token_ids=()) for p in PROMPTS[:3]]
    stream = engine.stream(*ids)
    next(stream)
    stream.close()
    assert engine.generate([[1]], max_new_tokens=2)[0].finish_reason in ("length", "stop")
    assert engine.loop.shards.managers[0].num_free_slots == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], []]}, r"prompts\[1\] is empty"),
        ({"prompts": [[1, 96]]}, r"prompts\[0\] holds token id 96, outside 0\.\.95"),
        ({"prompts": [[-1]]}, r"prompts\[0\] holds token id -1"),
        ({"prompts": ["text"]}, "no tokenizer"),
        ({"prompts": [[1] * 195]}, r"195 tokens, and with max_new_tokens=6 that is 201"),
        ({"prompts": [[1.5]]}, "list of token ids"),
        ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"prompts": [[1]], "temperature": -1.0}, "temperature"),
        ({"prompts": [[1]], "top_p": 0.0}, "top_p"),
        ({"prompts": [[1]], "top_k": -1}, "top_k"),
        ({"prompts": [[1], [2]], "seed": [1]}, r"seed must be one, or one per prompt \(2\), got 1"),
        (
            {"prompts": [[1], [2]], "sampling": [ds.SamplingParams()]},
            r"one per prompt \(2\), got 1",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_starts(engine, arguments, message):
    before = jax.tree.map(np.asarray, engine.cache)
    settings = {"max_new_tokens": 6} | arguments
    with pytest.raises(ValueError, match=message):
        engine.generate(settings.pop("prompts"), **settings)
    jax.tree.map(np.testing.assert_array_equal, engine.cache, before)
    assert engine.loop.shards.managers[0].num_free_slots == 3


def test_a_context_that_is_filled_to_the_last_token(engine):
    """No multiple of anything: 200 tokens of context, 193 of prompt."""
    (completion,) = engine.generate([[3] * 193], max_new_tokens=7, stop_token_ids=())
    assert len(completion.token_ids) == 7


def test_bad_engines_are_refused(model):
    with pytest.raises(ValueError, match="cache_format must be one of"):
        ds.Engine(*model, cache_format="fp6")
    with pytest.raises(ValueError, match="max_requests must be"):
        ds.Engine(*model, max_requests=0)
    with pytest.raises(ValueError, match="prefill_tokens"):
        ds.Engine(*model, prefill_tokens=(64, 16))
