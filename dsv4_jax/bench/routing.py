"""How many different experts of a layer neighbouring rows pick, which is how many a step reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench import roofline
from dsv4_jax.bench.tagged import PICKED, tagged
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.forward import forward
from dsv4_jax.model.params import DSV4Params

_DRAWS = 4096


def independent(config: DSV4Config, rows: int) -> float:
    """Of rows that pick theirs at random, all experts alike."""
    return roofline.expected_experts(config, batch=rows)


def zipf(config: DSV4Config, rows: int, *, exponent: float, seed: int = 0) -> float:
    """Of rows that pick theirs independently, the r-th of all experts as often as r**-exponent.

    A row picks one after the other, none twice, by the largest of log weight and Gumbel noise.
    """
    rng = np.random.default_rng(seed)
    number, count = config.num_routed_experts, config.num_experts_per_token
    weight = -exponent * np.log(np.arange(1, number + 1))
    found = []
    for _ in range(_DRAWS // 64):
        noise = rng.gumbel(size=(64, rows, number)) + weight
        found.append(np.argpartition(-noise, count - 1, axis=-1)[..., :count])
    return float(count_distinct(np.concatenate(found)).mean())


def count_distinct(picked: np.ndarray) -> np.ndarray:
    """i32[..., rows, k] -> i32[...]: different experts of the rows; -1 is none."""
    flat = np.sort(picked.reshape(*picked.shape[:-2], -1), axis=-1)
    is_new = np.diff(flat, axis=-1, prepend=-1) > 0
    return (is_new & (flat >= 0)).sum(axis=-1)


def of_neighbours(picked: np.ndarray, rows: int) -> float:
    """Mean over all so many neighbours of texts i32[texts, T, k]."""
    windows = np.lib.stride_tricks.sliding_window_view(picked, rows, axis=1)
    return float(count_distinct(np.moveaxis(windows, -1, -2)).mean())


def of_strangers(picked: np.ndarray, rows: int, seed: int = 0) -> float:
    """The same of rows from anywhere in the texts: what the popularity of experts alone makes."""
    flat = picked.reshape(-1, picked.shape[-1])
    chosen = np.random.default_rng(seed).integers(0, len(flat), (_DRAWS, rows))
    return float(count_distinct(flat[chosen]).mean())


def picks_of_texts(config: DSV4Config, params: DSV4Params, token_ids: np.ndarray) -> np.ndarray:
    """i32[L, texts, T, k]: the experts that a model picks for texts i32[texts, T], by layer."""

    def logits(params: DSV4Params, row: jax.Array) -> jax.Array:
        return forward(params, row, config=config)

    picks = jax.jit(tagged(logits, PICKED))
    found = [
        np.stack([np.asarray(each) for each in picks(params, jnp.asarray(row[None], jnp.int32))])
        for row in token_ids
    ]
    return np.stack(found, axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Different experts of a layer that so many rows pick, on average.

    Attributes:
      rows: how many.
      independent: of rows that pick at random.
      strangers: of rows from anywhere in a text.
      neighbours: of rows that follow each other.
    """

    rows: int
    independent: float
    strangers: float
    neighbours: float


def overlaps(config: DSV4Config, picked: np.ndarray, rows: Sequence[int]) -> list[Overlap]:
    """Averages over layers i32[L, texts, T, k]."""
    return [
        Overlap(
            rows=count,
            independent=independent(config, count),
            strangers=float(np.mean([of_strangers(layer, count) for layer in picked])),
            neighbours=float(np.mean([of_neighbours(layer, count) for layer in picked])),
        )
        for count in rows
    ]
