"""`ds.inspect`: one request's ring, tails, blocks and selected entries, and a picture of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.attention import select_by_score
from helpers import serving
from helpers.arrays import on_device

pytestmark = pytest.mark.unoptimised

CONFIG = dataclasses.replace(
    serving.CONFIG,
    num_mtp_layers=0,
    layer_types=(ds.AttentionType.SWA, ds.AttentionType.HCA, ds.AttentionType.CSA),
    router_types=(ds.RouterType.LEARNED,) * 3,
)
WINDOW = CONFIG.sliding_window


@functools.cache
def empty(cache_format="f32"):
    """A cache with a shuffled table of blocks."""
    cache = ds.init_cache(
        CONFIG, max_requests=2, max_context_tokens=384, cache_format=cache_format, num_blocks=6
    )
    table = on_device([[3, -1, -1], [4, 0, 2]], jnp.int32)
    return dataclasses.replace(cache, block_table=table)


def of_45_tokens():
    """That cache, whose slot 1 has so many tokens by its length: no model has run."""
    return dataclasses.replace(empty(), length_tokens=on_device([0, 45], jnp.int32))


@functools.cache
def filled(cache_format="f32"):
    """Parameters, that cache after 45 tokens in slot 1, and the tokens."""
    params = ds.init_params(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, 45)
    step = ds.StepInput(
        token_ids=jnp.asarray(tokens, jnp.int32),
        request_ids=jnp.zeros(45, jnp.int32),
        request_slots=jnp.array([1], jnp.int32),
    )
    prefill = jax.jit(ds.prefill, static_argnames="config")
    cache, _ = prefill(params, empty(cache_format), step, config=CONFIG)
    return params, cache, tokens


@pytest.mark.slow
def test_a_request_is_read_as_it_was_written():
    """Row by row what the format stores; where nothing is, NaN."""
    _, exact, _ = filled()
    view = ds.inspect(exact, 1)
    assert view.length_tokens == 45
    assert view.block_table.tolist() == [4]
    for layer in view.layers:
        live = layer.ring_positions >= 0
        expected = [p for row in range(WINDOW) for p in range(45 - WINDOW, 45) if p % WINDOW == row]
        assert layer.ring_positions.tolist() == expected
        assert live.all()
        assert layer.cursor == 45 % WINDOW
        pool = exact.state[ds.AttentionType(layer.attn_type)]
        family = next(s.family_idx for s in exact.schemas if s.layer_idx == layer.layer_idx)
        np.testing.assert_array_equal(layer.ring, pool.window["values"][family, 1])
        if layer.attn_type == "swa":
            assert layer.entries.size == layer.tail_values.size == layer.num_open_tokens == 0
            continue
        ratio = layer.compression_ratio
        paged = exact.paged[ds.AttentionType(layer.attn_type)]
        assert layer.num_open_tokens == 45 % ratio
        assert len(layer.entries) == 45 // ratio
        assert set(layer.blocks) <= {4}
        stored = paged.entries["values"][family, 4, : 45 // ratio]
        np.testing.assert_array_equal(layer.entries, stored)
        if layer.attn_type == "csa":
            open_tokens = set(range((45 // ratio - 1) * ratio, 45))
            assert set(layer.tail_positions.tolist()) - {-1} == open_tokens
            assert np.isfinite(layer.tail_values[layer.tail_positions >= 0]).all()
            assert np.isnan(layer.tail_values[layer.tail_positions < 0]).all()
            assert layer.index_keys.shape == (45 // ratio, CONFIG.indexer_head_dim)
        else:
            assert np.isfinite(layer.running).all() == (45 % ratio > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_format", "share"), [("bf16", 0.004), ("fp8_ue8m0", 0.1), ("fp8_per_entry", 0.1)]
)
def test_what_is_rounded_is_near(cache_format, share):
    """In root mean square: E4M3 rounds by 2.5 % here, and layers see what earlier ones did."""
    (_, exact, _), (_, cache, _) = filled(), filled(cache_format)
    for one, two in zip(ds.inspect(exact, 1).layers, ds.inspect(cache, 1).layers, strict=True):
        for name in ("ring", "entries"):
            expected, found = getattr(one, name), getattr(two, name)
            assert found.shape == expected.shape
            assert np.linalg.norm(found - expected) <= share * np.linalg.norm(expected)


@pytest.mark.slow
def test_an_empty_slot_holds_nothing():
    _, cache, _ = filled()
    view = ds.inspect(cache, 0)
    assert (view.length_tokens, view.block_table.size) == (0, 0)
    for layer in view.layers:
        assert (layer.ring_positions == -1).all()
        assert np.isnan(layer.ring).all()
        assert len(layer.entries) == layer.num_open_tokens == 0


@pytest.mark.slow
def test_the_selection_is_that_of_forward():
    """And nothing of the cache has changed."""
    params, cache, tokens = filled()
    before = jax.tree.map(np.asarray, cache)
    view = ds.inspect(cache, 1, params=params, config=CONFIG, next_token=7)
    jax.tree.map(np.testing.assert_array_equal, before, cache)

    @jax.jit
    def selections(sequence):
        seen = []

        def selector(selection):
            seen.append(select_by_score(selection)[0, -1])
            return select_by_score(selection)

        ds.forward(params, sequence, config=CONFIG, selector=selector)
        return seen

    seen = selections(jnp.asarray([[*tokens, 7]], jnp.int32))
    csa = [layer for layer in view.layers if layer.attn_type == "csa"]
    assert len(csa) == len(seen) > 0
    for layer, expected in zip(csa, seen, strict=True):
        np.testing.assert_array_equal(layer.selected, expected[: len(layer.entries)])
        assert layer.selected.sum() == CONFIG.indexer_top_k
    assert all(layer.selected is None for layer in view.layers if layer.attn_type != "csa")


def test_every_layer_has_a_picture():
    """What it shows is what the arrays say."""
    view = ds.inspect(of_45_tokens(), 1)
    for layer in view.layers:
        axes = view.plot(layer.layer_idx).axes
        assert len(axes) == (1 if layer.attn_type == "swa" else 3)
        (points, _) = axes[0].lines
        np.testing.assert_array_equal(points.get_ydata(), layer.ring_positions)
        if layer.entries_per_block:
            (image,) = axes[2].images
            assert int(np.sum(image.get_array())) == len(layer.entries)
            assert [t.get_text() for t in axes[2].get_yticklabels()] == ["4"]
    with pytest.raises(ValueError, match=r"layer_idx must be one of \[0, .*, got 99"):
        view.plot(99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": 2}, "slot must be"),
        ({"slot": True}, "slot must be"),
        ({"cache": None}, "cache must be"),
        ({"next_token": 3}, "params, config and next_token must be given together"),
        ({"params": None, "config": CONFIG, "next_token": 3}, "must be given together"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ds.inspect(**{"cache": of_45_tokens(), "slot": 1} | changes)
