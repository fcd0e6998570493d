"""Poison: what storage holds that nobody may read, in tests and in the engine's debug mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache.model_cache import ModelCache

Array = jax.Array | np.ndarray


def poison(cache: ModelCache, slots: Array | None, blocks: Array | None) -> ModelCache:
    """Sets every bit of some slots bool[NS] and blocks bool[NB]: NaN in every format.

    What is read before it is written then shows, in a result or in `verify_cache`.
    """

    def fill(mask: Array) -> Callable[[jax.Array], jax.Array]:
        def one(plane: jax.Array) -> jax.Array:
            select = jnp.asarray(mask).reshape(1, -1, *[1] * (plane.ndim - 2))
            return jnp.where(select, poison_of(plane.dtype), plane)

        return one

    state = cache.state if slots is None else jax.tree.map(fill(slots), cache.state)
    paged = cache.paged if blocks is None else jax.tree.map(fill(blocks), cache.paged)
    return dataclasses.replace(cache, state=state, paged=paged)


def poison_of(dtype: np.dtype) -> np.ndarray:
    """The value of a dtype whose bits are all ones."""
    width = np.dtype(dtype).itemsize
    ones = np.asarray([2 ** (8 * width) - 1], f"u{width}")
    return ones.view(dtype).reshape(())
