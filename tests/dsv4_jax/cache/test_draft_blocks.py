"""Attention of blocks of drafts, against dense attention to what the rings hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.draft_blocks import Blocks, attend_in_blocks
from dsv4_jax.config.layer_types import AttentionType
from helpers import slow
from helpers.tolerance import INTERMEDIATE
from pallas_kernels import NormRope, encode_tokens
from pallas_kernels.sparse_attention.reference import attend

LAYERS = {
    "layer_types": (AttentionType.SWA,) * 3,
    "router_types": (ds.RouterType.LEARNED,) * 3,
}
TINY = dataclasses.replace(ds.DSV4Config.tiny().without_draft(), **LAYERS)
FLASH = dataclasses.replace(ds.DSV4Config.flash().without_draft(), **LAYERS)
LAYER, NUM_SLOTS = 1, 5


def filled(config, cache_format, rng):
    """A pool of window layers with random rows everywhere."""
    cache = ds.init_cache(
        config, max_requests=NUM_SLOTS, max_context_tokens=256, cache_format=cache_format
    )
    state = cache.state["swa"]
    rows = jnp.asarray(
        rng.standard_normal((3 * NUM_SLOTS * config.sliding_window, config.head_dim)), jnp.bfloat16
    )
    planes = encoded(rows, config, state)
    shapes = {name: plane.shape for name, plane in state.window.items()}
    window = {name: plane.reshape(shapes[name]) for name, plane in planes.items()}
    return dataclasses.replace(state, window=window)


def encoded(rows, config, state):
    frequencies = jnp.zeros(config.rope_dim // 2)
    norm_rope = NormRope(jnp.ones(config.head_dim, rows.dtype), frequencies, 1e-6)
    positions = jnp.zeros(rows.shape[0], jnp.int32)
    codec = state.schema.format.entry
    return jax.jit(encode_tokens, static_argnames="codec")(
        None, rows, norm_rope, positions, codec=codec
    )[1]


jit_attend = jax.jit(attend, static_argnames="scale")


def dense(queries, sink, state, own, blocks):
    """Row by row: settled tokens that the ring still holds, and all rows of the block."""
    codec, dim, size = state.schema.format.entry, queries.shape[-1], blocks.size
    ring = np.asarray(codec.decode({n: p[LAYER] for n, p in state.window.items()}, dim))
    rows = np.asarray(codec.decode(own, dim)).reshape(-1, size, dim)
    window, found = ring.shape[1], []
    for block, (slot, length) in enumerate(zip(blocks.slots, blocks.lengths, strict=True)):
        if slot < 0:
            found.append(np.zeros((size, *queries.shape[1:])))
            continue
        settled = [t % window for t in range(max(int(length) - window, 0), int(length))]
        keys = np.concatenate([ring[int(slot), settled], rows[block]])
        some = queries[block * size : (block + 1) * size]
        valid = np.ones(len(keys), bool)
        found.append(jit_attend(some, keys, valid, sink, scale=dim**-0.5))
    return np.concatenate([np.asarray(one, np.float64) for one in found])


def compare(config, dtype, cache_format, lengths, size, tolerance):
    rng = np.random.default_rng(0)
    state = filled(config, cache_format, rng)
    blocks = Blocks(
        slots=jnp.asarray([3, -1, 0, 4][: len(lengths)], jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        size=size,
    )
    shape = len(lengths) * size, config.num_attention_heads, config.head_dim
    queries = jnp.asarray(rng.standard_normal(shape), dtype)
    own = encoded(
        jnp.asarray(rng.standard_normal((shape[0], shape[2])), jnp.bfloat16), config, state
    )
    sink = jnp.asarray(rng.standard_normal(shape[1]), jnp.float32)
    found = jax.jit(attend_in_blocks, static_argnums=3)(queries, sink, state, LAYER, own, blocks)
    wanted = dense(queries, sink, state, own, blocks)
    assert np.abs(np.asarray(found, np.float64) - wanted).max() < tolerance


@pytest.mark.parametrize("size", slow.all_but([4], [1, 4]))
def test_a_block_sees_the_last_settled_tokens_and_itself(size):
    """One settled token, a ring that is just full, one that has gone around; and no block."""
    compare(TINY, jnp.float32, "f32", [1, 9, 16, 39], size, INTERMEDIATE)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [64, 16])
def test_kernels_see_the_same_at_real_sizes(num_heads):
    """Heads of a device of a mesh of four too: 5 * 16 is no multiple of 64."""
    config = dataclasses.replace(FLASH, num_attention_heads=num_heads)
    compare(config, jnp.bfloat16, "fp8_ue8m0", [1, 9, 128, 200], 5, 0.02)
