"""Trains the shipped checkpoint: `python -m dsv4_jax.training.train --out DIR`, on one GPU.

CSA layers attend to all entries at first, then to the selected ones; the indexer is distilled
throughout. The parameters that do best on the validation part are kept. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsv4_jax.checkpoint.save import save_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.model.params import DSV4Params, init_params, param_shapes
from dsv4_jax.training.corpus import BOS, EOS, VOCAB_SIZE, Corpus, byte_tokenizer, read_corpus
from dsv4_jax.training.losses import held_out_loss, training_loss

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA


def shipped_config() -> DSV4Config:
    """Every layer and router type, bytes as tokens, a few MB of parameters."""
    return dataclasses.replace(
        DSV4Config.tiny(),
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        layer_types=(SWA, CSA, HCA, CSA, HCA, CSA),
        router_types=(RouterType.HASH,) + (RouterType.LEARNED,) * 5,
        head_dim=64,
        rope_dim=16,
        q_lora_rank=64,
        o_lora_rank=64,
        sliding_window=64,
        indexer_num_heads=16,
        indexer_head_dim=32,
        indexer_top_k=32,
        num_routed_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=128,
        max_position_embeddings=4096,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
    )


def starting_params(config: DSV4Config, key: jax.Array) -> DSV4Params:
    """Neutral norms, biases and sinks; streams that start out unmixed; small outputs."""

    def neutral(path: tuple, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        if "norm" in name:
            return jnp.ones_like(leaf)
        if name in ("attn_sink", "bias", "ape"):
            return jnp.zeros_like(leaf)
        if name == "scale":
            return jnp.full_like(leaf, 0.1)
        if name == "base":
            streams = config.hc_mult
            base = jnp.zeros(leaf.shape[-1])
            if leaf.shape[-1] > streams:
                base = base.at[2 * streams :].set(3.0 * jnp.eye(streams).reshape(-1))
            return jnp.broadcast_to(base, leaf.shape)
        if name == "embed":
            return 0.5 * leaf
        if name in ("wo_b", "w2", "shared_w2"):
            return 0.5 * leaf
        return leaf

    return jax.tree_util.tree_map_with_path(neutral, init_params(config, key))


def batches(
    tokens: np.ndarray, *, batch: int, length: int, noise: float, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless pairs of i32[batch, length]: what the model reads, and the text itself.

    Half of the rows start with a document, half anywhere. A share `noise` of the bytes that are
    read is drawn at random, so that a small text can be gone through often.
    """
    rng = np.random.default_rng(seed)
    starts = np.flatnonzero(tokens == BOS)
    starts = starts[starts < len(tokens) - length]
    while True:
        anywhere = rng.integers(0, len(tokens) - length, batch)
        begin = np.where(rng.random(batch) < 0.5, rng.choice(starts, batch), anywhere)
        text = tokens[begin[:, None] + np.arange(length)]
        wrong = (rng.random(text.shape) < noise) & (text < BOS)
        yield np.where(wrong, rng.integers(0, BOS, text.shape, np.int32), text), text


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long the training is and how fast it learns.

    Attributes:
      num_steps: steps of the optimizer.
      batch: rows of a step.
      length: bytes of a row.
      rate: the highest learning rate, after a warm-up of 100 steps; a cosine follows.
      decay: weight decay of matrices, per unit of the learning rate.
      noise: share of bytes that are read wrong.
      dense_share: share of the steps, the first ones, in which CSA layers attend to every entry.
      steps_between_reports: steps between reports, each with a validation loss.
    """

    num_steps: int = 3200
    batch: int = 32
    length: int = 1024
    rate: float = 3e-3
    decay: float = 1.0
    noise: float = 0.1
    dense_share: float = 0.4
    steps_between_reports: int = 200


def make_optimizer(params: DSV4Params) -> optax.GradientTransformation:
    """Adam at rate 1, for the caller to scale by the rate of the moment; tables stay."""
    labels = jax.tree.map(lambda leaf: "keep" if leaf.dtype == jnp.int32 else "train", params)
    adam = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.95), optax.scale(-1.0)
    )
    return optax.multi_transform({"train": adam, "keep": optax.set_to_zero()}, cast(Any, labels))


@functools.partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))
def training_step(
    params: DSV4Params,
    state: Any,
    text: tuple[jax.Array, jax.Array],
    rate: jax.Array,
    decay: jax.Array,
    dense: jax.Array,
    *,
    config: DSV4Config,
) -> tuple[DSV4Params, Any, dict[str, jax.Array]]:
    """One step; `text` is what is read and what it should have been, i32[B, T + 2] each."""

    def loss(params: DSV4Params) -> tuple[jax.Array, dict[str, jax.Array]]:
        return training_loss(params, *text, config=config, dense=dense)

    def moved(path: tuple, param: jax.Array, update: jax.Array) -> jax.Array:
        shrink = decay * param if _is_matrix(path) else jnp.zeros_like(param)
        return param + (rate * (update - shrink)).astype(param.dtype)

    grads, losses = jax.grad(loss, has_aux=True, allow_int=True)(params)
    grads = jax.tree.map(lambda g, p: g if g.dtype == p.dtype else jnp.zeros_like(p), grads, params)
    updates, state = make_optimizer(params).update(grads, state, cast(Any, params))
    return jax.tree_util.tree_map_with_path(moved, params, updates), state, losses


def train(config: DSV4Config, corpus: Corpus, plan: Plan) -> DSV4Params:
    """Trains as planned; the parameters that did best, in bf16 (f32 where the model keeps f32)."""
    params = starting_params(config, jax.random.key(0))
    state: Any = make_optimizer(params).init(cast(Any, params))
    evaluate = jax.jit(held_out_loss, static_argnames=("config", "cache_format", "selector"))
    sizes = {"batch": plan.batch, "length": plan.length + 2}
    source = batches(corpus.train, **sizes, noise=plan.noise, seed=0)
    _, validation = next(batches(corpus.validation, batch=64, length=plan.length, noise=0, seed=1))
    start, best = time.time(), (float("inf"), params)
    for count in range(plan.num_steps):
        done = count / plan.num_steps
        warm = min(1.0, (count + 1) / 100)
        rate = plan.rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
        params, state, losses = training_step(
            params,
            state,
            jax.tree.map(jnp.asarray, next(source)),
            jnp.float32(rate),
            jnp.float32(plan.decay),
            jnp.asarray(done < plan.dense_share),
            config=config,
        )
        if (count + 1) % plan.steps_between_reports == 0:
            found = {name: round(float(value), 4) for name, value in losses.items()}
            found["validation"] = float(jnp.mean(evaluate(params, validation, config=config)))
            found |= {"step": count + 1, "seconds": round(time.time() - start)}
            print(json.dumps(found), flush=True)
            if found["validation"] < best[0] and done > plan.dense_share:
                best = (found["validation"], jax.tree.map(jnp.copy, params))
    shapes = param_shapes(config, jnp.bfloat16)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), best[1], shapes)


def _is_matrix(path: tuple) -> bool:
    """Whether weight decay applies: to what multiplies activations."""
    name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
    return "norm" not in name and name not in ("attn_sink", "bias", "ape", "scale", "base")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Trains the shipped checkpoint.")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--corpus", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=Plan.num_steps)
    args = parser.parse_args()
    config = shipped_config()
    corpus = read_corpus(args.corpus)
    print({name: len(part) for name, part in corpus._asdict().items()}, flush=True)
    save_checkpoint(config, train(config, corpus, Plan(num_steps=args.steps)), args.out)
    byte_tokenizer().save(str(args.out / "tokenizer.json"))


if __name__ == "__main__":
    main()
