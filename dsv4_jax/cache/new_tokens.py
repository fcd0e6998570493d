"""NewTokens: a call's tokens as one layer will keep them, before they are committed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.cache.schema import LayerCacheSchema
from dsv4_jax.cache.state_cache import StateCachePool
from pallas_kernels.common.codecs import Planes


@flax.struct.dataclass(kw_only=True)
class Projections:
    """What a call's tokens give to one compressor.

    Attributes:
      values: f32[T, width].
      scores: f32[T, width], gate scores with the position bias added.
    """

    values: jax.Array
    scores: jax.Array

    @property
    def planes(self) -> Planes:
        """Both, by name."""
        return {"values": self.values, "scores": self.scores}


@flax.struct.dataclass(kw_only=True)
class NewTokens:
    """A call's tokens, as one layer will keep them once they are committed.

    Attributes:
      window: planes [T, ...], encoded window entries.
      compressor: projections on CSA and HCA layers, and on layers that make entries of several
        tokens for others too; else None.
      indexer: projections on CSA layers that make index keys of their own tokens; else None.
    """

    window: Planes
    compressor: Projections | None
    indexer: Projections | None


def projection_widths(schema: LayerCacheSchema) -> tuple[int, int]:
    """Widths of the projections of a layer's two compressors; 0 where there is none."""
    streams = 2 if schema.tail_buffer_size_b else 1
    keeps = schema.tail_buffer_size_a or schema.pending_tokens
    width = streams * schema.entry_head_dim if keeps else 0
    return width, 0 if schema.shares else 2 * schema.indexer_head_dim


def check_staged(
    name: str, found: Any, state: Mapping[str, StateCachePool], num_tokens: int
) -> None:
    """Refuses tokens by attention type that a staged step of a cache would not have given.

    Args:
      name: of the argument.
      found: what should be `NewTokens` by attention type.
      state: the state pools of the cache.
      num_tokens: T of the call.

    Raises:
      ValueError: a type is missing or too many, or an array has another shape or dtype.
    """
    wanted = jax.eval_shape(lambda: empty_staged(state, num_tokens))
    checks.same_arrays(name, found, wanted, "a staged step of this cache")


def empty_staged(state: Mapping[str, StateCachePool], num_tokens: int) -> dict[str, NewTokens]:
    """Zeroed tokens by family, of the shapes that layers stage."""
    return {family: empty_new_tokens(pool, num_tokens) for family, pool in state.items()}


def empty_new_tokens(pool: StateCachePool, num_tokens: int) -> NewTokens:
    """Zeroed tokens of all layers of a family, stacked [L, T, ...]."""
    lead = (pool.num_layers, num_tokens)

    def projections(width: int) -> Projections | None:
        if not width:
            return None
        zeros = jnp.zeros((*lead, width), jnp.float32)
        return Projections(values=zeros, scores=zeros)

    width, index_width = projection_widths(pool.schema)
    window = {
        name: jnp.zeros((*lead, *plane.shape[3:]), plane.dtype)
        for name, plane in pool.window.items()
    }
    return NewTokens(window=window, compressor=projections(width), indexer=projections(index_width))


type Family = NewTokens | tuple[NewTokens, ...]
"""Tokens of the layers of an attention type: stacked [L, T, ...], or those of each layer.

A step whose layers are scanned writes into a stack; one that unrolls them keeps each layer's tokens
as they are, and spares the writing.
"""


def separate_layers(state: Mapping[str, StateCachePool], num_tokens: int) -> dict[str, Family]:
    """`empty_staged`, each layer's tokens for themselves."""
    return {
        attn: (jax.tree.map(lambda leaf: leaf[0], stack),) * state[attn].num_layers
        for attn, stack in empty_staged(state, num_tokens).items()
    }


def put_layer(family: Family, index: jax.Array | int, new: NewTokens) -> Family:
    """Puts the tokens of one layer in their place; `index` is static where layers are separate."""
    if isinstance(family, NewTokens):
        return jax.tree.map(lambda stack, tokens: stack.at[index].set(tokens), family, new)
    assert isinstance(index, int)
    return (*family[:index], new, *family[index + 1 :])


def stacked(family: Family) -> NewTokens:
    """The same tokens, stacked."""
    if isinstance(family, NewTokens):
        return family
    return jax.tree.map(lambda *tokens: jnp.stack(tokens), *family)
