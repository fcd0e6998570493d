"""Laws by which the routers of random weights pick experts, and how many different ones that makes.

Such routers pick by chance where no bias of theirs favours an expert. By the law "uniform" all
experts are picked alike, and by "zipf" the r-th of them as often as 1 / r, in an order that each
layer has of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench.noise import random_bits
from dsv4_jax.config import DSV4Config

LAWS: Mapping[str, float] = MappingProxyType({"uniform": 0.0, "zipf": 1.0})
"""Exponents of the laws by which routers of random weights pick."""

_DRAWS = 2**15
_SCORES = 2**16


@functools.cache
def pick_chances(number: int, count: int, exponent: float) -> np.ndarray:
    """f64[number], descending: how likely it is that a token picks each of its `count` experts.

    A token picks one after the other, none twice, the r-th of those left as often as
    r**-exponent: by the largest of log weight and Gumbel noise. They add up to `count`.
    """
    if not exponent:
        return np.full(number, count / number)
    rng, picked = np.random.default_rng(0), np.zeros(number)
    weight = -exponent * np.log(np.arange(1, number + 1))
    for _ in range(_DRAWS // 1024):
        noise = rng.gumbel(size=(1024, number)) + weight
        best = np.argpartition(-noise, count - 1, axis=-1)[:, :count]
        picked += np.bincount(best.ravel(), minlength=number)
    return np.sort(picked / _DRAWS)[::-1]


def expected_experts(config: DSV4Config, *, rows: int, exponent: float = 0.0) -> float:
    """Different experts of a layer that so many tokens pick, each for itself."""
    chances = pick_chances(config.num_routed_experts, config.num_experts_per_token, exponent)
    return float(np.sum(1 - (1 - chances) ** rows))


def router_bias(config: DSV4Config, law: str, seed: int) -> np.ndarray:
    """f32[E] that make tokens of random hidden states pick by a law.

    Logits of routers are taken to be normal, with variance 1, as those of `random_params` are. An
    expert is picked if its score and its bias pass what the last one picked has, which differs
    little from token to token where experts are many.
    """
    number = config.num_routed_experts
    exponent = LAWS[law]
    if not exponent:
        return np.zeros(number, np.float32)
    chances = pick_chances(number, config.num_experts_per_token, exponent)
    bias = -np.quantile(_scores(), 1 - chances)
    bias -= bias.mean()
    return bias[np.random.default_rng(seed).permutation(number)].astype(np.float32)


def expert_table(shape: tuple[int, ...], config: DSV4Config, law: str, seed: int) -> jax.Array:
    """i32[V, k]: the experts of each token of a hash layer, which are distinct."""
    number, exponent = config.num_routed_experts, LAWS[law]
    order = np.random.default_rng(seed).permutation(number).astype(np.int32)
    if not exponent:
        return _consecutive(np.uint32(seed), shape, number)
    return _drawn_by_zipf(np.uint32(seed), jnp.asarray(order), shape, exponent)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _consecutive(seed: jax.Array, shape: tuple[int, ...], number: int) -> jax.Array:
    """Experts that follow each other (modulo their number), so that a token's are distinct."""
    first = random_bits((*shape[:-1], 1), seed) >> 8
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return ((first + index) % number).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _drawn_by_zipf(
    seed: jax.Array, order: jax.Array, shape: tuple[int, ...], exponent: float
) -> jax.Array:
    number = order.shape[0]
    share = (random_bits((*shape[:-1], number), seed) >> 8).astype(jnp.float32) + 0.5
    noise = -jnp.log(-jnp.log(share / 2**24))
    weight = -exponent * jnp.log(jnp.arange(1, number + 1, dtype=jnp.float32))
    return order[jax.lax.top_k(noise + weight[None], shape[-1])[1]]


@functools.cache
def _scores() -> np.ndarray:
    """f64[n] of scores: the square root of the softplus of a normal logit."""
    logits = np.random.default_rng(0).standard_normal(_SCORES)
    return np.sqrt(np.logaddexp(0, logits))
