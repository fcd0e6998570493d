"""The checkpoint in the package: transformers agrees about it, and it has learned English."""

import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.training.losses import select_all, select_at_random
from helpers.checkpoints import read_tensors

pytestmark = pytest.mark.unoptimised

DATA = pathlib.Path(__file__).parents[2] / "data"
jit_forward = jax.jit(ds.forward, static_argnames=("config", "cache_format", "selector"))


@pytest.fixture(scope="module")
def model():
    return ds.load_checkpoint(ds.SHIPPED_CHECKPOINT, dtype=jnp.float32)


@pytest.fixture(scope="module")
def oracle():
    with np.load(DATA / "oracle_shipped.npz") as arrays:
        return dict(arrays)


def test_oracle_is_of_these_weights(oracle):
    """Of those of the trunk, which a draft does not change."""
    tensors = read_tensors(ds.SHIPPED_CHECKPOINT / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        if not name.startswith("mtp."):
            digest.update(name.encode() + tensors[name][2])
    assert digest.hexdigest() == str(oracle["checksum"])


@pytest.mark.slow
def test_transformers_gives_the_same_logits(model, oracle):
    """Trained weights, 400 tokens, three times what top-k covers; logits of order 20."""
    config, params = model
    token_ids = jnp.asarray(oracle["token_ids"])[None]
    logits = np.asarray(jit_forward(params, token_ids, config=config)[0])
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), oracle["best"])
    np.testing.assert_allclose(logits[oracle["positions"]], oracle["logits"], atol=1e-4, rtol=0)


def losses(model, token_ids, **options):
    config, params = model
    logits = jit_forward(params, token_ids[None, :-1], config=config, **options)[0]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), token_ids[1:, None], axis=-1)
    return -np.asarray(picked[:, 0])


@pytest.mark.slow
def test_it_predicts_english_and_the_released_format_costs_little(model, oracle):
    """Bytes at random cost log(258) = 5.6 nats each."""
    token_ids = jnp.asarray(oracle["token_ids"])
    exact = losses(model, token_ids).mean()
    assert exact < 1.5
    assert abs(losses(model, token_ids, cache_format="fp8_ue8m0").mean() - exact) < 0.02


@pytest.mark.slow
def test_the_indexer_finds_what_a_random_choice_misses(model, oracle):
    """A text that repeats: beyond what top-k covers, the copy of each passage must be found."""
    config, _ = model
    token_ids = jnp.asarray(oracle["token_ids"])
    covered = config.indexer_top_k * config.csa_compression_ratio
    chosen, everything, random = (
        losses(model, token_ids, selector=selector)[2 * covered :].mean()
        for selector in (ds.attention.select_by_score, select_all, select_at_random)
    )
    assert chosen < random
    assert abs(chosen - everything) < 0.5 * (random - everything)
