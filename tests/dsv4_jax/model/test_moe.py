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
HASHED, LEARNED = (PARAMS.layer(layer_schedule(CONFIG)[number]).ffn for number in (0, 3))
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, CONFIG.hidden_size)), jnp.float32)
TOKENS = jnp.arange(5, dtype=jnp.int32)


def picked(params):
    """bool[T, E]."""
    return np.asarray(route(params, X, TOKENS, CONFIG)) > 0


def test_of_equal_scores_the_lower_number_is_picked():
    equal = dataclasses.replace(
        LEARNED, gate=jnp.zeros_like(LEARNED.gate), bias=jnp.zeros_like(LEARNED.bias)
    )
    expected = np.arange(CONFIG.num_routed_experts) < CONFIG.num_experts_per_token
    np.testing.assert_array_equal(picked(equal), np.tile(expected, (5, 1)))


def test_the_bias_decides_who_is_picked_and_not_with_what_weight():
    favoured = LEARNED.bias.at[6].add(100.0)
    share = np.asarray(route(dataclasses.replace(LEARNED, bias=favoured), X, TOKENS, CONFIG))
    assert np.all(share[:, 6] > 0)
    np.testing.assert_allclose(share.sum(axis=1), CONFIG.routed_scaling_factor, rtol=1e-6)
    logits = np.asarray(X, np.float64) @ np.asarray(LEARNED.gate, np.float64).T
    scores = np.sqrt(np.log1p(np.exp(logits))) * (share > 0)
    expected = scores / scores.sum(axis=1, keepdims=True) * CONFIG.routed_scaling_factor
    np.testing.assert_allclose(share, expected, rtol=1e-5)


def test_a_hash_layer_picks_by_the_token():
    table = np.asarray(HASHED.tid2eid)[:5]
    expected = np.zeros((5, CONFIG.num_routed_experts), bool)
    np.put_along_axis(expected, table, True, axis=1)
    np.testing.assert_array_equal(picked(HASHED), expected)
