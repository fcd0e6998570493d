"""References that go through their tokens in chunks give what they give at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from helpers.inputs import pack_call
from pallas_kernels import LayerPlanes, get_cache_format, index_topk, sparse_attention
from pallas_kernels.common import chunks

pytestmark = pytest.mark.unoptimised

T, B, W, H, C, ROPE, K, EB, LB, IH, IC = 37, 3, 8, 2, 32, 8, 6, 4, 5, 4, 16
FORMAT = get_cache_format("bf16")


def ragged_call(rng, visible):
    """Rows of 20, 10 and 5 tokens, two of padding, at different lengths."""
    call = pack_call(rng, [0, 1, 2], [3, 40, 0], [20, 10, 5], num_tokens=T)
    table = rng.permutation(B * LB).reshape(B, LB)
    return call.indices(table, (call.positions + 1) // 3 if visible else None)


def layer_planes(rng, codec, *lead, dim, rope):
    return LayerPlanes(planes(rng, codec, 1, *lead, dim=dim, rope=rope), jnp.int32(0), codec)


def planes(rng, codec, *lead, dim, rope):
    vectors = rng.normal(size=(*lead, dim)).astype(np.float32)
    return jax.jit(codec.encode, static_argnums=1)(vectors, rope)


def attention_case(rng):
    selected = np.sort(rng.permuted(np.tile(np.arange(LB * EB), (T, 1)), axis=1)[:, :K], axis=1)
    return functools.partial(
        sparse_attention,
        jnp.asarray(rng.normal(size=(T, H, C)), jnp.float32),
        jnp.asarray(rng.normal(size=H), jnp.float32),
        layer_planes(rng, FORMAT.entry, B, W, dim=C, rope=ROPE),
        planes(rng, FORMAT.entry, T, dim=C, rope=ROPE),
        layer_planes(rng, FORMAT.entry, B * LB, EB, dim=C, rope=ROPE),
        jnp.asarray(selected, jnp.int32),
        ragged_call(rng, visible=False),
        scale=C**-0.5,
        backend="reference",
    ), (W + K) * C


def index_case(rng):
    return functools.partial(
        index_topk,
        jnp.asarray(rng.normal(size=(T, IH, IC)), jnp.float32),
        jnp.asarray(rng.normal(size=(T, IH)), jnp.float32),
        layer_planes(rng, FORMAT.index_key, B * LB, EB, dim=IC, rope=0),
        ragged_call(rng, visible=True),
        k=K,
        backend="reference",
    ), LB * EB * IC


@pytest.mark.parametrize("case", [attention_case, index_case])
@pytest.mark.parametrize("tokens_at_once", slow.all_but([7], [2, 7, 36]))
def test_chunks_change_nothing(case, tokens_at_once, monkeypatch):
    call, elements = case(np.random.default_rng(0))
    whole = jax.jit(call)()
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", tokens_at_once * elements)
    lowered = jax.jit(lambda: call()).lower()
    assert "while" in lowered.as_text(), "it did not go through chunks"
    some = lowered.compile()()
    if whole.dtype == jnp.int32:
        np.testing.assert_array_equal(some, whole)
    else:  # products of other shapes round differently
        np.testing.assert_allclose(some, whole, atol=1e-6, rtol=0)


def test_the_largest_intermediate_is_bounded(monkeypatch):
    """Of a chunk of 64 times as many tokens, temporary memory stays within a few chunks'."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 2**16)

    def temp_bytes(num_tokens):
        def dense(x, _):
            wide = jnp.sin(x[:, :, None] * jnp.arange(64, dtype=jnp.float32)[None, None])
            return jnp.sum(jnp.sort(wide, axis=1), axis=(1, 2))

        x = jax.ShapeDtypeStruct((num_tokens, 64), jnp.float32)
        mapped = jax.jit(lambda x: chunks.map_tokens(dense, x, elements_per_token=64 * 64))
        return mapped.lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(1024) - 1024 * 64 * 4 < 4 * temp_bytes(16)
