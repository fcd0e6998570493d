"""A load of requests through a trained model: nobody's answer depends on the others."""

import functools
import json
import time

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers.serving import limit, run_to_end


@functools.cache
def checkpoint():
    return ds.load_checkpoint(ds.SHIPPED_CHECKPOINT)


def make_engine(**changes):
    """One program for every step, that of `dsv4-jax verify`."""
    sizes = {
        "max_requests": 3, "max_context_tokens": 512, "prefill_tokens": (48,),
        "decode_tokens": 48, "draft_tokens": 3,
    }  # fmt: skip
    return ds.Engine(*checkpoint(), **(sizes | changes))


@pytest.mark.slow
def test_64_requests_through_the_shipped_checkpoint():
    """Mixed lengths, shared heads, greedy and sampled, drafts: all equal to their solo runs."""
    engine = make_engine()
    rng = np.random.default_rng(11)
    document = list((json.__doc__ or "").encode()[:400])  # ids of the shipped tokenizer are bytes
    texts = [
        [256, *document[: int(rng.integers(0, 220))], *document[start : start + 40]]
        for start in rng.integers(0, 360, 64)
    ]
    wanted = [
        {"max_new_tokens": int(rng.integers(1, 12)), "temperature": 0.7 * (i % 2), "seed": i}
        for i in range(64)
    ]
    started = time.perf_counter()
    ids = [engine.submit(t, **w) for t, w in zip(texts, wanted, strict=True)]
    together = run_to_end(engine, *ids)
    seconds, metrics = time.perf_counter() - started, engine.metrics
    print(
        f"{metrics.generated_tokens} tokens in {seconds:.1f} s, {metrics.acceptance:.0%} accepted"
    )
    assert engine.metrics.hit_tokens > 2000
    assert engine.metrics.acceptance > 0.3
    solo = limit(make_engine(), num_snapshots=0)
    for text, options, done in zip(texts, wanted, together, strict=True):
        (one,) = run_to_end(solo, solo.submit(text, speculate=False, **options))
        assert one == done


@pytest.mark.slow
def test_a_stop_text_ends_an_answer_though_drafts_go_on():
    """Of a step's tokens those after the stop text are dropped; blocks and slot are free again."""
    engine = make_engine(tokenizer=load_tokenizer(ds.SHIPPED_CHECKPOINT))
    asked = {"max_new_tokens": 40, "stop_token_ids": ()}
    (free,) = engine.generate(["The with statement"], **asked)
    stop = free.text[21:24]
    place = free.text.index(stop)
    (cut,) = engine.generate(["The with statement"], **asked, stop_texts=[stop, "no such text"])
    assert (cut.text, cut.finish_reason) == (free.text[:place], "stop")
    assert cut.token_ids == free.token_ids[: place + len(stop)]  # a token is a byte
    (long,) = engine.generate(["The with statement"], **asked, stop_texts=["x" * 100])
    assert long == free
    assert engine.metrics.accepted_tokens > 10
    assert (engine.metrics.running, engine.metrics.used_blocks) == (0, 0)
