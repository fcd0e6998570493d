"""The programs that an engine runs: compiled at warm-up, never after, and equal across shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.packed_rows import _packing, _unpacking
from dsv4_jax.serving.device import compile_lines, engine_arrays
from helpers import tolerance
from helpers.serving import SIZES, one_layer, prompt, run_to_end

pytestmark = pytest.mark.compiles_for_others

GENERAL = ["tables", "copies and snapshot loads", "snapshots between steps", "step of 24 tokens"]
CASES = {
    "plain": (
        {"draft_tokens": 0, "decode_tokens": None},
        ["decode step of 4 tokens", "verification"],
    ),
    "calls of four": (  # whose programs `test_steps_per_call.py` takes
        {"draft_tokens": 0, "decode_tokens": None, "steps_per_call": 4},
        ["decode step of 4 tokens", "4 decode steps of 4 tokens", "verification"],
    ),
    "simple draws": (  # which an engine on a GPU has
        {"draft_tokens": 0, "decode_tokens": None},
        ["decode step of 4 tokens", "verification"],
    ),
    "drafts, debugged": ({"debug": True}, ["verification"]),
}


model = functools.cache(one_layer)


def make_engine(**changes):
    return ds.Engine(*model(), **(SIZES | {"cache_format": "f32"} | changes))


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_nothing_compiles_after_warmup(case):
    """And what is listed is what serving runs: snapshots, loads, forks, tables, a lost cache."""
    options, more = CASES[case]
    engine = make_engine(**options)
    engine.loop.runner.simplifies = case == "simple draws"
    for program in (engine_arrays._copied, engine_arrays._in_place_of):
        program.clear_cache()  # other tests may have compiled what this engine has to
    listed = dict(engine.warmup())
    assert list(listed) == GENERAL + more
    assert min(listed.values()) > 0
    compiled = engine.metrics.compiles
    assert compiled > 0
    rng = np.random.default_rng(3)
    text = prompt(rng, 200)
    run_to_end(engine, engine.submit(text[:30], max_new_tokens=3, stop_token_ids=()))
    for is_lost in (False, True):
        settings = ({}, {"temperature": 1.0}, {"temperature": 0.5, "logprobs": 3},
                    {"logit_bias": {5: 2}, "frequency_penalty": 1.0})  # fmt: skip
        ids = [
            engine.submit(text[:n], max_new_tokens=70, stop_token_ids=(), **more)
            for n, more in zip((200, 130, 100, 3), settings, strict=True)
        ]
        ids += engine.submit_many(text[:40], 3, max_new_tokens=5, stop_token_ids=())
        for _ in range(12):
            engine.step()
        engine.preempt(ids[0])
        ids.append(engine.fork(ids[1], seed=5))
        if is_lost:
            for leaf in jax.tree.leaves(engine.cache):
                leaf.delete()
            with pytest.raises(RuntimeError, match="deleted"):
                engine.step()
        run_to_end(engine, *ids)
    assert not engine.verify().problems
    engine.step()  # which counts compiles
    assert engine.metrics.hit_tokens > 0
    assert engine.metrics.compiles == compiled


@pytest.mark.slow
def test_programs_are_told_while_they_compile(monkeypatch):
    """By warm-up with a number of all; without it by the first launch of each, and by no other."""
    told = []

    class Recorder:
        def __init__(self, total, *, doing, shown=True, **options):
            self.lines = [(doing, total)] if shown else []

        def begin(self, name):
            self.lines.append(name)

        def add(self, count=1, *, name=None):
            self.lines.append(f"done {name}")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            told.extend(self.lines)

    monkeypatch.setattr(compile_lines, "Progress", Recorder)
    options = CASES["plain"][0]
    engine = make_engine(**options, progress=True)
    for _ in range(2):
        run_to_end(engine, engine.submit([1, 2, 3], max_new_tokens=3, stop_token_ids=()))
    assert told == [
        ("compiling program 1 of at most 2 (step of 24 tokens)", 1),
        ("compiling program 2 of at most 2 (decode step of 4 tokens)", 1),
        ("compiling all kinds of draws", 1),  # CPUs have no simple ones
    ]
    told.clear()
    names = [name for name, _ in engine.warmup()]
    steps = ["step of 24 tokens", "decode step of 4 tokens"]
    begun = [line for line in told if isinstance(line, tuple)]
    assert begun == [("compiling", 2), ("starting", len(names))]
    lines = [line for line in told if isinstance(line, str)]
    assert lines.count("step of 24 tokens") == lines.count("done step of 24 tokens") == 2
    assert sorted(lines) == sorted([*steps, *names, *(f"done {name}" for name in [*steps, *names])])
    told.clear()
    silent = make_engine(**options)
    run_to_end(silent, silent.submit([1, 2, 3], max_new_tokens=3, stop_token_ids=()))
    assert told == []


@pytest.mark.slow
def test_neither_do_copies_of_prefixes_to_the_host_and_back():
    _packing.cache_clear()  # as above
    _unpacking.cache_clear()
    engine = make_engine(**CASES["calls of four"][0], host_cache_bytes=10**6)
    listed = dict(engine.warmup())
    assert list(listed)[-3:] == [f"copies of {of}" for of in ("blocks", "snapshots", "slots")]
    compiled = engine.metrics.compiles
    text = prompt(np.random.default_rng(4), 600)
    for length in (600, 400, 200):
        run_to_end(engine, engine.submit(text[:length], max_new_tokens=3, stop_token_ids=()))
        engine.loop.shards.managers[0].evict(10**6)
    assert engine.metrics.host_hit_tokens > 0
    assert engine.metrics.compiles == compiled


@pytest.mark.slow
def test_steps_that_are_compiled_side_by_side_are_not_compiled_again(monkeypatch):
    """Programs are of each engine's sizes alone; some small ones are of both."""
    options, _ = CASES["plain"]
    make_engine(**options).warmup()
    compiled = []
    for context in (768, 896):
        engine = make_engine(**options | {"max_context_tokens": context})
        engine.warmup()
        compiled.append(engine.metrics.compiles)
        monkeypatch.setattr(
            engine_arrays.EngineArrays, "_begin_compiling", lambda self, *_: self._begun.append(0)
        )
        monkeypatch.setattr(
            engine_arrays.EngineArrays, "finish_compiling", lambda self: self._begun
        )
    assert compiled[0] == compiled[1]


@pytest.mark.slow
def test_warmup_starts_anew_after_a_program_that_did_not_compile(monkeypatch):
    engine, begin = (
        make_engine(**CASES["calls of four"][0]),
        engine_arrays.EngineArrays._begin_compiling,
    )
    begun = []

    def fail_at_second(self, *call):
        begun.append(call)
        if len(begun) == 2:
            raise NotImplementedError("of such a size")
        begin(self, *call)

    monkeypatch.setattr(engine_arrays.EngineArrays, "_begin_compiling", fail_at_second)
    with pytest.raises(NotImplementedError, match="of such a size"):
        engine.warmup()
    assert list(dict(engine.warmup())) == GENERAL + CASES["calls of four"][1]


@pytest.mark.slow
def test_warmup_waits_for_nobody():
    engine = make_engine(**CASES["calls of four"][0])
    request = engine.submit([1, 2, 3], max_new_tokens=3)
    engine.step()
    with pytest.raises(RuntimeError, match="warmup before requests run; 1 do"):
        engine.warmup()
    engine.cancel(request)
    engine.warmup()


@pytest.mark.slow
def test_drafts_change_no_greedy_token_across_shapes():
    """A draft engine's steps have other shapes: equal where the margin exceeds the rounding."""
    rng = np.random.default_rng(4)
    texts = [prompt(rng, n) for n in (150, 61, 7)]
    wanted = {"max_new_tokens": 30, "stop_token_ids": ()}
    plain = make_engine(draft_tokens=0, decode_tokens=None)
    alone = [run_to_end(plain, plain.submit(text, **wanted))[0].token_ids for text in texts]
    histories = [[*text, *drawn] for text, drawn in zip(texts, alone, strict=True)]
    padded = jnp.asarray([ids + [0] * (180 - len(ids)) for ids in histories], jnp.int32)
    config, params = model()
    logits = jax.jit(ds.forward, static_argnames="config")(params, padded, config=config)
    for text, row in zip(texts, np.asarray(logits), strict=True):
        best = np.sort(row[len(text) - 1 :][:30], axis=-1)
        assert np.min(best[:, -1] - best[:, -2]) > 10 * tolerance.INTERMEDIATE
    drafting = make_engine(overlap=False)
    ids = [drafting.submit(text, **wanted) for text in texts]
    while drafting.num_unfinished:
        # Of every other step's drafts the first two are right.
        for request_id, tokens in zip(ids, alone, strict=True):
            request = drafting.requests[request_id]
            if drafting.metrics.steps % 2 and request.drafts:
                request.drafts[:2] = tokens[request.num_drawn :][:2]
        drafting.step()
    assert [drafting.completion(i).token_ids for i in ids] == alone
    assert 0.3 < drafting.metrics.acceptance < 1
