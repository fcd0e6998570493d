"""What ends a request, and what is refused before it is one."""

import dataclasses

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers.serving import CONFIG, limit, make_engine, params, prompt

TOKENIZER = load_tokenizer(ds.SHIPPED_CHECKPOINT)


def request(**fields):
    sampling = ds.SamplingParams(**({"max_new_tokens": 50, "stop_token_ids": ()} | fields))
    return Request(0, np.array([256, 65], np.int32), sampling, 0.0)


def feed(one, text):
    """Adds a text's bytes until the request ends; how many were taken."""
    for count, token in enumerate(text.encode(), start=1):
        one.add(token, TOKENIZER)
        if one.finish_reason:
            return count
    return len(text.encode())


@pytest.mark.parametrize(
    ("stops", "text", "taken", "kept"),
    [
        (("end",), "the end of it", 7, "the "),
        (("of", "end"), "the end of it", 7, "the "),
        (("e",), "the end", 3, "th"),
        (("zz",), "the end", 7, "the end"),
        (("a stop text that is longer than the answer",), "short", 5, "short"),
        (("né",), "un né ici", 6, "un "),
        (("ee",), "eee", 2, ""),
    ],
)
def test_a_stop_text_ends_the_answer_and_is_cut_off(stops, text, taken, kept):
    one = request(stop_texts=stops)
    assert feed(one, text) == taken
    assert (one.finish_reason == "stop") == (kept != text)
    done = one.completion(TOKENIZER)
    assert done.text == kept
    assert len(done.token_ids) == taken


def test_length_and_stop_tokens():
    one = request(max_new_tokens=3)
    assert feed(one, "abcdef") == 3
    assert one.finish_reason == "length"
    one = request(max_new_tokens=3, stop_token_ids=[ord("c")])
    assert feed(one, "abcdef") == 3
    assert one.finish_reason == "stop"  # the last token there is room for is a stop token


def test_a_branch_goes_on_from_the_same_text():
    """Its stop text may begin in what was drawn before the branch."""
    one = request(stop_texts=("end",))
    feed(one, "the e")
    two = one.branch(1, seed=5, now_s=1.0)
    assert feed(two, "nd of it") == 2
    assert two.completion(TOKENIZER).text == "the "
    assert one.finish_reason is None
    assert (two.sampling.seed, two.num_wanted) == (5, 43)


@pytest.fixture(scope="module")
def engine():
    return limit(make_engine(), num_blocks=3)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ([1] * 300, {"max_new_tokens": 100},
         r"prompt has 300 tokens, and with max_new_tokens=100 that is 400, or 4 blocks of 128 "
         r"tokens, and the cache has 3 in all"),
        ([1] * 600, {"max_new_tokens": 100}, r"is 700, more than max_context_tokens=640"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([], {}, "prompt is empty"),
        ([96], {}, r"prompt holds token id 96, outside 0\.\.95"),
        ("text", {}, "the engine has no tokenizer"),
        ([1], {"stop_texts": ("x",)}, "stop_texts need an engine with a tokenizer"),
        ([1], {"stop_texts": ("",)}, "stop_texts must be a list of texts, none empty"),
        ([1], {"stop_texts": "end"}, "stop_texts must be a list of texts"),
        ([1], {"stop_token_ids": (5, 96)}, r"stop_token_ids must be in 0\.\.95 .* got 96; pass"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids must be at least 0, got -1"),
        ([1], {"top_p": 1.5}, "top_p must be above 0 and at most 1"),
    ],
)  # fmt: skip
def test_what_can_never_be_served_is_refused_at_submission(engine, text, options, message):
    before = engine.num_unfinished
    with pytest.raises(ValueError, match=message):
        engine.submit(text, **options)
    assert engine.num_unfinished == before
    assert engine.metrics.submitted == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefill_tokens": (2,), "decode_tokens": 2},
            "decode_tokens must be at least max_requests=4",
        ),
        ({"prefill_tokens": (0, 24)}, "prefill_tokens must be at least 1, got 0"),
        ({"decode_tokens": 0}, "decode_tokens must be at least 1, got 0"),
        ({"draft_tokens": -1}, r"draft_tokens must be 0\.\.16"),
        ({"memory_bytes": 10}, "memory_bytes=10 is too little"),
        ({"memory_bytes": 10, "gpu_memory_fraction": 0.5}, "not both"),
        ({"gpu_memory_fraction": 0.5}, "needs a device that reports its memory"),
        ({"num_snapshots": -2}, "num_snapshots must be at least 0"),
    ],
)
def test_engines_that_cannot_be_are_refused(monkeypatch, options, message):
    class Mute:
        def memory_stats(self):
            return None

    monkeypatch.setattr(jax, "local_devices", lambda *_: [Mute()])
    with pytest.raises(ValueError, match=message):
        make_engine(**options)


def test_a_budget_sizes_the_engine():
    counts = {"max_requests": 2, "max_context_tokens": 300}
    plan = ds.allocator.plan_pools(dataclasses.replace(CONFIG, num_mtp_layers=0), **counts)
    engine = ds.Engine(CONFIG, params(), memory_bytes=4 * plan.memory_bytes, **counts)
    total = engine.cache.memory_bytes() + sum(
        leaf.nbytes for leaf in jax.tree.leaves(engine.loop.runner.devices.store)
    )
    assert 4 * plan.memory_bytes - plan.bytes_per_block < total <= 4 * plan.memory_bytes
    assert engine.loop.shards.managers[0].num_blocks > plan.num_blocks


def test_a_debugged_engine_says_what_is_wrong():
    """A length that the device does not have is found after the next step."""
    engine = make_engine(debug=True)
    request_id = engine.submit(prompt(np.random.default_rng(0), 40), max_new_tokens=5)
    engine.step()
    engine.loop.shards.managers[0].length_tokens[engine.requests[request_id].slot] += 1
    with pytest.raises(
        ds.serving.CacheError, match=r"length: slot \d: length \d+, the manager says \d+"
    ):
        engine.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer_types",
    [(ds.AttentionType.SWA,), (ds.AttentionType.HCA,)],
)
def test_a_model_without_one_type_or_snapshots_is_served_too(layer_types):
    """Known bug B28, in the engine: empty families, no draft block, no place for a snapshot."""
    config = dataclasses.replace(
        CONFIG, layer_types=layer_types, router_types=(ds.RouterType.LEARNED,), num_mtp_layers=0
    )
    engine = ds.Engine(
        config, ds.init_params(config, jax.random.key(0)), max_requests=2, max_context_tokens=300,
        prefill_tokens=(24,), decode_tokens=24, num_snapshots=0,
        debug=True,
    )  # fmt: skip
    texts = [[1, 2, 3] * 50, [4] * 10, [5] * 140]
    together = engine.generate(texts, max_new_tokens=4, stop_token_ids=())
    for text, done in zip(texts, together, strict=True):
        assert engine.generate([text], max_new_tokens=4, stop_token_ids=()) == [done]
    assert not engine.verify().problems
