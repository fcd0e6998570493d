"""Losses of a checkpoint by entries that CSA layers select, and by tokens that come before.

    python -m tools.loss_table large --corpus corpus.npz --rows 16

The first table is of the tokens that see more entries than the checkpoint selects, the second of
the last 1,024 tokens of the same rows. Differences are from the checkpoint as it is, row by row.
"""

import argparse
import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.config.idea import Idea
from dsv4_jax.research.intervals import mean_interval, paired_difference
from dsv4_jax.research.losses import losses_by_row
from dsv4_jax.training.corpus import held_out_rows, read_held_out
from dsv4_jax.training.losses import select_all, select_at_random

LAST = 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("--corpus", type=pathlib.Path)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--top-k", type=int, nargs="*", default=[16, 256])
    parser.add_argument("--before", type=int, nargs="*", default=[3072, 1024, 0])
    arguments = parser.parse_args()
    config, params = load_checkpoint(arguments.checkpoint, dtype=jnp.float32)
    rows = held_out_rows(read_held_out(arguments.corpus), arguments.length)[: arguments.rows]
    covered = config.indexer_top_k * config.compression_ratio(ds.AttentionType.CSA)

    def measure(changed, rows=rows):
        return np.float64(losses_by_row(params, rows, config=changed))

    whole = measure(config)
    ideas = {f"{k} selected": dataclasses.replace(config, indexer_top_k=k) for k in arguments.top_k}
    ideas["all attended"] = Idea(selector=select_all).applied_to(config)
    ideas["as many at random"] = Idea(selector=select_at_random).applied_to(config)
    print_row(f"{config.indexer_top_k} selected", whole[:, covered:])
    for name, changed in ideas.items():
        print_row(name, measure(changed)[:, covered:], whole[:, covered:])
    print_row(f"{arguments.length - LAST} tokens before", whole[:, -LAST:])
    for before in arguments.before:
        shorter = measure(config, rows[:, -(before + LAST + 1) :])
        print_row(f"{before} tokens before", shorter[:, -LAST:], whole[:, -LAST:])


def print_row(name, losses, first=None):
    """Means over tokens, with the interval of what is different from the first row."""
    by_row = losses.mean(axis=1)
    text = f"{name:<24}{mean_interval(by_row).mean:.4f}"
    if first is not None:
        text += "  {:+.4f} ({:+.4f} to {:+.4f})".format(
            *paired_difference(first.mean(axis=1), by_row)
        )
    print(text, flush=True)


if __name__ == "__main__":
    main()
