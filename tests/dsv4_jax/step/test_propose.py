"""DSpark stages in a step: the drafts of the whole history, and rings of one whole prompt run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache.schema import choose_cache_format
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.model import dspark, dspark_sequence
from dsv4_jax.model.forward import forward_means
from helpers import slow, taught
from helpers.serving import prompt, rows_at, run_to_end
from pallas_kernels.common.formats import get_cache_format

SPEC, LENGTH = taught.CONFIG.dspark, 176
pytestmark = [pytest.mark.slow, pytest.mark.compiles_for_others]


@functools.partial(jax.jit, static_argnames="cache_format")
def blocks_of(params, token_ids, anchors, *, cache_format):
    """Greedy drafts of i32[A] anchors in i32[T] tokens, and their logits, without a cache."""
    fmt = get_cache_format(choose_cache_format(taught.CONFIG, cache_format))
    _, means = forward_means(
        params, token_ids[None], SPEC.target_layers, config=taught.CONFIG, cache_format=cache_format
    )
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    entries = dspark_sequence.context_entries(params, means[0], positions, taught.CONFIG, fmt)
    shape = entries.shape[0], anchors.shape[0], *entries.shape[1:]
    guesses = dspark_sequence.guess_block(
        params,
        token_ids[anchors],
        anchors,
        jnp.broadcast_to(entries[:, None], shape),
        config=taught.CONFIG,
        fmt=fmt,
    )
    return dspark.chain(params, token_ids[anchors], guesses, dspark.choose_likeliest)


@pytest.mark.parametrize("cache_format", slow.all_but(["f32"], ["f32", "fp8_ue8m0"]))
def test_drafts_are_those_of_the_whole_history(cache_format):
    """After a prompt in chunks, and where drafts were kept and refused; beyond a block of 128."""
    engine = taught.make_engine(cache_format=cache_format, overlap=False, max_requests=2)
    rng = np.random.default_rng(3)
    texts = [prompt(rng, 1), prompt(rng, 101)]
    wanted = {"max_new_tokens": 70, "stop_token_ids": ()}
    requests = [engine.requests[engine.submit(text, **wanted)] for text in texts]
    seen = [{} for _ in requests]  # by anchor position
    while any(request.finish_reason is None for request in requests):
        engine.step()
        for request, found in zip(requests, seen, strict=True):
            if request.drafts and request.finish_reason is None:
                found[len(request.known) - 1] = list(request.drafts)
    for request, found in zip(requests, seen, strict=True):
        known = np.zeros(LENGTH, np.int32)
        known[: len(request.known)] = request.known
        anchors = np.array(sorted(found), np.int32)
        assert len(anchors) > 5
        width = np.pad(anchors, (0, 80 - len(anchors)), mode="edge")
        drafts = blocks_of(taught.params(), known, width, cache_format=cache_format)
        for row, anchor in enumerate(anchors):
            top = np.sort(np.asarray(drafts.logits[row]), axis=-1)[:, -2:]
            clear = np.cumprod(top[:, 1] - top[:, 0] > 1e-3).astype(bool)
            wanted_row = np.asarray(drafts.token_ids[row])
            assert list(np.array(found[anchor])[clear]) == list(wanted_row[clear]), anchor
    assert 0.1 < engine.metrics.acceptance < 1


def test_rings_are_those_of_one_whole_prompt_run():
    """Of the stages too, to the byte, where drafts were kept and refused on the way."""
    engine = taught.make_engine(overlap=False)
    text = prompt(np.random.default_rng(4), 60)
    drafted = engine.submit(text, max_new_tokens=90, stop_token_ids=(), temperature=0.3, seed=5)
    found = rows_at(engine, drafted, 130)
    length = int(engine.loop.shards.length_tokens[engine.requests[drafted].slot])
    known = list(engine.requests[drafted].known[:length])
    run_to_end(engine, drafted)
    assert 0 < engine.metrics.accepted_tokens < engine.metrics.drafted_tokens
    whole = engine.submit(known, max_new_tokens=20, stop_token_ids=(), salt="again")
    expected = rows_at(engine, whole, length)
    assert found.keys() == expected.keys()
    rings = [name for name in found if name.startswith("swa.window")]
    stages = draft_layers(taught.CONFIG)
    assert {found[name].shape[0] for name in rings} == {stages[-1].family_idx + 1}
    for name in found:
        assert np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes(), name
