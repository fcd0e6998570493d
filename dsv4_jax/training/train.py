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
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsv4_jax.config import DSV4Config
from dsv4_jax.layer_schedule import AttentionType, RouterType
from dsv4_jax.model.checkpoint import save_checkpoint
from dsv4_jax.model.params import DSV4Params, init_params, param_shapes
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


def batches(tokens: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Endless i32[batch, length]: half of them start with a document, half anywhere."""
    rng = np.random.default_rng(seed)
    starts = np.flatnonzero(tokens == BOS)
    starts = starts[starts < len(tokens) - length]
    while True:
        anywhere = rng.integers(0, len(tokens) - length, batch)
        begin = np.where(rng.random(batch) < 0.5, rng.choice(starts, batch), anywhere)
        yield tokens[begin[:, None] + np.arange(length)]


def make_optimizer(params: DSV4Params) -> optax.GradientTransformation:
    """AdamW at rate 1, for the caller to scale by the rate of the moment; tables stay."""
    labels = jax.tree.map(lambda leaf: "keep" if leaf.dtype == jnp.int32 else "train", params)
    adamw = optax.adamw(
        1.0, b1=0.9, b2=0.95, weight_decay=0.1, mask=lambda tree: jax.tree.map(_is_matrix, tree)
    )
    return optax.multi_transform(
        {"train": optax.chain(optax.clip_by_global_norm(1.0), adamw), "keep": optax.set_to_zero()},
        cast(Any, labels),
    )


def train(
    config: DSV4Config, *, corpus: pathlib.Path | None, minutes: float, batch: int, length: int
) -> DSV4Params:
    """Trains for that long and returns the parameters in bf16 (f32 where the model keeps f32)."""
    text = read_corpus(corpus)
    print({name: len(part) for name, part in text._asdict().items()}, flush=True)
    params = starting_params(config, jax.random.key(0))
    optimizer = make_optimizer(params)
    state: Any = optimizer.init(cast(Any, params))

    @functools.partial(jax.jit, static_argnames="dense", donate_argnums=(0, 1))
    def step(
        params: DSV4Params, state: Any, token_ids: jax.Array, rate: jax.Array, *, dense: bool
    ) -> tuple[DSV4Params, Any, dict[str, jax.Array]]:
        def loss(params: DSV4Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            return training_loss(params, token_ids, config=config, dense=dense)

        grads, losses = jax.grad(loss, has_aux=True, allow_int=True)(params)
        grads = jax.tree.map(
            lambda g, p: g if g.dtype == p.dtype else jnp.zeros_like(p), grads, params
        )
        updates, state = optimizer.update(grads, state, cast(Any, params))
        params = jax.tree.map(lambda p, u: p + (u * rate).astype(p.dtype), params, updates)
        return params, state, losses

    evaluate = jax.jit(held_out_loss, static_argnames=("config", "cache_format", "selector"))
    validation = next(batches(text.validation, 64, length + 1, seed=1))
    source = batches(text.train, batch, length + 2, seed=0)
    start, count = time.time(), 0
    best: tuple[float, DSV4Params | None] = (float("inf"), None)
    while (done := (time.time() - start) / (60 * minutes)) < 1:
        rate = 3e-3 * min(1, (count + 1) / 300) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * done)))
        params, state, losses = step(
            params, state, jnp.asarray(next(source)), jnp.float32(rate), dense=done < 0.4
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
    shapes = param_shapes(config, jnp.bfloat16)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), best[1] or params, shapes)


def _is_matrix(leaf: jax.Array) -> bool:
    return leaf.ndim > 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Trains the shipped checkpoint.")
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
