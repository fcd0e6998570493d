"""The command that serves what `dsv4-jax plan` planned."""

from __future__ import annotations

import argparse
import pathlib
import shlex

from dsv4_jax.bench.placement import Placement
from dsv4_jax.checkpoint.find import ON_THE_HUB, SHIPPED
from dsv4_jax.cli.presets import preset_of
from dsv4_jax.model.weight_forms import STORED

UNNAMED = "CHECKPOINT"
"""Stands for a checkpoint whose place nobody has said."""


def serve_line(args: argparse.Namespace, placed: Placement) -> str:
    """The command line of `serve` that takes what a plan counted.

    Args:
      args: those of `plan`, as they were given; without `--requests` the most that fit are served.
      placed: the mesh that was planned.
    """
    requests = args.requests or placed.data * placed.requests
    words = ["dsv4-jax", "serve", _checkpoint_of(args.config)]
    if placed.data * placed.model > 1:
        words += ["--data-shards", str(placed.data), "--model-shards", str(placed.model)]
    if args.split_cache:
        words.append("--split-cache")
    if placed.config.has_draft or args.drafts == "off":
        words += ["--drafts", args.drafts]
    words += ["--max-requests", str(-(-requests // placed.data) * placed.data)]
    words += ["--max-context-tokens", str(args.context)]
    if args.prefill_tokens is not None:
        words += ["--prefill-tokens", ",".join(map(str, args.prefill_tokens))]
    if args.cache_format is not None:
        words += ["--cache-format", args.cache_format]
    if args.weights != STORED:
        words += ["--weights", args.weights]
    if args.host_cache:
        words += ["--host-cache", _as_written(args.host_cache)]
    if args.disk_cache_size:
        words += ["--disk-cache", "DIR", "--disk-cache-size", _as_written(args.disk_cache_size)]
    if args.follow_links:
        words.append("--follow-links")
    return shlex.join(words)


def not_run(placed: Placement) -> list[str]:
    """What of that no GPU has run yet, as `docs/limits.md` says it."""
    found = []
    if placed.config.engram is not None and placed.data * placed.model > 1:
        found.append("an engine of a model with Engram tables on more than one GPU")
    if placed.options.draft_tokens and placed.data * placed.model > 1:
        found.append("drafts on more than one GPU, which --drafts off leaves out")
    return found


def _checkpoint_of(name: str) -> str:
    """What `serve` takes for a model that `plan` knows by that name."""
    preset = preset_of(name)
    if preset is None or name == SHIPPED or pathlib.Path(name).is_dir():
        return name
    return next((where for where, of in ON_THE_HUB.items() if of == preset), UNNAMED)


def _as_written(num_bytes: int) -> str:
    """A number of bytes as an option takes it."""
    gib, rest = divmod(num_bytes, 2**30)
    return str(num_bytes) if rest else f"{gib}GiB"
