"""Logits to tokens: greedy, temperature, top-k, top-p, one seed per request."""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass(kw_only=True)
class Sampling:
    """How each row draws its tokens.

    Attributes:
      temperature: f32[B]; 0 takes the most likely token.
      top_k: i32[B], draws among that many most likely tokens; 0 is no limit.
      top_p: f32[B], draws among the most likely tokens that together have that probability.
      seed: u32[B]; the noise of a draw follows from it and the drawn token's position alone.
      stop_token_ids: i32[B, n], padded with -1.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    stop_token_ids: jax.Array


def make_sampling(
    num_rows: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] = (),
) -> Sampling:
    """The same settings for every row; `seed` may be one per row.

    Raises:
      ValueError: a setting is out of range.
    """
    check_sampling(temperature, top_k, top_p)
    seeds = [seed] * num_rows if isinstance(seed, int | np.integer) else list(seed)
    if len(seeds) != num_rows:
        raise ValueError(f"seed must be one, or one per row ({num_rows}), got {len(seeds)}")
    stops = np.asarray(stop_token_ids, np.int32).reshape(1, -1)
    if not stops.size:
        stops = np.full((1, 1), -1, np.int32)
    return Sampling(
        temperature=jnp.full(num_rows, temperature, jnp.float32),
        top_k=jnp.full(num_rows, top_k, jnp.int32),
        top_p=jnp.full(num_rows, top_p, jnp.float32),
        seed=jnp.asarray([int(s) % 2**32 for s in seeds], jnp.uint32),
        stop_token_ids=jnp.asarray(np.repeat(stops, num_rows, axis=0)),
    )


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuses what `make_sampling` does not take.

    Raises:
      ValueError: a setting is out of range.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or more, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (no limit) or more, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def sample(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Draws one token per row.

    Args:
      logits: f32[B, V].
      sampling: of each row.
      positions: i32[B], position that each drawn token will have.

    Returns:
      i32[B]. A row's result depends on its own logits, settings and position, not on other rows.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = sampling.temperature > 0

    def draw() -> jax.Array:
        # Below the largest first, so that a small temperature cannot overflow.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = below / jnp.where(warm, sampling.temperature, 1.0)[:, None]
        allowed = _allowed(scaled, sampling)
        noisy = scaled + jax.vmap(_noise, in_axes=(0, 0, None))(
            sampling.seed, positions, logits.shape[-1]
        )
        drawn = jnp.argmax(jnp.where(allowed, noisy, -jnp.inf), axis=-1)
        return jnp.where(warm, drawn.astype(jnp.int32), greedy)

    return jax.lax.cond(jnp.any(warm), draw, lambda: greedy)


def _noise(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """f32[V] Gumbel noise: the largest of logits plus noise is a draw from their softmax."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab_size,))


def _allowed(scaled: jax.Array, sampling: Sampling) -> jax.Array:
    """bool[B, V]: tokens that top-k and top-p leave; of equal logits the lower id comes first."""
    vocab_size = scaled.shape[-1]
    order = jnp.argsort(scaled, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(jax.nn.softmax(scaled, axis=-1), order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    limit = jnp.where(sampling.top_k > 0, sampling.top_k, vocab_size)
    kept = (jnp.arange(vocab_size)[None] < limit[:, None]) & (before < sampling.top_p[:, None])
    kept = kept.at[:, 0].set(True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(kept, rank, axis=-1)
