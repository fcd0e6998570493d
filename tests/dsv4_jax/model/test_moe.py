"""Routing: which experts a token picks, and with what weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.model.moe import route

CONFIG = ds.DSV4Config.tiny()  # 8 experts, 3 of them for a token; the first two layers hash
PARAMS = ds.init_params(CONFIG, jax.random.key(0), dtype=jnp.float32)
LAYERS = [layer_schedule(CONFIG)[number] for number in (0, 3)]
HASHED, LEARNED = jax.jit(lambda params: [params.layer(layer).ffn for layer in LAYERS])(PARAMS)
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, CONFIG.hidden_size)), jnp.float32)
TOKENS = jnp.arange(5, dtype=jnp.int32)


K, E = CONFIG.num_experts_per_token, CONFIG.num_routed_experts


def test_of_equal_scores_the_lower_number_is_picked():
    equal = dataclasses.replace(
        LEARNED, gate=jnp.zeros_like(LEARNED.gate), bias=jnp.zeros_like(LEARNED.bias)
    )
    picked, _ = route(equal, X, TOKENS, CONFIG)
    np.testing.assert_array_equal(picked, np.tile(np.arange(K), (5, 1)))


def test_the_best_are_picked_best_first():
    logits = np.asarray(X, np.float64) @ np.asarray(LEARNED.gate, np.float64).T
    scores = np.sqrt(np.log1p(np.exp(logits))) + np.asarray(LEARNED.bias, np.float64)
    picked, _ = route(LEARNED, X, TOKENS, CONFIG)
    np.testing.assert_array_equal(picked, np.argsort(-scores, axis=1)[:, :K])


def test_the_bias_decides_who_is_picked_and_not_with_what_weight():
    favoured = LEARNED.bias.at[6].add(100.0)
    picked, weights = route(dataclasses.replace(LEARNED, bias=favoured), X, TOKENS, CONFIG)
    assert np.all(np.asarray(picked)[:, 0] == 6)
    logits = np.asarray(X, np.float64) @ np.asarray(LEARNED.gate, np.float64).T
    scores = np.take_along_axis(np.sqrt(np.log1p(np.exp(logits))), np.asarray(picked), axis=1)
    expected = scores / scores.sum(axis=1, keepdims=True) * CONFIG.routed_scaling_factor
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_a_hash_layer_picks_by_the_token():
    picked, _ = route(HASHED, X, TOKENS, CONFIG)
    np.testing.assert_array_equal(picked, np.asarray(HASHED.tid2eid)[:5])


def test_a_router_of_nan_picks_distinct_experts():
    broken = dataclasses.replace(LEARNED, gate=LEARNED.gate.at[3].set(jnp.nan))
    picked, _ = route(broken, X, TOKENS, CONFIG)
    assert all(len(set(row)) == K and 3 not in row for row in np.asarray(picked).tolist())
