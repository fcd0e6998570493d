"""How many different experts of a layer neighbouring rows pick, which is how many a step reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench.routing_laws import expected_experts
from dsv4_jax.bench.tagged import PICKED, tagged
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import empty_staged
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.forward import forward
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import run_layers
from pallas_kernels.common.weights import with_activations

_DRAWS = 4096


def count_distinct(picked: np.ndarray) -> np.ndarray:
    """i32[..., rows, k] -> i32[...]: different experts of the rows; -1 is none."""
    flat = np.sort(picked.reshape(*picked.shape[:-2], -1), axis=-1)
    is_new = np.diff(flat, axis=-1, prepend=-1) > 0
    return (is_new & (flat >= 0)).sum(axis=-1)


def mean_distinct(layers: list[jax.Array]) -> float:
    """Different experts of a layer that i32[T, k] name, on average over layers."""
    return float(np.mean([count_distinct(np.asarray(picked)) for picked in layers]))


def of_neighbours(picked: np.ndarray, rows: int) -> float:
    """Mean over all so many neighbours of texts i32[texts, T, k]."""
    windows = np.lib.stride_tricks.sliding_window_view(picked, rows, axis=1)
    return float(count_distinct(np.moveaxis(windows, -1, -2)).mean())


def of_strangers(picked: np.ndarray, rows: int, seed: int = 0) -> float:
    """The same of rows from anywhere in the texts: what the popularity of experts alone makes."""
    flat = picked.reshape(-1, picked.shape[-1])
    chosen = np.random.default_rng(seed).integers(0, len(flat), (_DRAWS, rows))
    return float(count_distinct(flat[chosen]).mean())


def picks_call(config: DSV4Config, activations: str) -> Any:
    """Jitted: parameters, cache and input of a decode step -> i32[T, k] of each layer."""

    def streams(params: DSV4Params, cache: ModelCache, step_input: StepInput) -> jax.Array:
        call = cache.index(step_input, max_row_tokens=1)
        staged = empty_staged(cache.state, math.prod(step_input.token_ids.shape))
        params = with_activations(params, activations)
        ran = run_layers(
            params, cache, step_input.token_ids, call, staged, config, engram_rows=step_input.engram
        )
        return ran.streams

    return jax.jit(tagged(streams, PICKED))


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
            independent=expected_experts(config, rows=count),
            strangers=float(np.mean([of_strangers(layer, count) for layer in picked])),
            neighbours=float(np.mean([of_neighbours(layer, count) for layer in picked])),
        )
        for count in rows
    ]
