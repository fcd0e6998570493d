"""Shapes of caches of the models' sizes and of their calls, to compile for."""

import jax
import jax.numpy as jnp

from benchmarks.cases.cache import (
    ENTRIES_PER_BLOCK,
    KEPT_BLOCKS,
    KEPT_LAYERS,
    KEPT_LOGICAL,
    KEPT_SLOTS,
    ROPE,
    WINDOW,
    C,
    state_shape,
)
from helpers import calls


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def i32(*shape):
    return array(*shape, dtype=jnp.int32)


def both(*shape):
    """Values and scores."""
    return {"values": array(*shape), "scores": array(*shape)}


def planes(codec, dim, *lead):
    shapes = codec.plane_shapes(dim, ROPE)
    return {name: array(*lead, *s.shape, dtype=s.dtype) for name, s in shapes.items()}


def ring(codec):
    return planes(codec, C, KEPT_LAYERS, KEPT_SLOTS, WINDOW)


def pool(codec, dim, kind):
    return planes(codec, dim, KEPT_LAYERS, KEPT_BLOCKS, ENTRIES_PER_BLOCK[kind])


def state(kind, dim):
    """What a compressor keeps."""
    shape = state_shape(kind, KEPT_LAYERS, KEPT_SLOTS, dim=dim)
    return both(*shape) if kind == "csa" else array(*shape)


def call(num_tokens, num_rows):
    """Rows are of one size."""
    return calls.call_specs(num_tokens, KEPT_LOGICAL, num_rows=num_rows, has_visible=False)
