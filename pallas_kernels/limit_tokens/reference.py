"""Definition of `limit_tokens`: masses in whole numbers, and two searches, bit by bit.

A token comes before another if its logit is larger, or the same and its number lower. The last
token of a row is the last one that fewer than k tokens, and less mass than top-p asks, come before.
Masses are whole numbers, so that a sum of them does not depend on its order: a row has the same
last token whatever runs beside it, and whoever adds. Nothing is sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MOST_LOW_BITS = 15
RANK_BITS = 31
NAN_RANK = 0x7F800001
"""Behind that of minus infinity."""


class Sums(NamedTuple):
    """Of some tokens of each row.

    Attributes:
      tokens: i32[...], how many they are.
      high: u32[...], their masses without the last `low_bits` bits, added up.
      low: u32[...], the last bits, added up.
    """

    tokens: jax.Array
    high: jax.Array
    low: jax.Array


class Wanted(NamedTuple):
    """What has to come before a token for it to be left out.

    Attributes:
      tokens: i32[T], at most as many as there are; 0 of a row without a limit.
      high: u32[T], of the mass; all ones where there is no limit on it.
      low: u32[T].
    """

    tokens: jax.Array
    high: jax.Array
    low: jax.Array


def limit_tokens(
    scaled: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `op.limit_tokens`."""
    num_tokens = scaled.shape[1]
    low_bits = low_bits_of(num_tokens)
    ranks, masses = ranks_of(scaled), masses_of(scaled)  # u32[T, V]
    wanted = wanted_of(masses, top_k, top_p)  # [T] each

    def is_left(before: jax.Array) -> jax.Array:
        """bool[T], of tokens that those of bool[T, V] come before."""
        return comes_short(sums_of(before, masses, low_bits), wanted, low_bits)

    # u32[T], of the last token that is left: 31 sums over [T, V].
    last_rank = _largest(lambda rank: is_left(ranks < rank[:, None]), top_k.shape, RANK_BITS)
    # bool[T, V]. Of tokens of that rank the lower numbers come first: a second search, over
    # numbers.
    better, equal = ranks < last_rank[:, None], ranks == last_rank[:, None]
    number = jnp.arange(num_tokens, dtype=jnp.uint32)[None]
    last = _largest(
        lambda end: is_left(better | (equal & (number < end[:, None]))),
        top_k.shape,
        num_tokens.bit_length(),
    )
    return finish(last_rank, last.astype(jnp.int32), wanted, num_tokens)


def low_bits_of(num_tokens: int) -> int:
    """Half the bits of a mass, which are added up for themselves.

    Sums of either half of so many masses fit u32.
    """
    return min(_MOST_LOW_BITS, 32 - num_tokens.bit_length())


def ranks_of(scaled: jax.Array) -> jax.Array:
    """u32 that ascend as logits of at most 0 descend; both zeros are 0."""
    # Bits of floats that are not negative ascend as the floats do.
    bits = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.uint32)
    return jnp.minimum(bits, jnp.uint32(NAN_RANK))


def masses_of(scaled: jax.Array) -> jax.Array:
    """u32[T, V]: e**scaled in units of which the best token has 4**`low_bits`; 0 of NaN."""
    mass = jnp.round(jnp.exp(scaled) * (1 << 2 * low_bits_of(scaled.shape[1])))
    return jnp.where(mass > 0, mass, 0).astype(jnp.uint32)


def sums_of(chosen: jax.Array, masses: jax.Array, low_bits: int) -> Sums:
    """Of the tokens [T, V] that are chosen, of each row."""
    kept = jnp.where(chosen, masses, jnp.uint32(0))  # u32[T, V]
    return Sums(
        tokens=jnp.sum(chosen.astype(jnp.int32), axis=1, dtype=jnp.int32),
        high=jnp.sum(kept >> low_bits, axis=1, dtype=jnp.uint32),
        low=jnp.sum(kept & jnp.uint32((1 << low_bits) - 1), axis=1, dtype=jnp.uint32),
    )


def comes_short(before: Sums, wanted: Wanted, low_bits: int) -> jax.Array:
    """Whether both count and mass are less than what is wanted."""
    # What the low halves carry goes to the high ones, so that both compare digit by digit.
    high = before.high + (before.low >> low_bits)
    low = before.low & jnp.uint32((1 << low_bits) - 1)
    less = (high < wanted.high) | ((high == wanted.high) & (low < wanted.low))
    return less & (before.tokens < wanted.tokens)


def wanted_of(masses: jax.Array, top_k: jax.Array, top_p: jax.Array) -> Wanted:
    """Of u32[T, V]; the mass that is wanted is top-p's share of all, and 1 at least."""
    num_tokens, low_bits = masses.shape[1], low_bits_of(masses.shape[1])
    total = sums_of(jnp.ones(masses.shape, bool), masses, low_bits)
    # But for the conversions, the sum and the product with top-p each step is exact, so that a
    # compiler that fuses some of them gives the same bits.
    high = (total.high + (total.low >> low_bits)).astype(jnp.float32)
    low = (total.low & jnp.uint32((1 << low_bits) - 1)).astype(jnp.float32)
    share = jnp.maximum((high * (1 << low_bits) + low) * top_p, 1.0)
    high = jnp.floor(share * 2.0**-low_bits)
    low = jnp.ceil(share - high * (1 << low_bits))
    takes_share = top_p < 1
    all_ones = jnp.full(top_k.shape, (1 << 32) - 1, jnp.uint32)
    # No limit on their number is all of them: a row with one limit has both.
    count = jnp.where(top_k > 0, jnp.minimum(top_k, num_tokens), num_tokens)
    return Wanted(
        tokens=jnp.where((top_k > 0) | takes_share, count, 0).astype(jnp.int32),
        high=jnp.where(takes_share, high.astype(jnp.uint32), all_ones),
        low=jnp.where(takes_share, low.astype(jnp.uint32), all_ones),
    )


def finish(
    last_rank: jax.Array, last: jax.Array, wanted: Wanted, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The result from the rank u32[T] and the number i32[T] of each row's last token.

    The number may be that of any token up to the next one of the same rank.
    """
    least = -jax.lax.bitcast_convert_type(last_rank, jnp.float32)  # f32[T], a logit's bits again
    is_limited = wanted.tokens > 0
    last = jnp.where(is_limited, jnp.minimum(last, num_tokens - 1), num_tokens - 1)
    return jnp.where(is_limited, least, -jnp.inf), last


def _largest(
    holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], num_bits: int
) -> jax.Array:
    """u32 of a shape: the largest number for which a condition holds that holds for none above.

    It holds for 0.
    """

    def try_bit(place: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (jnp.uint32(1) << (num_bits - 1 - place).astype(jnp.uint32))
        return jnp.where(holds(tried), tried, found)

    return jax.lax.fori_loop(0, num_bits, try_bit, jnp.zeros(shape, jnp.uint32))
