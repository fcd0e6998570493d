"""A filled cache is one that a step could have left behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench import fill
from dsv4_jax.bench.noise import uniform
from dsv4_jax.bench.weights import random_params
from helpers import slow
from pallas_kernels import CACHE_FORMATS

pytestmark = pytest.mark.unoptimised

LENGTHS = np.array([300, 512, 0], np.int32)


def filled(cache_format, **changes):
    sizes = {"length_tokens": LENGTHS, "max_context_tokens": 512, "cache_format": cache_format}
    return fill.filled_cache(ds.DSV4Config.tiny(), **sizes | changes)


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", slow.all_but(["fp8_ue8m0"], list(CACHE_FORMATS)))
def test_stored_vectors_are_finite_and_of_unit_size(cache_format, monkeypatch):
    """Every row of every layer, several chunks of blocks and a last one that overlaps."""
    monkeypatch.setattr(fill, "_CHUNK_ELEMENTS", 2**13)
    cache = filled(cache_format)
    for pool in cache.paged.values():
        fmt, schema = pool.schema.format, pool.schema
        check_vectors(fmt.entry.decode(pool.entries, schema.entry_head_dim))
        if pool.index_keys is not None:
            check_vectors(fmt.index_key.decode(pool.index_keys, schema.indexer_head_dim))
    for pool in cache.state.values():
        decoded = pool.schema.format.ring.decode(pool.window, pool.schema.entry_head_dim)
        check_vectors(decoded)
        for array in jax.tree.leaves((pool.tail, pool.index_tail)):
            assert abs(float(jnp.std(array)) - 1) < 0.1
        if pool.running is not None:
            assert bool(jnp.all(jnp.isfinite(pool.running)))
            assert bool(jnp.all(pool.running[:, :, 1] >= 1))


def check_vectors(vectors):
    flat = np.asarray(vectors, np.float32).reshape(-1, vectors.shape[-1])
    assert np.all(np.isfinite(flat))
    assert np.all(np.abs(flat).max(axis=1) > 0.5), "a row was left empty"
    assert abs(flat.std() - 1) < 0.1
    assert len(np.unique(flat, axis=0)) > 0.99 * len(flat), "rows repeat"


def test_lengths_and_tables_are_consistent():
    cache = filled("fp8_ue8m0")
    np.testing.assert_array_equal(cache.length_tokens, LENGTHS)
    blocks = np.sort(np.asarray(cache.block_table), axis=None)
    np.testing.assert_array_equal(blocks, np.arange(cache.block_table.size))
    assert not np.array_equal(cache.block_table.reshape(-1), blocks), "blocks lie anywhere"


@pytest.mark.slow
def test_dealt_blocks_are_those_of_each_device_in_turn():
    """Five blocks over two devices: three of each request on a device, one of them spare."""
    config = ds.DSV4Config.tiny()
    sizes = {"length_tokens": LENGTHS, "max_context_tokens": 600, "cache_format": "fp8_ue8m0"}
    cache = fill.filled_cache(config, **sizes, block_parts=2)
    table, of_device = np.asarray(cache.block_table), 3 * len(LENGTHS)
    assert cache.split_cache
    assert cache.num_blocks == of_device
    assert table.shape == (3, 5)
    np.testing.assert_array_equal(table // of_device, np.tile([0, 1, 0, 1, 0], (3, 1)))
    assert len(np.unique(table)) == table.size


@pytest.mark.slow
def test_a_step_runs_on_it():
    config = ds.DSV4Config.tiny()
    cache = filled("fp8_ue8m0", max_context_tokens=640)
    rows = jnp.arange(3, dtype=jnp.int32)
    step_input = ds.StepInput(token_ids=rows, request_ids=rows, request_slots=rows)
    params = random_params(config, weights="float32")
    cache, logits = ds.jit_decode_step(params, cache, step_input, config=config)
    np.testing.assert_array_equal(cache.length_tokens, LENGTHS + 1)
    assert bool(jnp.all(jnp.isfinite(logits)))
    assert float(jnp.std(logits)) > 0.1


def test_lengths_are_checked():
    with pytest.raises(ValueError, match=r"length_tokens must be i32\[NS\] in 0\.\.512"):
        filled("f32", length_tokens=np.array([513]))


def test_noise_has_mean_0_variance_1_and_no_pattern():
    noise = np.asarray(uniform((64, 4096), np.uint32(7)))
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    correlation = np.corrcoef(noise)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.09  # 5.7 deviations of 4096 independent draws
    other = np.asarray(uniform((64, 4096), np.uint32(8)))
    assert abs(np.corrcoef(noise.ravel(), other.ravel())[0, 1]) < 0.01
