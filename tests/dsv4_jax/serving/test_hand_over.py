"""Snapshots of requests: what comes back goes on, to the bit, as if it had never left.

All engines that are compared run one program, so that equal means equal to the bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.packed_rows import pack_rows, row_bytes, unpack_rows
from dsv4_jax.serving.device import page_memory, request_rows
from dsv4_jax.serving.requests import cached_request
from dsv4_jax.serving.requests.cached_request import CachedRequest
from dsv4_jax.serving.requests.request import TokenLogprobs
from helpers import serving, slow
from helpers.engine_life import Life, alone
from helpers.schedules import assert_same_bytes
from helpers.serving import limit, make_engine, prompt, rows_of, run_to_end

OPTIONS = {"max_new_tokens": 20, "stop_token_ids": (), "temperature": 1.0, "seed": 3}


@functools.cache
def engine_of(**changes):
    """One for all that is refused; by its shape, before anything is read."""
    return make_engine(**changes)


def step_to(engine, request_id, *, drawn):
    while engine.requests[request_id].num_drawn < drawn:
        engine.step()


def sent(cached):
    return CachedRequest.from_bytes(cached.to_bytes())


class Lives:
    """Lives in which requests leave an engine now and then and come to another one."""

    def __init__(self, engines, seed):
        self.rng, self.moved = np.random.default_rng(seed), 0
        self.lives = [Life(engine, seed + number) for number, engine in enumerate(engines)]

    def run(self, count):
        for _ in range(count):
            for life in self.lives:
                life.event()
            if self.rng.random() < 0.3:
                source, target = self.rng.permutation(self.lives)[:2]
                self.moved += source.move(target)
        for life in self.lives:
            life.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scarce", "seed", "count"),
    [
        (False, 0, 24),
        pytest.param(True, 0, 60, marks=pytest.mark.slow),
        pytest.param(False, 1, 60, marks=pytest.mark.slow),
        pytest.param(True, 2, 60, marks=pytest.mark.slow),
    ],
)
def test_whoever_moves_gets_what_he_gets_alone(scarce, seed, count):
    """Two engines that hand requests to each other, in prompts and answers, with drafts.

    With debug every freed byte is NaN, and the cache is verified after each step. With few blocks
    those that come have to wait, and others are pushed out for them.
    """
    engines = [make_engine(debug=True), make_engine()]
    if scarce:
        engines = [limit(make_engine(), num_blocks=5), limit(make_engine(), num_blocks=4)]
    lives = Lives(engines, seed)
    lives.run(count)
    assert lives.moved > count // 12


@pytest.mark.slow
def test_a_long_life_of_moving():
    for seed in range(6):
        engines = [limit(make_engine(), num_blocks=6), make_engine()]
        Lives(engines, 50 + seed).run(400)


@pytest.mark.slow
def test_a_request_that_came_holds_the_bytes_that_left():
    """In all families, at the end of a block, in the middle of one, and before the first is full.

    Its blocks become known, so that a like request shares them once a snapshot is there.
    """
    source, target = make_engine(), make_engine(debug=True)
    text = prompt(np.random.default_rng(5), 250)
    first = source.submit(text, **OPTIONS)
    for drawn in (1, 6, 7):
        step_to(source, first, drawn=drawn)
        cached = source.snapshot(first)
        wanted = rows_of(source, first)
        came = target.restore(sent(cached))
        with target.undo:
            target.loop.queue.admit()
        assert_same_bytes(rows_of(target, came), wanted)
        tree = target.loop.shards.managers[0].prefixes
        assert tree.known_tokens(cached.token_ids) == cached.length_tokens // 128 * 128
        (done,) = run_to_end(target, came)
        assert done == alone(text, OPTIONS)
        assert done.hit_tokens == min(cached.length_tokens, len(text))
    assert run_to_end(source, first)[0] == alone(text, OPTIONS)


def test_what_a_step_in_flight_drew_is_part_of_it():
    """Also where it ends the answer: the value then has no rows, and its stream gives the rest."""
    source, target = make_engine(), make_engine()
    for count in (1, 2, 3, 4, 5):
        request_id = source.submit([3, 1, 4], **(OPTIONS | {"max_new_tokens": count + 2}))
        given = []
        while len(given) < count:
            given += [token.token_id for token in source.step()]
        if source.requests[request_id].finish_reason is not None:
            source.completion(request_id)
            continue
        cached = source.snapshot(request_id)
        assert cached.num_given == len(given)
        came = target.restore(cached)
        rest = [token.token_id for token in target.stream(came)]
        (done,) = run_to_end(source, request_id)
        assert given + rest == done.token_ids
        assert target.completion(came) == done
        assert target.num_unfinished == 0
        if len(cached.token_ids) == 3 + count + 2:
            assert cached.rows is None


def test_a_request_that_waits_brings_its_tokens_or_what_it_came_with():
    engine = limit(make_engine(), num_blocks=2)
    text = prompt(np.random.default_rng(8), 130)
    first = engine.submit(text, **OPTIONS)
    step_to(engine, first, drawn=2)
    waits = engine.restore(engine.snapshot(first))
    engine.step()
    assert engine.requests[waits].slot < 0
    again = engine.restore(engine.snapshot(waits))
    engine.preempt(first)
    cached = engine.snapshot(first)
    assert cached.rows is None
    done = run_to_end(engine, first, waits, again, engine.restore(cached))
    assert [one.token_ids for one in done] == [alone(text, OPTIONS).token_ids] * 4


def test_what_comes_shares_no_prefix_of_another_salt():
    source, target = make_engine(), make_engine()
    text = prompt(np.random.default_rng(9), 140)
    request_id = source.submit(text, salt="a", **OPTIONS)
    step_to(source, request_id, drawn=2)
    came = target.restore(sent(source.snapshot(request_id)))
    target.step()
    prefixes = target.loop.shards.managers[0].prefixes
    known = np.array(text, np.int32)
    assert [prefixes.known_tokens(known, salt) for salt in (b"a", b"b", b"")] == [128, 0, 0]
    run_to_end(target, came)


def test_a_call_that_raises_computes_it_again(monkeypatch):
    source, target = make_engine(), make_engine()
    text = prompt(np.random.default_rng(10), 140)
    request_id = source.submit(text, **OPTIONS)
    step_to(source, request_id, drawn=2)
    came = target.restore(source.snapshot(request_id))

    def fail(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dsv4_jax.serving.loop.put_request", fail)
        with pytest.raises(KeyboardInterrupt):
            target.step()
    assert run_to_end(target, came)[0] == alone(text, OPTIONS)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"cache_format": "bf16"}, "cache_format"),
        ({"activations": "bfloat16"}, "activations"),
        ({"prefill_activations": "bfloat16"}, "prefill_activations"),
    ],
)
def test_engines_of_another_shape_refuse_it_by_name(changes, name):
    source = engine_of()
    cached = source.snapshot(source.submit([1, 2], **OPTIONS))
    other = engine_of(**changes)
    before = dict(vars(other.metrics))
    with pytest.raises(ValueError, match=f"cached must be of an engine with {name}="):
        other.restore(cached)
    assert not other.requests
    assert vars(other.metrics) == before


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "indexer_top_k"])
def test_so_do_engines_of_another_config(field):
    engine = engine_of()
    cached = engine.snapshot(engine.submit([1, 2], **OPTIONS))
    config = engine.plan.config
    config = dataclasses.replace(config, **{field: 2 * getattr(config, field)})
    plan = dataclasses.replace(engine.plan, config=config)
    with pytest.raises(ValueError, match=rf"config\.{field}="):
        cached.check_engine(request_rows.engine_shape(plan))
    mesh = ds.make_mesh()
    plan = dataclasses.replace(engine.plan, options=engine.plan.options.changed(mesh=mesh))
    assert request_rows.engine_shape(plan) == cached.shape  # a mesh of one device is one device


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"slot": np.zeros(3, np.uint8)}, "slot must be an array"),
        ({"blocks": np.zeros((1, 3), np.uint8)}, "blocks must be an array"),
        ({"blocks": np.zeros((2, 5), np.uint8)}, "blocks must be an array"),
        ({"token_ids": np.full(20, 10**6, np.int32)}, "prompt holds token id"),
        ({"drafts": (10**6,)}, "drafts must be in"),
    ],
)
def test_rows_and_tokens_that_do_not_fit_are_refused(changes, error):
    engine = engine_of()
    request_id = engine.submit([1, 2], **OPTIONS)
    step_to(engine, request_id, drawn=2)
    cached = engine.snapshot(request_id)
    engine.cancel(request_id)
    unfinished = engine.num_unfinished
    with pytest.raises(ValueError, match=error):
        engine.restore(dataclasses.replace(cached, **changes))
    assert engine.num_unfinished == unfinished


def test_tokens_after_the_end_of_an_answer_are_refused():
    engine = engine_of()
    request_id = engine.submit([1, 2], **OPTIONS)
    step_to(engine, request_id, drawn=4)
    cached = engine.snapshot(request_id)
    engine.cancel(request_id)
    sampling = cached.sampling.with_plain(max_new_tokens=2)
    with pytest.raises(ValueError, match="token_ids must end where the answer does"):
        engine.restore(dataclasses.replace(cached, sampling=sampling))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens must be"),
        ({"prompt_tokens": 5}, "prompt_tokens must be at most 4"),
        ({"length_tokens": 4}, "length_tokens must be at most 3"),
        ({"num_given": 3}, "num_given must be at most 2"),
        ({"salt": b"a"}, "salt must be"),
        ({"shape": {"a": 1}}, "shape must be"),
        ({"slot": None}, "slot must be given"),
        ({"slot": np.zeros(1, np.int8)}, "slot must be"),
        ({"blocks": np.zeros((1, 1), np.uint16)}, "blocks must be"),
        ({"logprobs": (1,)}, "logprobs must be"),
        ({"logprobs": (TokenLogprobs(-1.0, ()),) * 2}, "logprobs must be one for each of 2"),
        ({"sampling": ds.SamplingParams(logprobs=1)}, "logprobs must be one for each of 2"),
        ({"sampling": {}}, "sampling must be"),
        ({"speculate": 1}, "speculate must be"),
    ],
)
def test_fields_have_rules(changes, error):
    good = CachedRequest(
        shape={"a": "b"}, token_ids=np.arange(4, dtype=np.int32), prompt_tokens=2,
        length_tokens=3, sampling=ds.SamplingParams(), slot=np.zeros(1, np.uint8),
        blocks=np.zeros((1, 1), np.uint8),
    )  # fmt: skip
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(good, **changes)
    with pytest.raises(ValueError, match="read-only"):
        good.token_ids[0] = 1


def test_bytes_that_are_damaged_cut_or_of_something_else_are_refused():
    engine = engine_of()
    data = engine.snapshot(engine.submit([1, 2], **OPTIONS)).to_bytes()
    for place in range(8, len(data), 97):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(ValueError, match="their digest is wrong"):
            CachedRequest.from_bytes(bytes(damaged))
        with pytest.raises(ValueError, match="data must be"):
            CachedRequest.from_bytes(data[:place])
    for wrong in (b"", b"PK\3\4", "text", None, 3):
        with pytest.raises(ValueError, match="data must be"):
            CachedRequest.from_bytes(wrong)


def test_arrays_come_in_parts_where_one_is_too_long_for_the_format(monkeypatch):
    """As blocks of a million tokens are."""
    engine = engine_of()
    request_id = engine.submit([1, 2], **OPTIONS)
    step_to(engine, request_id, drawn=2)
    cached = engine.snapshot(request_id)
    monkeypatch.setattr("flax.serialization.MAX_CHUNK_SIZE", 100)
    came = sent(cached)
    for name in ("token_ids", "slot", "blocks"):
        np.testing.assert_array_equal(getattr(came, name), getattr(cached, name), strict=True)
    engine.cancel(request_id)


def test_other_fields_with_a_digest_of_their_own_are_refused_too():
    engine = engine_of()
    body = engine.snapshot(engine.submit([1, 2], **OPTIONS)).to_bytes()[8 + 32 :]
    for wrong in (b"", b"\xc1", b"\x90", body.replace(b"uint8", b"uint9"), body + b"\0"):
        data = cached_request._MAGIC + cached_request._digest(wrong) + wrong
        with pytest.raises(ValueError, match="data must"):
            CachedRequest.from_bytes(data)


def test_a_request_that_ends_while_it_waits_lets_its_rows_go():
    """It is kept until its completion is taken, and they may be gigabytes."""
    engine = engine_of()
    request_id = engine.submit([1, 2], **OPTIONS)
    step_to(engine, request_id, drawn=2)
    waits = engine.restore(engine.snapshot(request_id))
    assert engine.requests[waits].cached is not None
    assert engine.cancel(waits)
    assert engine.requests[waits].cached is None
    engine.cancel(request_id)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache_format", slow.all_but(["fp8_ue8m0"], ["f32", "bf16", "fp8_ue8m0", "fp8_per_entry"])
)
def test_rows_that_are_packed_and_unpacked_are_the_same_bits(cache_format):
    """Of every family and layer, to other places; all others stay as they were."""
    cache = ds.init_cache(
        serving.CONFIG, max_requests=4, max_context_tokens=256, cache_format=cache_format
    )
    rng = np.random.default_rng(0)

    def filled(plane):
        size = plane.size * plane.dtype.itemsize
        return rng.integers(0, 256, size, np.uint8).view(plane.dtype).reshape(plane.shape)

    for pools in (cache.state, cache.paged):
        before = jax.tree.map(filled, pools)
        packed, _ = pack_rows(jax.tree.map(jnp.asarray, before), np.array([2, 0, -1], np.int32))
        assert packed.shape == (3, row_bytes(pools))
        targets = np.array([1, 3, -1], np.int32)
        after = unpack_rows(jax.tree.map(jnp.asarray, before), targets, packed)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            wanted = old.copy()
            wanted[:, [1, 3]] = old[:, [2, 0]]
            np.testing.assert_array_equal(
                np.asarray(new).view(np.uint8), wanted.view(np.uint8), strict=True
            )
    with pytest.raises(ValueError, match="packed must be an array"):
        unpack_rows(cache.state, np.zeros(2, np.int32), np.zeros((2, 1), np.uint8))


@pytest.mark.parametrize("sizes", [(1,), (1, 2)])
def test_rows_come_in_runs_of_any_size(monkeypatch, sizes):
    monkeypatch.setattr(page_memory, "RUN_SIZES", sizes)
    source, target = make_engine(), make_engine()
    text = prompt(np.random.default_rng(11), 290)
    request_id = source.submit(text, **OPTIONS)
    step_to(source, request_id, drawn=2)
    came = target.restore(source.snapshot(request_id))
    waited = []
    with monkeypatch.context() as patch:  # of three blocks no three copies are on their way
        patch.setattr(request_rows, "_PUTS_AT_ONCE", 3)
        patch.setattr(request_rows.jax, "block_until_ready", waited.append)
        target.step()
    assert len(waited) == (sizes == (1,))
    assert run_to_end(target, came)[0] == alone(text, OPTIONS)
