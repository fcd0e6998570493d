"""Routing: which experts a token picks, and with what weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.model.moe import route
from helpers.arrays import on_device

CONFIG = ds.DSV4Config.tiny()  # 8 experts, 3 of them for a token; the first two layers hash
X = on_device(np.random.default_rng(0).normal(size=(5, CONFIG.hidden_size)), jnp.float32)
TOKENS = on_device(np.arange(5), jnp.int32)
K = CONFIG.num_experts_per_token
jit_route = jax.jit(route, static_argnums=3)


@pytest.fixture(scope="module")
def routers():
    """Those of a layer that hashes and of one that has learned, on the host."""
    params = ds.init_params(CONFIG, jax.random.key(0), dtype=jnp.float32)
    layers = [layer_schedule(CONFIG)[number] for number in (0, 3)]
    found = jax.jit(lambda params: [params.layer(layer).ffn for layer in layers])(params)
    return jax.tree.map(np.array, found)


@pytest.fixture
def hashed(routers):
    return routers[0]


@pytest.fixture
def learned(routers):
    return routers[1]


def test_of_equal_scores_the_lower_number_is_picked(learned):
    equal = dataclasses.replace(
        learned, gate=np.zeros_like(learned.gate), bias=np.zeros_like(learned.bias)
    )
    picked, _ = jit_route(equal, X, TOKENS, CONFIG)
    np.testing.assert_array_equal(picked, np.tile(np.arange(K), (5, 1)))


def test_the_best_are_picked_best_first(learned):
    logits = np.asarray(X, np.float64) @ np.asarray(learned.gate, np.float64).T
    scores = np.sqrt(np.log1p(np.exp(logits))) + np.asarray(learned.bias, np.float64)
    picked, _ = jit_route(learned, X, TOKENS, CONFIG)
    np.testing.assert_array_equal(picked, np.argsort(-scores, axis=1)[:, :K])


def test_the_bias_decides_who_is_picked_and_not_with_what_weight(learned):
    favoured = learned.bias.copy()
    favoured[6] += 100
    picked, weights = jit_route(dataclasses.replace(learned, bias=favoured), X, TOKENS, CONFIG)
    assert np.all(np.asarray(picked)[:, 0] == 6)
    logits = np.asarray(X, np.float64) @ np.asarray(learned.gate, np.float64).T
    scores = np.take_along_axis(np.sqrt(np.log1p(np.exp(logits))), np.asarray(picked), axis=1)
    expected = scores / scores.sum(axis=1, keepdims=True) * CONFIG.routed_scaling_factor
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_a_hash_layer_picks_by_the_token(hashed):
    picked, _ = jit_route(hashed, X, TOKENS, CONFIG)
    np.testing.assert_array_equal(picked, np.asarray(hashed.tid2eid)[:5])


def test_a_router_of_nan_picks_distinct_experts(learned):
    gate = learned.gate.copy()
    gate[3] = np.nan
    picked, _ = jit_route(dataclasses.replace(learned, gate=gate), X, TOKENS, CONFIG)
    assert all(len(set(row)) == K and 3 not in row for row in np.asarray(picked).tolist())
