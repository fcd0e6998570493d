"""Prefix reuse: what is shared, and that a hit is a cold run to the bit."""

import numpy as np
import pytest

import dsv4_jax as ds
from helpers import slow
from helpers.schedules import assert_same_bytes
from helpers.serving import (
    CSA,
    SIZES,
    limit,
    make_engine,
    one_layer,
    prompt,
    rows_at,
    rows_of,
    run_to_end,
    same_tokens,
)

WANTED = {"max_new_tokens": 6, "stop_token_ids": ()}


def hits(engine):
    return engine.metrics.hit_tokens


@pytest.fixture(scope="module")
def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize(
    ("shared", "speculate"),
    slow.all_but(
        [(128, False), (256, True)],
        [(shared, speculate) for shared in (128, 256, 384) for speculate in (False, True)],
    ),
)
def test_a_hit_is_a_cold_run_bit_for_bit(rng, shared, speculate):
    """Tokens and every byte that can be read, with the freed storage full of NaN.

    Known bugs B13, B26: a window that is not part of the prefix, and nothing shared below 4096.
    """
    head = prompt(rng, shared)
    first, second = head + prompt(rng, 40), head + prompt(rng, 45)
    wanted = WANTED | {"speculate": speculate}
    warm = make_engine(debug=True)
    run_to_end(warm, warm.submit(first, **wanted))
    before = hits(warm)
    again = warm.submit(second, **wanted)
    warm.step()
    assert hits(warm) - before == shared
    cold = make_engine(overlap=False)
    alone = cold.submit(second, **wanted)
    assert_same_bytes(rows_at(warm, again, len(second)), rows_at(cold, alone, len(second)))
    same_tokens(*run_to_end(warm, again), *run_to_end(cold, alone))


@pytest.mark.parametrize(
    "length", slow.all_but([128, 129, 300], [1, 127, 128, 129, 255, 256, 257, 300])
)
def test_the_same_request_again_hits_all_but_its_last_block_of_tokens(rng, length):
    """Known bug B27: a resend has at least every whole block before its last token."""
    engine, text = make_engine(), prompt(rng, length)
    (first,) = run_to_end(engine, engine.submit(text, **WANTED))
    assert hits(engine) == 0
    (second,) = run_to_end(engine, engine.submit(text, **WANTED))
    same_tokens(second, first)
    spared = (length - 1) // 128 * 128
    assert hits(engine) == spared
    usage = [(done.prompt_tokens, done.hit_tokens) for done in (first, second)]
    assert usage == [(length, 0), (length, spared)]


@pytest.mark.slow
def test_a_boundary_inside_a_chunk_is_kept(rng):
    """One chunk of 300 tokens crosses 128 and 256: both can be resumed at.

    A CSA layer alone has all that a snapshot holds.
    """
    model = one_layer(CSA, num_mtp_layers=0)
    sizes = SIZES | {"prefill_tokens": (300,), "decode_tokens": 300, "draft_tokens": 0}
    text = prompt(rng, 300)
    engine = ds.Engine(*model, **sizes)
    run_to_end(engine, engine.submit(text, **WANTED))
    assert engine.metrics.snapshots == 2
    for shared in (128, 256):
        other = text[:shared] + prompt(rng, 30)
        before = hits(engine)
        request = engine.submit(other, **WANTED)
        engine.step()
        assert hits(engine) - before == shared
        cold = ds.Engine(*model, **sizes)
        alone = cold.submit(other, **WANTED)
        cold.step()
        assert_same_bytes(rows_of(engine, request), rows_of(cold, alone))
        same_tokens(*run_to_end(engine, request), *run_to_end(cold, alone))


def test_where_two_prompts_part_is_kept_for_a_third(rng):
    """A prompt may have one place of two, its end's; the second keeps where they part as well."""
    engine, head = limit(make_engine(), num_snapshots=2), prompt(rng, 256)
    gained = []
    for _ in range(3):
        before = hits(engine)
        text = head + prompt(rng, 260)  # four whole blocks
        run_to_end(engine, engine.submit(text, max_new_tokens=1))
        gained.append((hits(engine) - before, engine.metrics.snapshots))
    assert gained == [(0, 1), (0, 3), (256, 4)]


def test_an_answer_is_a_prefix_too(rng):
    """The next turn of a conversation resumes at the boundary that the answer reached."""
    engine = make_engine()
    text = prompt(rng, 100)
    (first,) = run_to_end(engine, engine.submit(text, max_new_tokens=60, stop_token_ids=()))
    turn = text + first.token_ids + prompt(rng, 10)
    (second,) = run_to_end(engine, engine.submit(turn, **WANTED))
    assert hits(engine) == 128
    cold = make_engine()
    same_tokens(second, *run_to_end(cold, cold.submit(turn, **WANTED)))


def test_running_requests_share_blocks_by_reference(rng):
    """Two that run at once read the same physical blocks, and no third copy is made."""
    engine, head = make_engine(), prompt(rng, 256)
    run_to_end(engine, engine.submit(head + prompt(rng, 5), **WANTED))
    ids = [engine.submit(head + prompt(rng, 20 + i), **WANTED) for i in range(3)]
    engine.step()
    slots = [engine.requests[i].slot for i in ids]
    tables = engine.loop.shards.managers[0].block_table[slots]
    assert np.all(tables[:, :2] == tables[0, :2])
    assert len(set(tables[:, 2])) == 3
    assert engine.metrics.used_blocks == 2 + 3


def test_salts_do_not_mix(rng):
    engine, text = make_engine(), prompt(rng, 200)
    for salt, expected in (("a", 0), ("b", 0), ("a", 128), ("b", 256), ("", 256)):
        run_to_end(engine, engine.submit(text, salt=salt, **WANTED))
        assert hits(engine) == expected


def test_no_snapshots_share_nothing(rng):
    engine, text = limit(make_engine(), num_snapshots=0), prompt(rng, 200)
    for _ in range(2):
        run_to_end(engine, engine.submit(text, **WANTED))
    assert hits(engine) == 0
    assert engine.metrics.cached_blocks == 0


def test_the_least_recently_used_snapshot_goes_first_and_blocks_stay(rng):
    """Three prompts and two places: the one not asked for again is the one forgotten."""
    engine = limit(make_engine(), num_snapshots=2)
    texts = [prompt(rng, 140) for _ in range(3)]

    def hit(text):
        before = hits(engine)
        run_to_end(engine, engine.submit(text, max_new_tokens=1))
        return hits(engine) - before

    assert [hit(texts[0]), hit(texts[1]), hit(texts[0])] == [0, 0, 128]
    cached = engine.metrics.cached_blocks
    assert engine.metrics.evicted_snapshots == 0
    assert hit(texts[2]) == 0
    assert (engine.metrics.evicted_blocks, engine.metrics.evicted_snapshots) == (0, 1)
    assert engine.metrics.cached_blocks == cached + 1
    assert [hit(texts[0]), hit(texts[2])] == [128, 128]
    assert hit(texts[1]) == 0


@pytest.mark.slow
def test_a_long_answer_leaves_its_prompt_a_snapshot(rng):
    """Two places, three boundaries of an answer: its last one and the prompt's stay."""
    engine, text = limit(make_engine(), num_snapshots=2), prompt(rng, 130)
    (answer,) = run_to_end(engine, engine.submit(text, max_new_tokens=390, stop_token_ids=()))
    assert engine.metrics.snapshots == 4  # at 128, 256, 384 and 512
    run_to_end(engine, engine.submit(text, max_new_tokens=1))
    assert hits(engine) == 128
    run_to_end(engine, engine.submit([*text, *answer.token_ids, 1], max_new_tokens=1))
    assert hits(engine) == 128 + 512


def test_history_gives_way_to_requests_only(rng):
    """A pool of 6 blocks: cached prefixes are evicted when a request needs their blocks."""
    engine = limit(make_engine(), num_blocks=6)
    texts = [prompt(rng, 250) for _ in range(3)]
    for text in texts:
        run_to_end(engine, engine.submit(text, max_new_tokens=1))
    assert engine.metrics.evicted_blocks == 0
    run_to_end(engine, engine.submit(prompt(rng, 500), max_new_tokens=1))
    assert engine.metrics.evicted_blocks > 0
    assert engine.metrics.free_blocks + engine.metrics.cached_blocks == 6
    before = hits(engine)
    run_to_end(engine, engine.submit(texts[2], max_new_tokens=1))
    assert hits(engine) - before <= 128
    assert not engine.verify().problems
