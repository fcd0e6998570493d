"""Answers with DSpark drafts on meshes and on one device: tokens without drafts, tokens with them,
how many were kept, and whether rings and drafts are those of one prompt run.
"""

import dataclasses

import numpy as np

from dsv4_jax import collectives
from helpers import serving, taught
from helpers.schedules import assert_same_bytes
from tools.meshes.harness import mesh_of

SETTINGS = (
    {},
    {"temperature": 0.3},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "logprobs": 3},
    {"logit_bias": {7: 4.0}, "logprobs": 0},
    {"frequency_penalty": 0.6, "presence_penalty": 0.4},
)
PROMPT_TOKENS = (1, 40, 101, 122, 150)


def add_arguments(parser):
    parser.add_argument("--split", action="store_true", help="deal blocks over model")
    parser.add_argument("--cut", action="store_true", help="check likely drafts alone")
    parser.add_argument("--dealt", action="store_true", help="rows dealt over model, however few")
    parser.add_argument("--requests", type=int, default=2, help="slots of each data shard")


def check_all(arguments):
    if arguments.dealt:
        collectives.DEALT_ROWS = 1
    found = {"one device": check(None, arguments)}
    return found | {name: check(mesh_of(name), arguments) for name in arguments.meshes}


def engine_on(mesh, arguments, **changes):
    """An engine of the small taught model, whose sizes divide by eight."""
    config = dataclasses.replace(taught.SMALL, vocab_size=280, num_attention_heads=8, o_groups=8)
    shards = 1 if mesh is None else mesh.shape["data"]
    options = {"max_requests": arguments.requests * shards, "num_snapshots": 8 * shards}
    options |= {"draft_cut": arguments.cut, "tokenizer": None}
    options |= {"split_cache": arguments.split and mesh is not None, "mesh": mesh}
    return taught.make_engine(config, **(options | changes))


def answers(engine, *, speculate):
    rng = np.random.default_rng(1)
    ids = [
        engine.submit(
            serving.prompt(rng, length), seed=number, max_new_tokens=25, stop_token_ids=(),
            speculate=speculate, salt=str(speculate), **settings,
        )
        for number, (length, settings) in enumerate(zip(PROMPT_TOKENS, SETTINGS, strict=True))
    ]  # fmt: skip
    return serving.run_to_end(engine, *ids)


def compare_histories(engine):
    """Two requests after a prefix hit, in the middle of their answers, beside prompts of the whole.

    Raises:
      AssertionError: a byte that they could read, or a draft, is another.
    """
    rng, options = np.random.default_rng(2), {"max_new_tokens": 60, "stop_token_ids": ()}
    head = serving.prompt(rng, 128)
    engine.generate([head + serving.prompt(rng, 9)], **options)
    before = engine.metrics.hit_tokens
    for tail in (8, 30):
        first = engine.submit(head + serving.prompt(rng, tail), **options)
        while engine.requests[first].num_drawn < 6:
            engine.step()
        known = engine.requests[first].known.tolist()
        drafts, rows = list(engine.requests[first].drafts), serving.rows_of(engine, first)
        engine.cancel(first)
        again = engine.submit(known[:-1], salt=f"whole {tail}", **options)
        while not engine.requests[again].num_drawn:
            engine.step()
        assert engine.requests[again].known.tolist() == known
        assert_same_bytes(serving.rows_of(engine, again), rows)
        assert list(engine.requests[again].drafts) == drafts
        engine.cancel(again)
    return engine.metrics.hit_tokens - before


def check(mesh, arguments):
    """What a mesh gives."""
    engine = engine_on(mesh, arguments)
    plain = answers(engine, speculate=False)
    drafted = answers(engine, speculate=True)
    kept, checked = engine.metrics.accepted_tokens, engine.metrics.drafted_tokens
    assert not engine.verify().problems
    hits = compare_histories(engine_on(mesh, arguments, overlap=False))
    return {
        "plain": [[int(token) for token in one.token_ids] for one in plain],
        "same": [one == other for one, other in zip(plain, drafted, strict=True)],
        "kept": kept,
        "checked": checked,
        "hits": hits,
    }
