"""One small model and one step shape, for tests of the engine that compare bit for bit."""

import dataclasses
import functools
import time

import jax
import numpy as np

import dsv4_jax as ds
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers.schedules import live_rows

SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
HASH, LEARNED = ds.RouterType.HASH, ds.RouterType.LEARNED
EVERY_TYPE = dataclasses.replace(
    ds.DSV4Config.tiny(), layer_types=(SWA, CSA, HCA), router_types=(HASH, LEARNED, LEARNED)
)  # blocks of 128 tokens
CONFIG = dataclasses.replace(
    EVERY_TYPE, layer_types=(CSA, HCA), router_types=(HASH, LEARNED), hc_sinkhorn_iters=1
)
"""Two layers and an MTP block, which has the window alone, so that every type of cache is there.

With one iteration, `hyper_connections` has no loop: a step compiles and runs faster.
"""

BUCKET = 24
SIZES = {
    "max_requests": 4,
    "max_context_tokens": 640,
    "prefill_tokens": (BUCKET,),
    "decode_tokens": BUCKET,
    "draft_tokens": 3,
    "cache_format": "fp8_ue8m0",
    "num_snapshots": 29,  # so that no weight has the size of a leaf of the store
}


@functools.cache
def params():
    return ds.init_params(CONFIG, jax.random.key(0))


def one_layer_config(attn=HCA, **changes):
    """A config of one layer, for what lies around the layers; HCA compiles faster than CSA."""
    return dataclasses.replace(CONFIG, layer_types=(attn,), router_types=(LEARNED,), **changes)


def one_layer(attn=HCA, **changes):
    """The same and its parameters."""
    config = one_layer_config(attn, **changes)
    return config, ds.init_params(config, jax.random.key(0))


def make_engine(**changes):
    """An engine whose steps are all one program, so that results are equal to the bit."""
    return ds.Engine(CONFIG, params(), **(SIZES | changes))


def engine_of_calls(steps_per_call=4, **changes):
    """Of one layer, without drafts, whose steps that only decode come several a call."""
    sizes = {"draft_tokens": 0, "decode_tokens": None, "cache_format": "f32"}
    options = SIZES | sizes | {"steps_per_call": steps_per_call} | changes
    return ds.Engine(*one_layer(), **options)


def single_steps(**changes):
    """An engine whose calls make one step each, with the programs of the others."""
    engine = engine_of_calls(**changes)
    loop = engine.loop
    loop.options = dataclasses.replace(loop.options, steps_per_call=1)
    return engine


def byte_tokenizer():
    """The tokenizer of the shipped checkpoint, for which ids below 256 are bytes."""
    return load_tokenizer(ds.SHIPPED_CHECKPOINT)


def limit(engine, **counts):
    """Fewer blocks or snapshots than the arrays have, so that no program is compiled for it."""
    engine.loop.runner.plan = dataclasses.replace(engine.loop.runner.plan, **counts)
    engine.plan = dataclasses.replace(engine.plan, pools=engine.loop.runner.plan)
    engine.loop.plan = engine.plan
    engine.limits = engine.limits._replace(plan=engine.plan.pools)
    engine.loop.queue.shards = engine.loop.new_shards()
    return engine


def prompt(rng, length):
    return rng.integers(0, CONFIG.vocab_size, length).tolist()


def run_to_end(engine, *request_ids):
    """Steps until these have finished; their completions."""
    while any(engine.requests[i].finish_reason is None for i in request_ids):
        engine.step()
    return [engine.completion(i) for i in request_ids]


def drain(engine):
    """Reads the step in flight: host and device agree then."""
    with engine.undo:
        engine.loop.drain()


def rows_of(engine, request_id):
    """Everything that a running request could read from the cache; none is in flight then."""
    drain(engine)
    engine.loop.runner.apply(engine.loop.shards)
    shards = len(engine.loop.shards.managers)
    return live_rows(engine.cache, engine.requests[request_id].slot, shards=shards)


def rows_at(engine, request_id, length):
    """Steps until a running request holds at least `length` tokens; what it could read then."""
    while True:
        slot = engine.requests[request_id].slot
        if slot >= 0 and engine.loop.shards.length_tokens[slot] >= length:
            return rows_of(engine, request_id)
        engine.step()


def same_tokens(actual, expected):
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    assert actual.finish_reason == expected.finish_reason


def fail_with_prompts_of(first, engine, monkeypatch, *, message):
    """Makes steps raise that serve a request whose prompt begins with that token."""
    run = engine.loop.runner.run

    def fail(plan, requests, *rest):
        if any(request.token_ids[0] == first for request in requests.values()):
            raise ValueError(message)
        return run(plan, requests, *rest)

    monkeypatch.setattr(engine.loop.runner, "run", fail)


def until(condition, seconds=60):
    """Waits for what another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
