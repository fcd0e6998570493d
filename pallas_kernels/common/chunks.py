"""Runs a function of tokens on some of them at a time, so that memory does not grow with all."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

CHUNK_ELEMENTS = 2**26
"""f32 elements that the dense intermediate of a reference may have: 256 MiB."""


def map_tokens[Tree](
    function: Callable[[Tree, jax.Array], jax.Array], arrays: Tree, *, elements_per_token: int
) -> jax.Array:
    """function(arrays, arange(T)), in chunks if its intermediates would be large.

    Args:
      function: takes arrays [n, ...] and their tokens i32[n], and gives [n, ...]; a token's result
        depends on nothing else of `arrays`.
      arrays: tree of arrays [T, ...].
      elements_per_token: elements of the largest intermediate; decides how many tokens go together.
    """
    num_tokens = jax.tree.leaves(arrays)[0].shape[0]
    chunk = max(2, CHUNK_ELEMENTS // elements_per_token)  # one row alone rounds differently
    if num_tokens <= chunk:
        return function(arrays, jnp.arange(num_tokens, dtype=jnp.int32))
    num_chunks = pl.cdiv(num_tokens, chunk)
    # The last token fills the last chunk.
    tokens = jnp.minimum(jnp.arange(num_chunks * chunk, dtype=jnp.int32), num_tokens - 1)
    results = jax.lax.map(
        lambda some: function(jax.tree.map(lambda array: array[some], arrays), some),
        tokens.reshape(num_chunks, chunk),
    )
    return results.reshape(num_chunks * chunk, *results.shape[2:])[:num_tokens]
