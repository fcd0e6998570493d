"""A small model with DSpark stages whose drafts are right now and then, and wrong now and then."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from helpers.dspark import DRAFT, TRUNK

CONFIG = dataclasses.replace(TRUNK, dspark=dataclasses.replace(DRAFT, markov_rank=64))
SIZES = {
    "max_requests": 4,
    "max_context_tokens": 640,
    "prefill_tokens": (24,),
    "decode_tokens": 24,
    "draft_tokens": CONFIG.dspark.block_size,
    "cache_format": "fp8_ue8m0",
    "num_snapshots": 29,
}


@functools.cache
def params():
    """Markov tables hold the trunk's own mean logits after each token, as far as the rank goes.

    The embedding is large, so that the next token depends mostly on the last one.
    """
    made = ds.init_params(CONFIG, jax.random.key(0))
    made = dataclasses.replace(made, embed=6 * made.embed)
    rng, vocab = np.random.default_rng(0), CONFIG.vocab_size
    token_ids = rng.integers(0, vocab, (8, 150)).astype(np.int32)
    logits = np.asarray(
        jax.jit(ds.forward, static_argnames="config")(made, token_ids, config=CONFIG)
    )
    total, seen = np.zeros((vocab, vocab)), np.zeros((vocab, 1))
    np.add.at(total, token_ids, logits - logits.mean(-1, keepdims=True))
    np.add.at(seen, token_ids, 1)
    left, values, right = np.linalg.svd(total / np.maximum(seen, 1))
    rank = CONFIG.dspark.markov_rank
    root = np.sqrt(values[:rank])
    draft = dataclasses.replace(
        made.mtp,
        markov_w1=jnp.asarray(16 * left[:, :rank] * root, jnp.float32),
        markov_w2=jnp.asarray(right[:rank].T * root, jnp.float32),
    )
    return dataclasses.replace(made, mtp=draft)


def make_engine(**changes):
    """An engine whose steps are all one program, so that results are equal to the bit."""
    return ds.Engine(CONFIG, params(), **(SIZES | changes))
