"""Engram: tables of n-grams that are written into the streams before some layers.

Source: deepseek_v41.md section 9.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np

from dsv4_jax.config.kinds import ListOf, Whole, show
from dsv4_jax.config.limits import MAX_LAYERS

ENGRAM_KINDS = {
    "max_ngram": Whole(2, 16),
    "num_heads": Whole(1, 64),
    "head_dim": Whole(1, 2**16),
    "least_prime": Whole(2, 2**31 - 1),
    "num_normalized_ids": Whole(1, 2**24),
    "pad_token_id": Whole(0, 2**24 - 1),
}
"""By fields of `EngramConfig`."""
ENGRAM_LAYERS = ListOf(Whole(0, MAX_LAYERS), 64)
GROUP = 32
"""Columns of a row of a table that share a scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """Sizes of the Engram tables.

    Attributes:
      layers: trunk layers before which the streams are written to, ascending; one table each.
      max_ngram: longest n-gram; there are tables of 2 tokens to that many.
      num_heads: rows of each n-gram.
      head_dim: width of a row.
      least_prime: from here on primes are taken as numbers of rows, each once.
      num_normalized_ids: ids that token ids are normalised to.
      pad_token_id: token that stands for those before the start of a sequence.

    Raises:
      ValueError: a value of a wrong type or out of range; the message names the field.
    """

    layers: tuple[int, ...]
    max_ngram: int
    num_heads: int
    head_dim: int
    least_prime: int
    num_normalized_ids: int
    pad_token_id: int

    def __post_init__(self) -> None:
        """Refuses what is no size."""
        for name, kind in ENGRAM_KINDS.items():
            object.__setattr__(self, name, kind.read(getattr(self, name), f"engram.{name}"))
        layers = tuple(ENGRAM_LAYERS.read(self.layers, "engram.layers"))
        if not layers or list(layers) != sorted(set(layers)):
            raise ValueError(
                f"engram.layers must ascend, and name one layer, got {show(list(layers))}"
            )
        object.__setattr__(self, "layers", layers)

    @property
    def num_columns(self) -> int:
        """Rows of a table that a token reads."""
        return (self.max_ngram - 1) * self.num_heads

    @property
    def width(self) -> int:
        """Values of them all, beside each other."""
        return self.num_columns * self.head_dim

    @property
    def primes(self) -> tuple[tuple[int, ...], ...]:
        """Of each layer and column, its number of rows: `num_columns` each."""
        count = self.num_columns
        found = primes_from(self.least_prime, count * len(self.layers))
        return tuple(itertools.batched(found, count))

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each layer's table."""
        return tuple(map(sum, self.primes))

    def check_fits(self, *, num_layers: int, vocab_size: int) -> None:
        """Refuses tables that a model of those sizes cannot have.

        Raises:
          ValueError: a layer or a token is not there, or there are more normalised ids than tokens.
        """
        if self.layers[-1] >= num_layers:
            raise ValueError(
                f"engram.layers must be of the {num_layers} layers of the trunk, got "
                f"{show(list(self.layers))}"
            )
        if self.pad_token_id >= vocab_size:
            raise ValueError(
                f"engram.pad_token_id must be below vocab_size={vocab_size}, got "
                f"{self.pad_token_id}"
            )


@functools.lru_cache(maxsize=16)
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first so many primes from a number on, ascending.

    A search that begins anew for every length of n-gram, and takes no prime twice, finds the same:
    they are handed out in order.
    """
    found: list[int] = []
    start = least
    while len(found) < count:
        size = max(1024, 32 * (count - len(found)))
        end = start + size
        is_prime = np.ones(size, bool)
        is_prime[: max(2 - start, 0)] = False
        for factor in _small_primes(math.isqrt(end)):
            first = max(factor * factor, -(-start // factor) * factor)
            is_prime[first - start :: factor] = False
        found += (np.flatnonzero(is_prime) + start).tolist()
        start = end
    return tuple(found[:count])


def _small_primes(most: int) -> list[int]:
    sieve = np.ones(most + 1, bool)
    sieve[:2] = False
    for factor in range(2, math.isqrt(most) + 1):
        if sieve[factor]:
            sieve[factor * factor :: factor] = False
    return np.flatnonzero(sieve).tolist()
