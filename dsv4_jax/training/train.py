"""Trains the shipped checkpoint: `python -m dsv4_jax.training.train --out DIR`, on one GPU.

Dense attention to all entries for the first 40 % of the time, then sparse; the indexer is distilled
throughout. The parameters that do best on the validation part are kept. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsv4_jax.config import DSV4Config
from dsv4_jax.layer_schedule import AttentionType, RouterType

# SAVE
from dsv4_jax.model.params import DSV4Params, init_params
from dsv4_jax.training.corpus import BOS, EOS, VOCAB_SIZE, read_corpus
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


def batches(tokens: np.ndarray, batch: int, length: int, seed: int):  # noqa: ANN201
    """Endless i32[batch, length]: half of them start with a document, half anywhere."""
    rng = np.random.default_rng(seed)
    starts = np.flatnonzero(tokens == BOS)
    starts = starts[starts < len(tokens) - length]
    while True:
        anywhere = rng.integers(0, len(tokens) - length, batch)
        begin = np.where(rng.random(batch) < 0.5, rng.choice(starts, batch), anywhere)
        yield tokens[begin[:, None] + np.arange(length)]


def train(
    config: DSV4Config, *, corpus: pathlib.Path | None, minutes: float, batch: int, length: int
) -> DSV4Params:
    """Trains for that long and returns the parameters in bf16 (f32 where the model keeps f32)."""
    text = read_corpus(corpus)
    print({name: len(part) for name, part in text._asdict().items()}, flush=True)
    params = starting_params(config, jax.random.key(0))
    frozen = jax.tree.map(lambda leaf: leaf.dtype == jnp.int32, params)
    progress = optax.inject_hyperparams(optax.adamw)(
        learning_rate=0.0,
        b1=0.9,
        b2=0.95,
        weight_decay=0.1,
        mask=jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    optimizer = optax.multi_transform(
        {
            "train": optax.chain(optax.clip_by_global_norm(1.0), progress),
            "keep": optax.set_to_zero(),
        },
        jax.tree.map(lambda is_frozen: "keep" if is_frozen else "train", frozen),
    )
    state = optimizer.init(params)

    @functools.partial(jax.jit, static_argnames="dense", donate_argnums=(0, 1))
    def step(params, state, token_ids, rate, *, dense):  # noqa: ANN001, ANN202
        def loss(trained):  # noqa: ANN001, ANN202
            merged = jax.tree.map(lambda f, p, t: p if f else t, frozen, params, trained)
            return training_loss(merged, token_ids, config=config, dense=dense)

        floats = jax.tree.map(lambda f, p: jnp.zeros(()) if f else p, frozen, params)
        (_, losses), grads = jax.value_and_grad(loss, has_aux=True)(floats)
        grads = jax.tree.map(lambda f, p, g: jnp.zeros_like(p) if f else g, frozen, params, grads)
        updates, state = optimizer.update(grads, state, params)
        updates = jax.tree.map(lambda u: u * rate, updates)
        return jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates), state, losses

    # The rate multiplies Adam's unit steps, so that it can follow the clock instead of a count.
    state.inner_states["train"].inner_state[1].hyperparams["learning_rate"] = jnp.float32(1.0)
    evaluate = jax.jit(held_out_loss, static_argnames=("config", "cache_format", "selector"))
    validation = next(batches(text.validation, 64, length + 1, seed=1))
    source = batches(text.train, batch, length + 2, seed=0)
    start, count, best = time.time(), 0, (float("inf"), params)
    while (done := (time.time() - start) / (60 * minutes)) < 1:
        rate = 3e-3 * min(1, (count + 1) / 300) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * done)))
        params, state, losses = step(
            params, state, next(source), jnp.float32(rate), dense=done < 0.4
        )
        if count % 250 == 0:
            found = {name: round(float(value), 4) for name, value in losses.items()}
            found["validation"] = float(jnp.mean(evaluate(params, validation, config=config)))
            found |= {"step": count, "minutes": round((time.time() - start) / 60, 2)}
            print(json.dumps(found), flush=True)
            if found["validation"] < best[0] and done > 0.4:
                best = (found["validation"], jax.tree.map(jnp.copy, params))
        elif count % 20 == 0:
            jax.block_until_ready(losses)
        count += 1
    print(f"{count} steps, {count * batch * length / 1e6:.0f} M tokens; best {best[0]}", flush=True)
    params = best[1]
    keep_f32 = init_params(config, jax.random.key(0), jnp.bfloat16)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, keep_f32)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--corpus", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    config = shipped_config()
    params = train(
        config,
        corpus=args.corpus,
        minutes=args.minutes,
        batch=args.batch,
        length=args.length,
    )
    save_checkpoint(config, params, args.out)


if __name__ == "__main__":
    main()
