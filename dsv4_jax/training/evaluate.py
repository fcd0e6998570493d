"""Held-out loss of a checkpoint: `python -m dsv4_jax.training.evaluate`.

The text is the documentation topics of this Python that training never saw. Four tables: what each
cache format costs, what the formats of the release cost for weights and for activations, what the
indexer's choice is worth against others, on the tokens that see more entries than it selects, and
what it costs to reuse a choice in later layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dsv4_jax.attention.full_sequence import Selector, select_by_score
from dsv4_jax.cache.schema import DEFAULT_CACHE_FORMAT
from dsv4_jax.checkpoint.load import SHIPPED_CHECKPOINT, load_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params, quantize_params
from dsv4_jax.training.corpus import read_corpus
from dsv4_jax.training.losses import held_out_loss, select_all, select_at_random
from pallas_kernels.common.formats import CACHE_FORMATS

_SELECTORS: dict[str, Selector] = {
    "by the indexer": select_by_score,
    "every entry": select_all,
    "at random": select_at_random,
}
_FORMATS = ("f32", DEFAULT_CACHE_FORMAT)
"""Cache formats of the table of weights."""


def held_out_rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Cuts a text into i32[n, length + 1]; each row's last token is the next one's first.

    Raises:
      ValueError: the length is below 1, or the text is too short for one row.
    """
    if not 1 <= length < len(tokens):
        raise ValueError(f"length must be in 1..{len(tokens) - 1}, got {length}")
    starts = np.arange(0, len(tokens) - length, length)
    return tokens[starts[:, None] + np.arange(length + 1)]


def losses_by_position(
    params: DSV4Params,
    rows: np.ndarray,
    *,
    config: DSV4Config,
    cache_format: str = "f32",
    selector: Selector = select_by_score,
    activations: str = DEFAULT_ACTIVATIONS,
) -> np.ndarray:
    """Nats per token at each position, a mean over rows i32[n, T + 1], run one by one: f32[T]."""
    losses = [
        _loss(
            params,
            row[None],
            config=config,
            cache_format=cache_format,
            selector=selector,
            activations=activations,
        )
        for row in tqdm(rows, desc=cache_format, unit="row", leave=False)
    ]
    return np.mean(np.stack(losses), axis=0)


_loss = jax.jit(
    held_out_loss, static_argnames=("config", "cache_format", "selector", "activations")
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=SHIPPED_CHECKPOINT)
    parser.add_argument("--corpus", type=pathlib.Path, help="of dsv4_jax.training.corpus")
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    try:
        rows = held_out_rows(read_corpus(args.corpus).held_out, args.length)
        config, params = load_checkpoint(args.checkpoint, dtype=jnp.float32)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    covered = config.indexer_top_k * config.compression_ratio(AttentionType.CSA)
    if args.length > config.max_position_embeddings or args.length <= covered:
        parser.error(
            f"--length must be in {covered + 1}..{config.max_position_embeddings}, since the last "
            f"tables take tokens beyond what is always selected, got {args.length}"
        )
    print(f"{rows.shape[0]} rows of {args.length} tokens, f32 activations; nats per byte")
    print(f"\n{'cache format':<24}{'loss':>10}")
    for cache_format in CACHE_FORMATS:
        losses = losses_by_position(params, rows, config=config, cache_format=cache_format)
        print(f"{cache_format:<24}{losses.mean():>10.4f}", flush=True)
    print(f"\n{'weights':<12}{'activations':<16}" + "".join(f"{name:>12}" for name in _FORMATS))
    released = quantize_params(config, params)
    for weights, activations, stored in [
        ("as stored", "bfloat16", params),
        ("released", "bfloat16", released),
        ("released", "fp8", released),
    ]:
        print(f"{weights:<12}{activations:<16}", end="")
        for cache_format in _FORMATS:
            losses = losses_by_position(
                stored, rows, config=config, cache_format=cache_format, activations=activations
            )
            print(f"{losses.mean():>12.4f}", end="", flush=True)
        print()
    print(f"\n{'entries selected':<24}{'loss':>10}   of tokens beyond position {covered}")
    for name, selector in _SELECTORS.items():
        losses = losses_by_position(params, rows, config=config, selector=selector)
        print(f"{name:<24}{losses[covered:].mean():>10.4f}", flush=True)
    print(f"\n{'layers that reuse':<24}{'loss':>10}   of tokens beyond position {covered}")
    csa = [i for i, attn in enumerate(config.layer_types) if attn == AttentionType.CSA]
    for layers in [(), *((layer,) for layer in csa[1:]), *([tuple(csa[1:])] if csa[2:] else [])]:
        reusing = dataclasses.replace(config, index_reuse=layers)
        losses = losses_by_position(params, rows, config=reusing)
        name = ", ".join(map(str, layers)) or "none"
        print(f"{name:<24}{losses[covered:].mean():>10.4f}", flush=True)


if __name__ == "__main__":
    main()
