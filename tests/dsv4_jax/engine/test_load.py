"""A load of requests through a trained model: nobody's answer depends on the others."""

import json
import time

import numpy as np

import dsv4_jax as ds
from helpers.serving import limit, run_to_end


def test_64_requests_through_the_shipped_checkpoint():
    """Mixed lengths, shared heads, greedy and sampled, drafts: all equal to their solo runs."""
    config, params = ds.load_checkpoint(ds.SHIPPED_CHECKPOINT)
    sizes = {
        "max_requests": 8, "max_context_tokens": 512, "prefill_tokens": (48,),
        "decode_tokens": 48, "draft_tokens": 3,
    }  # fmt: skip
    engine = ds.Engine(config, params, **sizes)
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
    solo = limit(ds.Engine(config, params, **sizes), num_snapshots=0)
    for text, options, done in zip(texts, wanted, together, strict=True):
        (one,) = run_to_end(solo, solo.submit(text, speculate=False, **options))
        assert one == done
