"""References that go through their tokens in chunks give what they give at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import get_cache_format, index_topk, sparse_attention
from pallas_kernels.common import chunks

T, B, W, H, C, ROPE, K, EB, LB, IH, IC = 37, 3, 8, 2, 32, 8, 6, 4, 5, 4, 16
FORMAT = get_cache_format("bf16")


def places():
    """Ragged: rows of 20, 10 and 5 tokens, two of padding, at different lengths."""
    counts, lengths = [20, 10, 5], [3, 40, 0]
    row = np.repeat(np.arange(B), counts)
    offset = np.concatenate([np.arange(n) for n in counts])
    before = np.asarray(lengths)[row]
    pad = T - len(row)
    return {
        "request_ids": jnp.asarray(np.pad(row, (0, pad), constant_values=-1), jnp.int32),
        "slots": jnp.asarray(np.pad(row, (0, pad), constant_values=-1), jnp.int32),
        "positions": jnp.asarray(np.pad(before + offset, (0, pad)), jnp.int32),
        "lengths": jnp.asarray(np.pad(before, (0, pad)), jnp.int32),
    }


def planes(rng, codec, *lead, dim, rope):
    vectors = jnp.asarray(rng.normal(size=(*lead, dim)), jnp.float32)
    return codec.encode(vectors, rope)


def attention_case(rng):
    selected = np.sort(rng.permuted(np.tile(np.arange(LB * EB), (T, 1)), axis=1)[:, :K], axis=1)
    table = rng.permutation(B * LB).reshape(B, LB)
    return functools.partial(
        sparse_attention,
        jnp.asarray(rng.normal(size=(T, H, C)), jnp.float32),
        jnp.asarray(rng.normal(size=H), jnp.float32),
        planes(rng, FORMAT.entry, 1, B, W, dim=C, rope=ROPE),
        planes(rng, FORMAT.entry, T, dim=C, rope=ROPE),
        planes(rng, FORMAT.entry, 1, B * LB, EB, dim=C, rope=ROPE),
        jnp.asarray(table, jnp.int32),
        jnp.asarray(selected, jnp.int32),
        **places(),
        layer=jnp.int32(0),
        codec=FORMAT.entry,
        scale=C**-0.5,
        backend="reference",
    ), (W + K) * C


def index_case(rng):
    where = places()
    visible = np.asarray(where["positions"] + 1) // 3
    return functools.partial(
        index_topk,
        jnp.asarray(rng.normal(size=(T, IH, IC)), jnp.float32),
        jnp.asarray(rng.normal(size=(T, IH)), jnp.float32),
        planes(rng, FORMAT.index_key, 1, B * LB, EB, dim=IC, rope=0),
        jnp.asarray(rng.permutation(B * LB).reshape(B, LB), jnp.int32),
        request_ids=where["request_ids"],
        visible=jnp.asarray(visible, jnp.int32),
        layer=jnp.int32(0),
        codec=FORMAT.index_key,
        k=K,
        backend="reference",
    ), LB * EB * IC


@pytest.mark.parametrize("case", [attention_case, index_case])
@pytest.mark.parametrize("tokens_at_once", [2, 7, 36])
def test_chunks_change_nothing(case, tokens_at_once, monkeypatch):
    call, elements = case(np.random.default_rng(0))
    whole = call()
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", tokens_at_once * elements)
    lowered = jax.jit(lambda: call()).lower().as_text()
    assert "while" in lowered, "it did not go through chunks"
    some = call()
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
