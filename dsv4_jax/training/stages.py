"""Trains DSpark stages for a checkpoint, in the place of the draft that it has.

    python -m dsv4_jax.training.stages --out DIR                       of the shipped one
    python -m dsv4_jax.training.stages --checkpoint DIR --out OTHER    of another

Needs the extra `train`. The trunk keeps its bytes. What the stages learn is the trunk's own
distribution at the positions behind anchors, which are drawn at random in Python's own text. They
start as copies of the MTP block, if there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.checkpoint.find import SHIPPED_CHECKPOINT
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.checkpoint.save import save_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.model.draft_params import DSparkParams, MTPParams
from dsv4_jax.model.params import DSV4Params, param_shapes
from dsv4_jax.runtime import set_xla_flags
from dsv4_jax.training.corpus import EOS, Corpus, read_corpus
from dsv4_jax.training.optimizer import XLA_TRAINING_FLAGS, make_optimizer, move, rate_at
from dsv4_jax.training.rounds import evaluate
from dsv4_jax.training.stage_losses import StageLosses, stage_loss
from dsv4_jax.training.train import batches, starting_params
from pallas_kernels.common.weights import is_quantized


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """How long the training is and how fast it learns.

    Attributes:
      num_steps: steps of the optimizer.
      batch: rows of a step.
      length: bytes of a row.
      num_anchors: blocks of a row.
      rate: the highest learning rate, as of `rate_at`.
      warm_up: steps until then.
      decay: weight decay of matrices, per unit of the learning rate.
      noise: share of bytes that are read wrong.
      steps_between_reports: steps between reports.
      minutes: when to end, if that comes before the last step, what is compiled included.
    """

    num_steps: int = 4000
    batch: int = 32
    length: int = 512
    num_anchors: int = 64
    rate: float = 3e-3
    warm_up: int = 50
    decay: float = 0.1
    noise: float = 0.02
    steps_between_reports: int = 100
    minutes: float = math.inf


def with_stages(config: DSV4Config, *, markov_rank: int = 64) -> DSV4Config:
    """The model with three stages that read its last three layers."""
    targets = tuple(range(config.num_layers))[-3:]
    draft = DSparkConfig(
        block_size=5,
        markov_rank=markov_rank,
        noise_token_id=(config.eos_token_ids or (EOS,))[0],
        target_layers=targets,
        num_stages=3,
    )
    return dataclasses.replace(config.without_draft(), dspark=draft)


def starting_stages(config: DSV4Config, params: DSV4Params, key: jax.Array) -> DSparkParams:
    """Copies of the MTP block in f32, or neutral ones; confidences of a half.

    Args:
      config: the model, with `dspark`.
      params: of the trunk, with the draft that it has.
      key: a PRNG key.
    """
    stages = starting_params(config, key).mtp
    assert isinstance(stages, DSparkParams)
    stages = dataclasses.replace(stages, confidence=jnp.zeros_like(stages.confidence))
    if not isinstance(params.mtp, MTPParams):
        return stages
    mtp = in_f32(params.mtp)
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * stages.num_stages), mtp.block)
    return dataclasses.replace(stages, stages=copies, hc_head=mtp.hc_head, norm=mtp.norm)


def in_f32[Tree](params: Tree) -> Tree:
    """A tree with its bf16 arrays in f32."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, params
    )


def anchored_rows(
    corpus: Corpus, plan: StagePlan, block_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless pairs of i32[batch, length], as the model reads it, and anchors of blocks in it."""
    rng = np.random.default_rng(0)
    rows = batches(corpus.train, batch=plan.batch, length=plan.length, noise=plan.noise, seed=0)
    for read, _ in rows:
        size = (plan.batch, plan.num_anchors)
        yield read, rng.integers(1, plan.length - block_size, size, np.int32)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=(0, 1))
def stage_step(
    stages: DSparkParams,
    state: Any,
    trunk: DSV4Params,
    text: tuple[jax.Array, jax.Array],
    rate: jax.Array,
    decay: jax.Array,
    *,
    config: DSV4Config,
) -> tuple[DSparkParams, Any, StageLosses]:
    """One step; `text` is of `anchored_rows`."""
    grads, losses = jax.grad(stage_loss, has_aux=True)(stages, trunk, *text, config=config)
    updates, state = make_optimizer(stages).update(grads, state, cast(Any, stages))
    return move(stages, updates, rate, decay), state, losses


def train_stages(
    config: DSV4Config, params: DSV4Params, corpus: Corpus, plan: StagePlan
) -> DSV4Params:
    """Trains as planned.

    Args:
      config: the model, with `dspark`.
      params: dense, of the trunk, with the draft that it has.
      corpus: what is read.
      plan: how long, and how fast.

    Returns:
      The parameters with stages of the trunk's dtype in the place of that draft; all other arrays
      are those that were given.
    """
    assert config.dspark is not None
    started, count = time.time(), 0
    stages = jax.tree.map(jnp.copy, starting_stages(config, params, jax.random.key(0)))
    trunk = in_f32(dataclasses.replace(params, mtp=None))
    state = make_optimizer(stages).init(cast(Any, stages))
    losses: Any = ()
    compiled = 0.0  # seconds that the first step took, of which the rate knows nothing

    def share_done() -> float:
        left = 60 * plan.minutes - compiled
        passed = time.time() - started - compiled
        of_time = passed / left if left > 0 else 1.0
        return max(count / plan.num_steps, of_time) if count else 0.0

    for text in anchored_rows(corpus, plan, config.dspark.block_size):
        done = share_done()
        if done >= 1:
            break
        rate = rate_at(plan.rate, plan.warm_up, count, done)
        stages, state, new = stage_step(
            stages, state, trunk, text, rate, jnp.float32(plan.decay), config=config
        )
        if not count:
            compiled = time.time() - started
        jax.block_until_ready(losses)  # one step ahead of the device, so that minutes are its own
        losses, count = new, count + 1
        if count % plan.steps_between_reports == 0 or share_done() >= 1:
            _report(losses, count, time.time() - started)
    shapes = param_shapes(config, params.dtype).mtp
    stages = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), stages, shapes)
    return dataclasses.replace(params, mtp=stages)


def _report(losses: StageLosses, count: int, seconds: float) -> None:
    agreement = np.asarray(losses.agreement)
    found = {
        "step": count,
        "seconds": round(seconds),
        "divergence": round(float(losses.divergence), 4),
        "confidence": round(float(losses.confidence), 4),
        "agreement": [round(float(share), 3) for share in agreement],
        "tokens_a_round": round(1 + float(np.cumprod(agreement).sum()), 3),
    }
    print(json.dumps(found), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Trains DSpark stages for a checkpoint.", allow_abbrev=False
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, default=SHIPPED_CHECKPOINT)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write")
    parser.add_argument("--corpus", type=pathlib.Path, help="of dsv4_jax.training.corpus")
    parser.add_argument("--steps", type=int, help="steps of the optimizer; if not given, planned")
    parser.add_argument("--minutes", type=float, help="when to end at the latest; likewise")
    parser.add_argument("--batch", type=int, help="rows of a step; likewise")
    parser.add_argument("--length", type=int, help="bytes of a row; likewise")
    parser.add_argument("--anchors", type=int, help="blocks of a row; likewise")
    parser.add_argument("--markov-rank", type=int, default=64, help="64 if not given")
    parser.add_argument("--evaluate", action="store_true", help="count tokens a round at the end")
    args = parser.parse_args()
    names = {"steps": "num_steps", "anchors": "num_anchors"}
    given = {
        names.get(name, name): value
        for name in ("steps", "minutes", "batch", "length", "anchors")
        if (value := getattr(args, name)) is not None
    }
    plan = dataclasses.replace(StagePlan(), **given)
    set_xla_flags(**XLA_TRAINING_FLAGS)
    trunk_config, params = load_checkpoint(args.checkpoint)
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        parser.error(f"--checkpoint must have dense weights, and {args.checkpoint} has others")
    config, corpus = (
        with_stages(trunk_config, markov_rank=args.markov_rank),
        read_corpus(args.corpus),
    )
    params = train_stages(config, params, corpus, plan)
    save_checkpoint(config, params, args.out)
    if (tokenizer := args.checkpoint / "tokenizer.json").exists():
        shutil.copyfile(tokenizer, args.out / "tokenizer.json")
    if args.evaluate:
        print(json.dumps(evaluate(config, params, corpus.held_out)))


if __name__ == "__main__":
    main()
