"""Logits to tokens: what changes logits, which tokens are left, and which of them is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.collectives import gather_over_model, join_last_axis
from dsv4_jax.mesh import MODEL, axis_size, place_on
from dsv4_jax.step.sampling import MAX_LOGPROBS, FullSampling, Sampling
from pallas_kernels import limit_tokens, select_top_k
from pallas_kernels.common import backend

type Sampler = Callable[[jax.Array, FullSampling, jax.Array], jax.Array]
"""Arguments and result as of `sample`, with the logits of the whole vocabulary."""


@flax.struct.dataclass(kw_only=True)
class DrawnCounts:
    """How often rows have drawn which tokens, for their penalties: E entries of all rows together.

    A table of every row and token would be hundreds of megabytes. A row has entries for the tokens
    that it has drawn, in any order; those of the same token add up.

    Attributes:
      rows: i32[E], the row of the call that an entry is of; -1 for none.
      token_ids: i32[E].
      counts: i32[E].
    """

    rows: jax.Array
    token_ids: jax.Array
    counts: jax.Array


@flax.struct.dataclass(kw_only=True)
class TokenMasks:
    """Which tokens rows may draw, for their grammars.

    Attributes:
      is_masked: bool[B], rows that have a mask.
      bits: u32[B, n, W], the tokens of each of n draws, the lowest bit first, each draw as if the
        drafts before it had been drawn; a draw allows one token at least. W words have a bit for
        each of V tokens at least, and what is beyond says nothing.
    """

    is_masked: jax.Array
    bits: jax.Array


@flax.struct.dataclass(kw_only=True)
class Logprobs:
    """Log-probabilities of draws: the log-softmax of the logits as the model gave them.

    Neither bias, penalties, masks, temperature nor limits are in them. N is `MAX_LOGPROBS`, or V if
    that is less. Where no row asks for them they are all 0.

    Attributes:
      drawn: f32[B, n], of the drawn tokens.
      token_ids: i32[B, n, N], the most likely tokens, the lower of equals first.
      top: f32[B, n, N], those tokens' own, descending.
    """

    drawn: jax.Array
    token_ids: jax.Array
    top: jax.Array


def sample(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Draws one token per row.

    Args:
      logits: f32[B, V]; where a step runs on a mesh, this device's part of the vocabulary.
      sampling: settings of each row.
      positions: i32[B], position that each drawn token will have.

    Returns:
      i32[B]. A row's result depends on its own logits, settings and position, not on other rows.

    Raises:
      ValueError: an argument has another type, shape or dtype.
    """
    checks.array("logits", logits, (None, None), "f")
    checks.instance("sampling", sampling, Sampling)
    num_rows = logits.shape[0]
    checks.array("positions", positions, (num_rows,))
    checks.array("sampling.temperature", sampling.temperature, (num_rows,), "f")
    return guess(logits, sampling, positions, None)


def guess(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    counts: DrawnCounts | None,
    sampler: Sampler | None = None,
) -> jax.Array:
    """`sample`, with penalties of tokens that were drawn before, or by another sampler; i32[B]."""
    drafts = jnp.zeros((logits.shape[0], 0), jnp.int32)
    logits, positions = logits[:, None], positions[:, None]
    drawn, _ = draw(logits, sampling, positions, counts, drafts, sampler, can_bring_logprobs=False)
    return drawn[:, 0]


def draw(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    counts: DrawnCounts | None,
    drafts: jax.Array,
    sampler: Sampler | None = None,
    masks: TokenMasks | None = None,
    *,
    can_bring_logprobs: bool = True,
) -> tuple[jax.Array, Logprobs]:
    """Draws n tokens per row, each as if the drafts before it had been drawn.

    On a GPU nothing is decided at run time: its host would wait for what is, before it launches
    what follows. A CPU leaves out noise, limits and log-probabilities for which no row asks. Where
    `sampling` is simple less is computed, and on a mesh only each device's best token leaves it. A
    row draws the same either way.

    Args:
      logits: f32[B, n, V]; where a step runs on a mesh, this device's part of the vocabulary.
      sampling: settings of each row.
      positions: i32[B, n], position that each drawn token will have.
      counts: what rows have drawn before; None is nothing.
      drafts: i32[B, n - 1], tokens between those that are drawn.
      sampler: draws in the place of `sample`, from logits with bias, penalties and masks; None
        does not. It is given a `FullSampling`.
      masks: which tokens rows may draw; None is all.
      can_bring_logprobs: log-probabilities are computed where a row asks for them.

    Returns:
      i32[B, n], and their log-probabilities.

    Raises:
      ValueError: the sampler gives no integer for each draw.
    """
    shape = (*positions.shape, min(MAX_LOGPROBS, logits.shape[-1] * axis_size(MODEL)))
    none = Logprobs(
        drawn=jnp.zeros(positions.shape, jnp.float32),
        token_ids=jnp.zeros(shape, jnp.int32),
        top=jnp.zeros(shape, jnp.float32),
    )
    if not isinstance(sampling, FullSampling):
        logits = logits if masks is None else _mask(logits, masks, place_on(MODEL))
        if sampler is None:
            return _draw_simply(logits, sampling, positions), none
        return _ask(sampler, join_last_axis(logits), sampling.completed(), positions), none
    every = join_last_axis(logits)
    drawn = _choose(every, sampling, positions, counts, drafts, masks, sampler)
    if not can_bring_logprobs:
        return drawn, none
    asks = sampling.wants_logprobs
    logprobs = _if_asked(asks, lambda: _logprobs(every, drawn), none)
    return drawn, jax.tree.map(lambda x: jnp.where(jnp.any(asks), x, 0), logprobs)


def _if_asked[T](asks: jax.Array, compute: Callable[[], T], otherwise: T) -> T:
    """What some row of bool[B] asks for; without one either that or `otherwise`, whichever is fast.

    A CPU is spared some 50 ms for each row of V4's vocabulary. A GPU computes it in any case.
    """
    if backend.compute_capability() is None:
        return jax.lax.cond(jnp.any(asks), compute, lambda: otherwise)
    return compute()


def _most_likely(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., V] -> i32[...] and f32[...]: the largest logit's token and it; of equals the lower id.

    On a mesh only each device's best leaves it.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    values = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
    shard = place_on(MODEL)
    if isinstance(shard, int):
        return best, values
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    mine = jnp.stack([bits, best + shard * logits.shape[-1]])
    bits, tokens = jnp.moveaxis(gather_over_model(mine), 1, 0)
    of_all = jax.lax.bitcast_convert_type(bits, jnp.float32)
    winner = jnp.argmax(of_all, axis=0)[None]
    token = jnp.take_along_axis(tokens, winner, axis=0)[0]
    return token, jnp.take_along_axis(of_all, winner, axis=0)[0]


def _draw_simply(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """i32[B, n]: greedy tokens, and draws of rows with a temperature."""
    greedy, largest = _most_likely(logits)
    scaled = _scaled(logits, largest, sampling)
    noise = _noise_of(sampling, positions, logits.shape[-1], place_on(MODEL))
    drawn, _ = _most_likely(jnp.where(_likely(scaled, sampling), scaled + noise, -jnp.inf))
    return jnp.where(sampling.temperature[:, None] > 0, drawn, greedy)


def _choose(
    every: jax.Array,
    sampling: FullSampling,
    positions: jax.Array,
    counts: DrawnCounts | None,
    drafts: jax.Array | None,
    masks: TokenMasks | None,
    sampler: Sampler | None,
) -> jax.Array:
    """i32[B, n]: a token for each of f32[B, n, V], whatever rows ask for.

    What changes logits comes first and concerns greedy rows too. What top-k, top-p and min-p leave
    out comes after the temperature.
    """
    changed = _penalise(_add_bias(every, sampling), sampling, counts, drafts)
    if masks is not None:
        changed = _mask(changed, masks)
    if sampler is not None:
        return _ask(sampler, changed, sampling, positions)
    greedy = jnp.argmax(changed, axis=-1).astype(jnp.int32)
    scaled = _scaled(changed, jnp.max(changed, axis=-1), sampling)
    allowed = _ranked_high(scaled, sampling) & _likely(scaled, sampling)
    noisy = scaled + _noise_of(sampling, positions, every.shape[-1])
    drawn = jnp.argmax(jnp.where(allowed, noisy, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where(sampling.temperature[:, None] > 0, drawn, greedy)


def _ask(
    sampler: Sampler, logits: jax.Array, sampling: FullSampling, positions: jax.Array
) -> jax.Array:
    """i32[B, n]: what a sampler draws, within the vocabulary."""
    width, vocab_size = logits.shape[1:]
    per_draw = jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), sampling)
    drawn: Any = sampler(logits.reshape(-1, vocab_size), per_draw, positions.reshape(-1))
    shape = (positions.size,)
    if getattr(drawn, "shape", None) != shape or not jnp.issubdtype(drawn.dtype, jnp.integer):
        checks.refuse("what a sampler gives", f"int32{list(shape)}, one token per row", drawn)
    return jnp.clip(drawn.astype(jnp.int32), 0, vocab_size - 1).reshape(positions.shape)


def _add_bias(logits: jax.Array, sampling: FullSampling) -> jax.Array:
    """Adds each row's own values to its tokens' logits."""
    if not sampling.bias.shape[1]:
        return logits
    num_rows, _, vocab_size = logits.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    added = jnp.zeros((num_rows, vocab_size), jnp.float32)
    added = added.at[rows, sampling.bias_token_ids].add(
        sampling.bias, mode="drop", wrap_negative_indices=False
    )
    return logits + added[:, None]


def _penalise(
    logits: jax.Array,
    sampling: FullSampling,
    counts: DrawnCounts | None,
    drafts: jax.Array | None,
) -> jax.Array:
    """Subtracts presence once and frequency once a time, of tokens that were drawn before."""
    if counts is None:
        return logits
    num_rows, width, vocab_size = logits.shape
    write = {"mode": "drop", "wrap_negative_indices": False}
    seen = jnp.zeros((num_rows, vocab_size), jnp.int32)
    seen = seen.at[counts.rows, counts.token_ids].add(counts.counts, **write)[:, None]
    if drafts is not None and width > 1:
        row, number, draft = jnp.indices((num_rows, width, width - 1), dtype=jnp.int32)
        before = jnp.where(draft < number, drafts[:, None], -1)
        seen = jnp.broadcast_to(seen, logits.shape).at[row, number, before].add(1, **write)
    once = sampling.presence_penalty[:, None, None] * (seen > 0).astype(jnp.float32)
    each = sampling.frequency_penalty[:, None, None] * seen.astype(jnp.float32)
    return logits - (once + each)


def _mask(logits: jax.Array, masks: TokenMasks, shard: jax.Array | int = 0) -> jax.Array:
    """Minus infinity for tokens that masked rows must not draw, of part `shard` of V tokens."""
    num_rows, width, num_tokens = logits.shape
    places = jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 1, 32)
    allowed = (masks.bits[:, :width, :, None] >> places) & 1
    allowed = allowed.reshape(num_rows, width, -1) > 0
    allowed = jax.lax.dynamic_slice_in_dim(allowed, shard * num_tokens, num_tokens, axis=2)
    return jnp.where(allowed | ~masks.is_masked[:, None, None], logits, -jnp.inf)


def _scaled(logits: jax.Array, largest: jax.Array, sampling: Sampling) -> jax.Array:
    """f32[B, n, V]: logits below the largest f32[B, n], divided by the temperature."""
    # Below the largest first, so that a small temperature cannot overflow.
    below = logits - largest[..., None]
    warm = sampling.temperature > 0
    return below / jnp.where(warm, sampling.temperature, 1.0)[:, None, None]


def _noise_of(
    sampling: Sampling, positions: jax.Array, num_tokens: int, shard: jax.Array | int = 0
) -> jax.Array:
    """f32[B, n, V] Gumbel noise of part `shard` of the vocabulary, which has V tokens.

    The largest of logits plus noise is a draw from their softmax. If no row has a temperature, it
    may be zeros.
    """
    first = shard * num_tokens
    parts = 1 if isinstance(shard, int) else axis_size(MODEL)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        whole = _noise(seed, position, parts * num_tokens)
        return jax.lax.dynamic_slice_in_dim(whole, first, num_tokens) if parts > 1 else whole

    def of_all() -> jax.Array:
        return jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(sampling.seed, positions)

    none = jnp.zeros((*positions.shape, num_tokens), jnp.float32)
    return _if_asked(sampling.temperature > 0, of_all, none)


def _noise(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab_size,))


def _ranked_high(scaled: jax.Array, sampling: FullSampling) -> jax.Array:
    """bool[B, n, V]: tokens that top-k and top-p leave; of equals the lower id comes first."""
    shape, vocab_size = scaled.shape[:2], scaled.shape[2]
    # Greedy rows take the first token anyway: without limits nothing is looked for.
    warm = sampling.temperature > 0
    top_k, top_p = jnp.where(warm, sampling.top_k, 0), jnp.where(warm, sampling.top_p, 1.0)
    top_k, top_p = (jnp.repeat(each, shape[1]) for each in (top_k, top_p))
    rows = scaled.reshape(-1, vocab_size)
    unlimited = jnp.full(len(rows), -jnp.inf), jnp.full(len(rows), vocab_size - 1, jnp.int32)
    limits = _if_asked(
        (top_k > 0) | (top_p < 1), lambda: limit_tokens(rows, top_k, top_p), unlimited
    )
    least, last = (limit.reshape(*shape, 1) for limit in limits)
    token_ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 2)
    return (scaled > least) | ((scaled == least) & (token_ids <= last))


def _likely(scaled: jax.Array, sampling: Sampling) -> jax.Array:
    """bool[B, n, V]: tokens at least min_p as likely as the likeliest; `scaled` is 0 there."""
    return scaled >= jnp.log(sampling.min_p)[:, None, None]


def _logprobs(every: jax.Array, drawn: jax.Array) -> Logprobs:
    """Log-softmax of f32[B, n, V] at the drawn tokens i32[B, n], and where it is largest."""
    shape, vocab_size = every.shape[:2], every.shape[2]
    rows = every.reshape(-1, vocab_size)
    visible = jnp.full(rows.shape[0], vocab_size, jnp.int32)
    best = select_top_k(rows, visible, min(MAX_LOGPROBS, vocab_size))
    negated = -jnp.take_along_axis(rows, best, axis=1)
    negated, best = jax.lax.sort((negated, best), num_keys=1, is_stable=True)  # best ascends
    values, token_ids = -negated.reshape(*shape, -1), best.reshape(*shape, -1)
    largest = values[..., :1]
    log_sum = jnp.log(jnp.sum(jnp.exp(every - largest), axis=-1, keepdims=True))
    own = jnp.take_along_axis(every, drawn[..., None], axis=-1)
    return Logprobs(
        drawn=(own - largest - log_sum)[..., 0],
        token_ids=token_ids,
        top=values - largest - log_sum,
    )
