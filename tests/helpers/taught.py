"""Small models with DSpark stages whose drafts are right now and then, and wrong now and then."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.config.draft import DSparkConfig
from helpers.dspark import CSA, DRAFT, HASH, LEARNED, SWA, TRUNK
from helpers.serve import v4_tokenizer

CONFIG = dataclasses.replace(TRUNK, dspark=dataclasses.replace(DRAFT, markov_rank=64))
END, NOISE = 261, 258
"""Tokens of the small model, whose vocabulary is that of `helpers.serve`: bytes and marks."""
SMALL = dataclasses.replace(
    TRUNK,
    layer_types=(SWA, CSA),
    router_types=(HASH, LEARNED),
    vocab_size=274,
    eos_token_ids=(END,),
    hc_sinkhorn_iters=1,
    dspark=DSparkConfig(
        block_size=5, markov_rank=96, noise_token_id=NOISE, target_layers=(0, 1), num_stages=2
    ),
)
"""Two layers and two stages, which compile in half the time."""
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
def params(config=CONFIG):
    """Markov tables hold the trunk's own mean logits after each token, as far as the rank goes.

    The embedding is large, so that the next token depends mostly on the last one.
    """
    made = ds.init_params(config, jax.random.key(0))
    made = dataclasses.replace(made, embed=6 * made.embed)
    rng, vocab = np.random.default_rng(0), config.vocab_size
    token_ids = rng.integers(0, vocab, (8, 150)).astype(np.int32)
    forward = jax.jit(
        ds.forward, static_argnames="config", compiler_options={"xla_backend_optimization_level": 0}
    )  # which compiles sooner, and runs once
    logits = np.asarray(forward(made, token_ids, config=config))
    total, seen = np.zeros((vocab, vocab)), np.zeros((vocab, 1))
    np.add.at(total, token_ids, logits - logits.mean(-1, keepdims=True))
    np.add.at(seen, token_ids, 1)
    left, values, right = np.linalg.svd(total / np.maximum(seen, 1))
    rank = config.dspark.markov_rank
    root = np.sqrt(values[:rank])
    draft = dataclasses.replace(
        made.mtp,
        markov_w1=jnp.asarray(16 * left[:, :rank] * root, jnp.float32),
        markov_w2=jnp.asarray(right[:rank].T * root, jnp.float32),
    )
    return dataclasses.replace(made, mtp=draft)


def make_engine(config=CONFIG, model=None, **changes):
    """An engine whose steps are all one program, so that results are equal to the bit.

    Args:
      config: the model's.
      model: its parameters; None are the taught ones.
      **changes: of the engine's sizes.
    """
    model = params(config) if model is None else model
    return ds.Engine(config, model, **(SIZES | changes))


def make_small(**changes):
    """The same of the small model, whose one program has masks of grammars too."""
    return make_engine(SMALL, **({"tokenizer": v4_tokenizer()} | changes))
