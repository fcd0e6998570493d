"""Gathers at DeepSeek-V4 Flash's shapes: 64 requests, entries of the released format."""

import jax.numpy as jnp

from benchmarks.cases.cache import (
    BLOCK_TOKENS,
    ENTRIES_PER_BLOCK,
    RELEASED,
    REQUESTS,
    WINDOW,
    C,
)
from helpers.cache_specs import i32, planes
from helpers.calls import call_specs
from pallas_kernels import LayerPlanes, gather_entries, gather_window, get_cache_format

CODEC = get_cache_format(RELEASED).entry
STATIC = {"dim": C, "dtype": jnp.bfloat16}


def entries_specs(family, num_selected, num_layers, context_tokens):
    """Arguments of `dense_entries`: one query of each request, `num_selected` of its entries."""
    logical = context_tokens // BLOCK_TOKENS
    blocks = REQUESTS * logical, ENTRIES_PER_BLOCK[family]
    return (
        LayerPlanes(planes(CODEC, C, num_layers, *blocks), i32(), CODEC),
        call_specs(REQUESTS, logical, has_visible=False),
        i32(REQUESTS, num_selected),
    )


def window_specs(num_layers):
    """Arguments of `dense_window`: one token of each request."""
    return (
        LayerPlanes(planes(CODEC, C, num_layers, REQUESTS, WINDOW), i32(), CODEC),
        planes(CODEC, C, REQUESTS),
        call_specs(REQUESTS, 1, has_visible=False),
    )


def dense_entries(pool, call, index, backend=None):
    """bf16[T, K, C], and which entries there are: what dense attention would read."""
    return gather_entries(pool, call, index, **STATIC, backend=backend)


def dense_window(ring, rows, call, backend=None):
    """bf16[T, W, C], and which rows there are."""
    return gather_window(ring, rows, call, **STATIC, backend=backend)
