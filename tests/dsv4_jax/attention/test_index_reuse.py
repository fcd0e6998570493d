"""IndexCache: layers that attend to what an earlier layer selected; off unless asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.config.layer_schedule import split_into_segments
from helpers.schedules import run_cuts

pytestmark = pytest.mark.unoptimised

SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    num_mtp_layers=0,
    layer_types=(CSA, HCA, CSA, HCA, CSA, CSA),
    router_types=(ds.RouterType.LEARNED,) * 6,
    indexer_top_k=3,
)
jit_forward = jax.jit(ds.forward, static_argnames=("config", "selector"))


def reusing(*layers):
    return dataclasses.replace(CONFIG, index_reuse=layers)


def test_the_schedule_names_the_source():
    sources = [spec.index_source for spec in ds.layer_schedule(reusing(2, 5))]
    assert sources == [None, None, 0, None, None, 4]
    assert all(spec.index_source is None for spec in ds.layer_schedule(CONFIG))


def test_layers_that_differ_are_not_scanned_together():
    pattern = dataclasses.replace(CONFIG, layer_types=(HCA, CSA) * 3)
    repeats = [s.repeats for s in split_into_segments(ds.layer_schedule(pattern))]
    assert repeats == [3]
    some = dataclasses.replace(pattern, index_reuse=(3, 5))
    repeats = [s.repeats for s in split_into_segments(ds.layer_schedule(some))]
    assert repeats == [1, 1, 2]


@pytest.fixture(scope="module")
def case():
    params = ds.init_params(CONFIG, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 70)
    return params, tokens.tolist()


@pytest.mark.slow
def test_the_cache_and_the_whole_history_agree(case):
    """Prefill and decode, where fewer entries are selected than there are."""
    _, tokens = case
    plain_config = dataclasses.replace(
        CONFIG, layer_types=(CSA, CSA), router_types=CONFIG.router_types[:2]
    )
    config = dataclasses.replace(plain_config, index_reuse=(1,))
    params = ds.init_params(config, jax.random.key(0))
    whole = np.asarray(jit_forward(params, jnp.asarray([tokens]), config=config)[0])
    cache = ds.init_cache(config, max_requests=1, max_context_tokens=128, cache_format="f32")
    cuts = [[24, 20, *[1] * 26]]
    run = run_cuts(config, params, cache, [tokens], cuts, slots=[0], num_tokens=24)
    np.testing.assert_allclose(np.stack(run.logits[0]), whole, atol=2e-5, rtol=0)
    plain = np.asarray(jit_forward(params, jnp.asarray([tokens]), config=plain_config)[0])
    np.testing.assert_allclose(whole[:12], plain[:12], atol=2e-5, rtol=0)  # all are selected
    assert np.abs(whole[20:] - plain[20:]).max() > 1e-3


@pytest.mark.slow
def test_a_reusing_layer_never_asks_its_own_indexer(case):
    """Its scores could be anything; those of its source could not."""
    params, tokens = case
    ids = jnp.asarray([tokens])

    def without(config, kind_idx):
        layer = params.layers["csa_learned"]
        indexer = layer.attn.indexer
        weights = indexer.weights_proj.at[kind_idx].multiply(-1.0)
        attn = dataclasses.replace(
            layer.attn, indexer=dataclasses.replace(indexer, weights_proj=weights)
        )
        layers = {**params.layers, "csa_learned": dataclasses.replace(layer, attn=attn)}
        return jit_forward(dataclasses.replace(params, layers=layers), ids, config=config)

    config = reusing(2, 5)
    expected = jit_forward(params, ids, config=config)
    np.testing.assert_array_equal(without(config, 1), expected)  # layer 2, the second CSA layer
    assert np.abs(np.asarray(without(config, 0) - expected)).max() > 1e-3


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((0,), "must leave a CSA layer before layer 0"),
        ((0, 2), "must leave a CSA layer before layer 0"),
        ((1,), "must name CSA layers, got layer 1"),
        ((6,), "must name CSA layers, got layer 6"),
        ((-1,), "at least 0, got -1"),
    ],
)
def test_layers_that_cannot_reuse_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        reusing(*layers)
