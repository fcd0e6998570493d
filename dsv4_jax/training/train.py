"""Trains a checkpoint from Python's own text, on one GPU; needs the extra `train`.

    python -m dsv4_jax.training.train --out DIR                  the shipped one, 2.8 M parameters
    python -m dsv4_jax.training.train --size large --out DIR     33 M parameters, 8,192 tokens

CSA layers attend to all entries at first, then to the selected ones; the indexer is distilled
throughout. The large one reads short rows at first, and at the end long ones. The parameters that
do best on the validation part are kept.
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

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from dsv4_jax.checkpoint.save import save_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.model.params import DSV4Params, init_params, param_shapes
from dsv4_jax.regular_files import has_regular_file, open_regular
from dsv4_jax.runtime import set_xla_flags
from dsv4_jax.training.corpus import BOS, EOS, VOCAB_SIZE, Corpus, byte_tokenizer, read_corpus
from dsv4_jax.training.losses import held_out_loss, training_loss
from dsv4_jax.training.optimizer import XLA_TRAINING_FLAGS, make_optimizer, move, rate_at

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


def large_config() -> DSV4Config:
    """Twelve times the parameters and twice the context: what is selected matters more."""
    return dataclasses.replace(
        shipped_config(),
        max_position_embeddings=8192,
        indexer_top_k=64,
        num_attention_heads=8,
        q_lora_rank=192,
        o_lora_rank=128,
        hidden_size=384,
        moe_intermediate_size=384,
        num_routed_experts=6,
        layer_types=(SWA, *(CSA, HCA) * 3, CSA),
        router_types=(RouterType.HASH, *(RouterType.LEARNED,) * 7),
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
      long_length: bytes of a row in the last steps, one row a step; 0 is none of those.
      long_share: their share of the steps.
      rate: the highest learning rate, as of `rate_at`.
      warm_up: steps until then.
      decay: weight decay of matrices, per unit of the learning rate.
      noise: share of bytes that are read wrong.
      dense_share: share of the steps, the first ones, in which CSA layers attend to every entry.
      steps_between_reports: steps between reports, each with a validation loss.
      minutes: when to end, if that comes before the last step; shares are then of this time.
    """

    num_steps: int = 3200
    batch: int = 32
    length: int = 1024
    long_length: int = 0
    long_share: float = 0.0
    rate: float = 3e-3
    warm_up: int = 100
    decay: float = 1.0
    noise: float = 0.1
    dense_share: float = 0.4
    steps_between_reports: int = 200
    minutes: float = math.inf


LARGE = Plan(num_steps=8000, rate=1.5e-3, noise=0.05, long_length=8192, long_share=0.25, minutes=50)
SIZES = {"shipped": (shipped_config, Plan()), "large": (large_config, LARGE)}
"""By name: the model and how it is trained. The large one reads modules with their code."""


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

    grads, losses = jax.grad(loss, has_aux=True, allow_int=True)(params)
    grads = jax.tree.map(lambda g, p: g if g.dtype == p.dtype else jnp.zeros_like(p), grads, params)
    updates, state = make_optimizer(params).update(grads, state, cast(Any, params))
    return move(params, updates, rate, decay), state, losses


@flax.struct.dataclass
class Progress:
    """A training so far; it goes on from here as if it had not been stopped.

    Attributes:
      params: parameters.
      optimizer: the optimizer's state.
      best: the parameters that did best, or those at the start.
      best_loss: their validation loss; infinite before any was compared.
      num_short: steps with short rows.
      num_long: steps with long ones.
      seconds: how long they took together.
    """

    params: DSV4Params
    optimizer: Any
    best: DSV4Params
    best_loss: float = math.inf
    num_short: int = 0
    num_long: int = 0
    seconds: float = 0.0


def start_training(config: DSV4Config, state: pathlib.Path | None = None) -> Progress:
    """A training that begins, or that goes on from a file of `train`."""
    params = starting_params(config, jax.random.key(0))
    blank = Progress(params, make_optimizer(params).init(cast(Any, params)), params)
    if state is None or not has_regular_file(state):
        return blank
    with open_regular(state) as stream:
        return jax.tree.map(jnp.asarray, serialization.from_bytes(blank, stream.read()))


def train(
    config: DSV4Config,
    corpus: Corpus,
    plan: Plan,
    *,
    state: pathlib.Path | None = None,
    pause_minutes: float = math.inf,
) -> DSV4Params | None:
    """Trains as planned; the parameters that did best, in bf16 (f32 where the model keeps f32).

    Of the steps with long rows, where there are any; else of those in which CSA layers select.

    Args:
      config: the model.
      corpus: what is read.
      plan: how long, and how fast.
      state: a file from which to go on if it is there, and which a pause writes.
      pause_minutes: stop after so long; the result is None then.
    """
    begun = start_training(config, state)
    params, optimizer = _copy(begun.params), _copy(begun.optimizer)
    best, best_loss = begun.best, float(begun.best_loss)
    num_short, num_long = int(begun.num_short), int(begun.num_long)
    sizes = {"length": plan.length + 2, "noise": plan.noise}
    short = batches(corpus.train, batch=plan.batch, seed=0, **sizes)
    long = batches(corpus.train, batch=1, seed=2, **(sizes | {"length": plan.long_length + 2}))
    for rows, count in ((short, num_short), (long, num_long)):
        for _ in range(count):
            next(rows)
    validation = _validation_rows(corpus, plan)
    compared_from = 1 - plan.long_share if plan.long_length else plan.dense_share
    started, losses = time.time(), {}

    def seconds() -> float:
        return float(begun.seconds) + time.time() - started

    def share_done() -> float:
        count = num_short + num_long
        return max(count / plan.num_steps, seconds() / (60 * plan.minutes)) if count else 0.0

    while (done := share_done()) < 1:
        is_long = bool(plan.long_length) and done >= compared_from
        text = jax.tree.map(jnp.asarray, next(long if is_long else short))
        jax.block_until_ready(losses)  # one step ahead of the device, so that minutes are its own
        params, optimizer, losses = training_step(
            params,
            optimizer,
            text,
            rate_at(plan.rate, plan.warm_up, num_short + num_long, done),
            jnp.float32(plan.decay),
            jnp.asarray(done < plan.dense_share),
            config=config,
        )
        num_long, num_short = num_long + is_long, num_short + (not is_long)
        count = num_short + num_long
        if count % plan.steps_between_reports == 0 or share_done() >= 1:
            row = {name: round(float(value), 4) for name, value in losses.items()}
            rows = [jnp.mean(_held_out(params, some, config=config)) for some in validation]
            row["validation"] = float(np.mean(rows))
            row |= {"step": count, "seconds": round(seconds())}
            print(json.dumps(row), flush=True)
            if done > compared_from and row["validation"] < best_loss:
                best_loss, best = row["validation"], _copy(params)
        if share_done() < 1 and time.time() - started > 60 * pause_minutes:
            paused = Progress(params, optimizer, best, best_loss, num_short, num_long, seconds())
            assert state is not None
            _write(state, serialization.to_bytes(jax.device_get(paused)))
            return None
    shapes = param_shapes(config, jnp.bfloat16)
    chosen = best if math.isfinite(best_loss) else params
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), chosen, shapes)


def _copy[T](tree: T) -> T:
    """Arrays of its own, which a step may donate."""
    return jax.tree.map(jnp.copy, tree)


def _write(path: pathlib.Path, contents: bytes) -> None:
    """The whole file, or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(contents)
    part.replace(path)


_held_out = jax.jit(held_out_loss, static_argnames="config")


def _validation_rows(corpus: Corpus, plan: Plan) -> list[np.ndarray]:
    """i32[n, T] each, to be run one by one; as long as the longest rows of the training."""
    long = plan.long_length > 0
    sizes = {"batch": 1 if long else 64, "length": plan.long_length or plan.length}
    source = batches(corpus.validation, **sizes, noise=0, seed=1)
    return [next(source)[1] for _ in range(8 if long else 1)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Trains a checkpoint from Python's own text.", allow_abbrev=False
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write")
    parser.add_argument("--size", choices=SIZES, default="shipped", help="which model")
    parser.add_argument("--corpus", type=pathlib.Path, help="of dsv4_jax.training.corpus")
    parser.add_argument("--steps", type=int, help="steps of the optimizer; if not given, planned")
    parser.add_argument("--minutes", type=float, help="when to end at the latest; likewise")
    parser.add_argument("--state", type=pathlib.Path, help="file to go on from, and to pause in")
    parser.add_argument("--pause-minutes", type=float, help="write --state after so long, and end")
    args = parser.parse_args()
    make_config, plan = SIZES[args.size]
    if args.steps is not None:
        plan = dataclasses.replace(plan, num_steps=args.steps)
    if args.minutes is not None:
        plan = dataclasses.replace(plan, minutes=args.minutes)
    if args.pause_minutes is not None and args.state is None:
        parser.error("--pause-minutes needs --state")
    set_xla_flags(**XLA_TRAINING_FLAGS)
    config, corpus = make_config(), read_corpus(args.corpus, whole=args.size == "large")
    print({name: len(part) for name, part in corpus._asdict().items()}, flush=True)
    pause = math.inf if args.pause_minutes is None else args.pause_minutes
    params = train(config, corpus, plan, state=args.state, pause_minutes=pause)
    if params is None:
        print(f"paused in {args.state}; the same command goes on")
        return
    save_checkpoint(config, params, args.out)
    byte_tokenizer().save(str(args.out / "tokenizer.json"))


if __name__ == "__main__":
    main()
