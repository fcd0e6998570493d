"""Pooling of one window, the maths of `pooling.py`, a channel per lane, inside a Triton kernel.

A tile is f32[width], width a power of two; lanes past the entry's C channels hold zeros. Every
step rounds as `pooling.py` does and none sums in an order that a layout chooses, so the bits of
an entry are the same whatever the number of warps or the shape of the call. On a GPU, exp, rsqrt,
sine, cosine and one division may differ from the reference in their last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.gpu import triton
from pallas_kernels.gpu.triton_rope import round_to_dtype

Ref = Any
Pool = tuple[jax.Array, jax.Array, jax.Array]
Tokens = list[list[jax.Array]]
TOKEN = ("values", "scores")
"""What a token is to a pool, in the order of its tiles: a plane of rows each."""


def empty_pool(width: int) -> Pool:
    """Largest score, sum of exponentials and weighted sum of no tokens."""
    zeros = jnp.zeros(width, jnp.float32)
    return jnp.full(width, -jnp.inf, jnp.float32), zeros, zeros


def fold(pool: Pool, value: jax.Array, score: jax.Array) -> Pool:
    """Adds a token.

    Of the reference's two exponentials one is always exp(0) = 1, and a product with 1 is exact.
    """
    largest, total, weighted = pool
    rises = score > largest
    # The exponential of the smaller of the two; the larger one's weight is 1.
    factor = triton.exp_of_distance(score, largest)
    total_scaled, total_kept = jnp.where(rises, total, 1.0), jnp.where(rises, 1.0, total)
    scaled, kept = jnp.where(rises, weighted, value), jnp.where(rises, value, weighted)
    return (
        jnp.maximum(largest, score),
        triton.exact_product(factor, total_scaled) + total_kept,
        triton.exact_product(factor, scaled) + kept,
    )


def pool_tokens(tokens: Sequence[Sequence[jax.Array]]) -> Pool:
    """The pool of tokens, each a value and a score, in that order; in two passes, all at hand."""
    largest = functools.reduce(jnp.maximum, [score for _, score in tokens])
    # Sums go token by token, as in the reference: a lane has a channel, and needs no other.
    weights = [triton.exp(score - largest) for _, score in tokens]
    weighted = [
        triton.exact_product(w, value) for w, (value, _) in zip(weights, tokens, strict=True)
    ]
    # f32[width] each.
    return largest, functools.reduce(jnp.add, weights), functools.reduce(jnp.add, weighted)


def pool_overlapping(tokens: Sequence[Sequence[jax.Array]], has_before: jax.Array) -> Pool:
    """The pool of 2M tokens, M of the window before, if there is one, and M of the own one."""
    compression_ratio = len(tokens) // 2
    # Score minus infinity and value 0: a weight of 0, whatever the state held there.
    absent = [
        [
            select(has_before, value, jnp.zeros_like(value)),
            select(has_before, score, jnp.full_like(score, -jnp.inf)),
        ]
        for value, score in tokens[:compression_ratio]
    ]
    return pool_tokens([*absent, *tokens[compression_ratio:]])


def select(condition: jax.Array, chosen: jax.Array, other: jax.Array) -> jax.Array:
    """One of two tiles, by a scalar."""
    return jnp.where(jnp.broadcast_to(condition, chosen.shape), chosen, other)


def select_pool(condition: jax.Array, chosen: Pool, other: Pool) -> Pool:
    """One of two pools, by a scalar."""
    largest, total, weighted = (select(condition, a, b) for a, b in zip(chosen, other, strict=True))
    return largest, total, weighted


def continue_pool(
    ref: Ref,
    index: tuple[jax.Array, ...],
    carried: jax.Array,
    *,
    start: jax.Array | int,
    count: int,
    width: int,
) -> Pool:
    """Channels of the pool at [index] of f32[L, NS, 3, C]; empty where `carried` is False."""
    largest, total, weighted = (
        triton.load_row(ref, (*index, row), start=start, count=count, width=width, live=carried)
        for row in range(3)
    )
    return select_pool(carried, (largest, total, weighted), empty_pool(width))


def load_tokens(
    rows: Mapping[str, Ref],
    row: jax.Array,
    number: int,
    *,
    start: jax.Array | int,
    count: int,
    width: int,
) -> Tokens:
    """Values and scores of rows row .. row + number - 1 of f32[T, C], moved to where there are any.

    Args:
      rows: values and scores.
      row: i32[].
      number: rows; at most T.
      start: first channel.
      count: channels.
      width: lanes.
    """
    # Loads begin before it is known whether the window lies in the call: they stay inside, and what
    # is not the window's is dropped.
    row = jnp.clip(row, 0, rows["values"].shape[0] - number)
    load = functools.partial(triton.load_row, start=start, count=count, width=width, last=True)
    return [[load(rows[name], (row + n,)) for name in TOKEN] for n in range(number)]


def fold_window(
    tokens: Tokens,
    rows: Mapping[str, Ref],
    *,
    first: jax.Array,
    num_tokens: int,
    **columns: Any,
) -> Pool:
    """The pool of rows first .. first + num_tokens - 1 of values and scores f32[T, C].

    While a chunk is folded the next one's loads are in flight.

    Args:
      tokens: the first chunk, by `load_tokens`.
      rows: values and scores.
      first: first row.
      num_tokens: rows, no fewer than a chunk's.
      columns: as `load_tokens` takes them.
    """
    chunk = len(tokens)
    whole, rest = divmod(num_tokens, chunk)  # chunks, and tokens of a last one
    load = functools.partial(load_tokens, rows, **columns)

    def fold_all(pool: Pool, tokens: Tokens) -> Pool:
        return functools.reduce(lambda pool, token: fold(pool, *token), tokens, pool)

    def fold_and_load(number: jax.Array, carry: tuple[Pool, Tokens]) -> tuple[Pool, Tokens]:
        pool, tokens = carry
        # Asked for before the chunk at hand is folded, waited for after it.
        ahead = load(first + number * chunk, chunk)
        return fold_all(pool, tokens), ahead

    carry = empty_pool(columns["width"]), tokens
    pool, tokens = jax.lax.fori_loop(1, whole, fold_and_load, carry)
    ahead = load(first + whole * chunk, rest)
    return fold_all(fold_all(pool, tokens), ahead)


def fold_tokens(
    pool: Pool,
    rows: Mapping[str, Ref],
    *,
    first: jax.Array,
    num_tokens: jax.Array,
    chunk: int,
    start: jax.Array | int,
    count: int,
) -> Pool:
    """Folds rows first .. first + num_tokens - 1 of values and scores f32[T, C] into a pool.

    While a chunk is folded the next one's loads are in flight.

    Args:
      pool: of `count` channels from `start` on.
      rows: values and scores.
      first: first row.
      num_tokens: rows; at most 1 where `chunk` is 1.
      chunk: rows loaded together.
      start: first channel.
      count: channels.
    """
    num_rows, width = rows["values"].shape[0], pool[0].shape[0]

    def load(number: jax.Array | int) -> list[list[jax.Array]]:
        tokens = []
        for place in range(chunk):
            token = number * chunk + place
            # An address inside the array for tokens that are not there, whose load is masked.
            row = (jnp.clip(first + token, 0, num_rows - 1),)
            live = token < num_tokens
            tokens.append(
                [
                    triton.load_row(
                        rows[name], row, start=start, count=count, width=width, live=live
                    )
                    for name in TOKEN
                ]
            )
        return tokens

    def fold_chunk(number: jax.Array, carry: tuple[Pool, Any]) -> tuple[Pool, Any]:
        pool, tokens = carry
        # Beyond the last token nothing is read (`live`).
        ahead = load(number + 1)
        for token in tokens:
            pool = fold(pool, *token)
        return pool, ahead

    def fold_rest(pool: Pool, tokens: list[list[jax.Array]]) -> Pool:
        for number, token in enumerate(tokens):
            # The last chunk is full in shape alone: tokens beyond `num_tokens` leave the pool as it
            # is.
            pool = select_pool(number < rest, fold(pool, *token), pool)
        return pool

    whole, rest = (0, num_tokens) if chunk == 1 else (num_tokens // chunk, num_tokens % chunk)
    tokens = load(0)
    if chunk > 1:
        pool, tokens = jax.lax.fori_loop(0, whole, fold_chunk, (pool, tokens))
    return jax.lax.cond(rest > 0, fold_rest, lambda pool, _: pool, pool, tokens)


def mean(pool: Pool, channels: int, dtype: DTypeLike) -> jax.Array:
    """f32[width], a pool's mean rounded to the dtype of activations; zeros past its channels."""
    _, total, weighted = pool
    quotient = weighted / total  # f32[width]
    if channels < total.shape[0]:
        # Lanes past the channels become zeros, since the norm adds up all lanes.
        quotient = jnp.where(jnp.arange(total.shape[0]) < channels, quotient, 0.0)
    return round_to_dtype(quotient, dtype)
