"""How many tokens a round of DSpark drafts gives, on answers to text that no training has seen.

    python -m dsv4_jax.training.rounds --checkpoint DIR

Answers are greedy. A round runs the last token that was drawn and the drafts behind it; those that
the trunk would have drawn itself are kept, and its own token after them. No cache is used, so that
this says the same as an engine by other means.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.checkpoint.find import SHIPPED_CHECKPOINT
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.model.dspark import Drafts, chain, choose_likeliest
from dsv4_jax.model.dspark_sequence import context_entries, guess_block
from dsv4_jax.model.forward import forward_means
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import head
from dsv4_jax.training.corpus import held_out_rows, read_held_out
from pallas_kernels.common.formats import get_cache_format

NUM_BINS = 5
"""Parts of equal width into which confidences are sorted."""


class Round(NamedTuple):
    """What a round found.

    Attributes:
      kept: i32[B], drafts that were kept.
      drafts: the next round's.
      length: i32[B], tokens that are known then, with the last one drawn.
      token_ids: i32[B, T], the text with those drafts behind it.
    """

    kept: jax.Array
    drafts: Drafts
    length: jax.Array
    token_ids: jax.Array


@functools.partial(jax.jit, static_argnames="config")
def run_round(
    params: DSV4Params,
    token_ids: jax.Array,
    length: jax.Array,
    num_drafts: jax.Array,
    *,
    config: DSV4Config,
) -> Round:
    """Checks the drafts behind a text, and guesses the next ones.

    Args:
      params: model parameters, with DSpark stages.
      token_ids: i32[B, T], in each row a text, drafts, and anything.
      length: i32[B], of the texts; 1 to T - 2 N - 1.
      num_drafts: i32[], N, or 0 where there are none yet.
      config: the model, with `dspark`.
    """
    spec = _spec(config)
    streams, means = forward_means(params, token_ids, spec.target_layers, config=config)
    logits = head(params.hc_head, params.norm, params.head, streams, config)
    own = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # after each token
    rows, depth = jnp.arange(len(token_ids))[:, None], jnp.arange(spec.block_size)[None]
    drafts = token_ids[rows, length[:, None] + depth]
    same = (drafts == own[rows, length[:, None] - 1 + depth]) & (depth < num_drafts)
    kept = jnp.sum(jnp.cumprod(same, axis=1), axis=1, dtype=jnp.int32)
    last = length + kept  # position of the token that is drawn
    anchor_ids = own[rows[:, 0], last - 1]
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1])[None], token_ids.shape)
    fmt = get_cache_format("f32")
    entries = context_entries(params, means, positions, config, fmt)
    guesses = guess_block(params, anchor_ids, last, entries, config=config, fmt=fmt)
    found = chain(params, anchor_ids, guesses, choose_likeliest)
    token_ids = token_ids.at[rows[:, 0], last].set(anchor_ids)
    token_ids = token_ids.at[rows, last[:, None] + 1 + depth].set(found.token_ids)
    return Round(kept, found, last + 1, token_ids)


class Rounds(NamedTuple):
    """Rounds of several answers.

    Attributes:
      kept: i32[R, B], drafts of each round that were kept.
      confidence: f32[R, B, N], of those drafts, as chances.
      counts: bool[R, B], whether the answer had not ended before the round.
    """

    kept: np.ndarray
    confidence: np.ndarray
    counts: np.ndarray


def run_rounds(
    params: DSV4Params, prompts: np.ndarray, num_rounds: int, *, config: DSV4Config
) -> tuple[Rounds, list[np.ndarray]]:
    """Answers prompts i32[B, P] in so many rounds; also gives the texts, prompts included."""
    spec = _spec(config)
    batch, size = prompts.shape
    room = (num_rounds + 2) * (spec.block_size + 1)
    token_ids = jnp.asarray(np.pad(prompts, ((0, 0), (0, room))), jnp.int32)
    length = jnp.full((batch,), size, jnp.int32)
    found = run_round(params, token_ids, length, jnp.int32(0), config=config)
    kept, confidence, lengths = [], [], [np.asarray(found.length)]
    for _ in range(num_rounds):
        confidence.append(np.asarray(jax.nn.sigmoid(found.drafts.confidence)))
        count = jnp.int32(spec.block_size)
        found = run_round(params, found.token_ids, found.length, count, config=config)
        kept.append(np.asarray(found.kept))
        lengths.append(np.asarray(found.length))
    text = np.asarray(found.token_ids)
    ends = np.isin(text, config.eos_token_ids)
    counts = [
        [not ends[row, size:length].any() for row, length in enumerate(before)]
        for before in lengths[:-1]
    ]
    texts = [text[row, :length] for row, length in enumerate(lengths[-1])]
    return Rounds(np.stack(kept), np.stack(confidence), np.array(counts)), texts


def summarise(rounds: Rounds) -> dict[str, Any]:
    """What the rounds say together.

    Returns:
      `rounds`, how many; `tokens_a_round`, with the trunk's own; `kept`, by depth, the share of
      rounds that kept so many drafts; `kept_if_reached`, the same of those that kept all before;
      `expected_tokens`, what confidences say of `tokens_a_round`; `calibration`, for each part of
      confidences those of checked drafts, [how many, their mean, the share that was kept]; and
      `calibration_error`, the mean distance of those two.
    """
    kept, chance = rounds.kept[rounds.counts], rounds.confidence[rounds.counts]
    depth = np.arange(chance.shape[-1])[None]
    reached, good = kept[:, None] >= depth, kept[:, None] > depth
    checked, was_kept = chance[reached], good[reached]
    places = np.minimum((checked * NUM_BINS).astype(int), NUM_BINS - 1)
    bins = [(checked[places == place], was_kept[places == place]) for place in range(NUM_BINS)]
    bins = [(len(said), float(said.mean()), float(true.mean())) for said, true in bins if len(said)]
    return {
        "rounds": len(kept),
        "tokens_a_round": 1 + float(kept.mean()),
        "kept": good.mean(axis=0).tolist(),
        "kept_if_reached": (good.sum(axis=0) / np.maximum(reached.sum(axis=0), 1)).tolist(),
        "expected_tokens": 1 + float(np.cumprod(chance, axis=1).sum(axis=1).mean()),
        "calibration": [list(found) for found in bins],
        "calibration_error": sum(n * abs(a - b) for n, a, b in bins) / max(len(checked), 1),
    }


def evaluate(
    config: DSV4Config,
    params: DSV4Params,
    held_out: np.ndarray,
    *,
    num_prompts: int = 32,
    prompt_length: int = 160,
    num_rounds: int = 16,
) -> dict[str, Any]:
    """`summarise` of answers to parts of a text, spread over it."""
    rows = held_out_rows(held_out, prompt_length)
    some = rows[np.linspace(0, len(rows) - 1, min(num_prompts, len(rows))).astype(int), 1:]
    return summarise(run_rounds(params, some, num_rounds, config=config)[0])


def _spec(config: DSV4Config) -> DSparkConfig:
    if config.dspark is None:
        raise ValueError("config must have DSpark stages, got dspark=None; train some first")
    return config.dspark


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Counts the tokens a round of DSpark drafts.", allow_abbrev=False
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, default=SHIPPED_CHECKPOINT)
    parser.add_argument("--corpus", type=pathlib.Path, help="of dsv4_jax.training.corpus")
    parser.add_argument("--prompts", type=int, default=32, help="answers, 32 if not given")
    parser.add_argument("--rounds", type=int, default=16, help="of each answer, 16 if not given")
    args = parser.parse_args()
    config, params = load_checkpoint(args.checkpoint)
    held_out = read_held_out(args.corpus)
    found = evaluate(config, params, held_out, num_prompts=args.prompts, num_rounds=args.rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
