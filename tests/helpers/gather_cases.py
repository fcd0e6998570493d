"""Gathers at DeepSeek-V4 Flash's shapes: 64 requests, entries of the released format."""

import jax
import jax.numpy as jnp

from helpers.calls import call_specs
from pallas_kernels import LayerPlanes, gather_entries, gather_window, get_cache_format

REQUESTS, DIM, ROPE, WINDOW = 64, 512, 64, 128
BLOCK_TOKENS, COMPRESSION_RATIOS = 128, {"csa": 4, "hca": 128}
CODEC = get_cache_format("fp8_ue8m0").entry
STATIC = {"dim": DIM, "dtype": jnp.bfloat16}


def entries_specs(family, num_selected, num_layers, context_tokens):
    """Arguments of `dense_entries`: one query of each request, `num_selected` of its entries."""
    logical = context_tokens // BLOCK_TOKENS
    entries_per_block = BLOCK_TOKENS // COMPRESSION_RATIOS[family]
    return (
        LayerPlanes(_planes(num_layers, REQUESTS * logical, entries_per_block), _i32(), CODEC),
        call_specs(REQUESTS, logical, has_visible=False),
        _i32(REQUESTS, num_selected),
    )


def window_specs(num_layers):
    """Arguments of `dense_window`: one token of each request."""
    return (
        LayerPlanes(_planes(num_layers, REQUESTS, WINDOW), _i32(), CODEC),
        _planes(REQUESTS),
        call_specs(REQUESTS, 1, has_visible=False),
    )


def dense_entries(pool, call, index, backend=None):
    """bf16[T, K, C], and which entries there are: what dense attention would read."""
    return gather_entries(pool, call, index, **STATIC, backend=backend)


def dense_window(ring, rows, call, backend=None):
    """bf16[T, W, C], and which rows there are."""
    return gather_window(ring, rows, call, **STATIC, backend=backend)


def _planes(*lead):
    shapes = CODEC.plane_shapes(DIM, ROPE)
    return {name: jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype) for name, s in shapes.items()}


def _i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)
