"""What the benchmarks of `dsv4-jax bench` share: options, the model, and how a run has ended."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from dsv4_jax.bench.routing_laws import LAWS
from dsv4_jax.cache.schema import choose_cache_format
from dsv4_jax.cli.arguments import (
    add_activations,
    add_cache_format,
    add_follow_links,
    add_hosts,
    add_mesh,
    add_weights,
)
from dsv4_jax.cli.old_names import add_old_first
from dsv4_jax.cli.output_files import output_file
from dsv4_jax.cli.presets import PRESETS, read_config
from dsv4_jax.cli.values import real, whole, wholes
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.first_layers import first_layers
from dsv4_jax.config.kinds import show
from dsv4_jax.model.weight_forms import WEIGHT_FORMS

MAX_BATCH, MAX_SECONDS = 2**16, 1e9
STEP_CONTEXTS, OP_CONTEXTS = ("4096,131072,1048576", "256,4096"), ("16384", "256")
OP_BATCHES, PROMPTS = ("1,64", "1"), ("8192,32768", "256")
"""Defaults with a GPU and without one."""


def add_common(parser: argparse.ArgumentParser, *, hosts: bool = False) -> None:
    """Adds the model, the mesh, the cache and where figures go; `hosts` adds several processes."""
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help=f"{', '.join(PRESETS)} or a folder; if not given, flash_slim on a GPU and tiny "
        "without one",
    )
    add_old_first(parser, "config")
    parser.add_argument(
        "--layers", type=whole(), help="first layers of the model to use; if not given, all"
    )
    parser.add_argument(
        "--experts", type=whole(), help="routed experts; if not given, as many as the config has"
    )
    add_follow_links(parser)
    (add_hosts if hosts else add_mesh)(parser)
    add_cache_format(parser)
    parser.add_argument(
        "--json", type=output_file(), help="JSON file for the figures; if not given, none"
    )
    parser.add_argument(
        "--budget-s",
        type=real(0, MAX_SECONDS),
        default=540.0,
        help="seconds after which no case starts",
    )


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Adds the formats of weights and activations."""
    add_weights(
        parser,
        WEIGHT_FORMS,
        "bfloat16",
        "FP8 and FP4 where the release has them, or all decoded",
    )
    add_activations(parser, prefill=False)


def add_routings(parser: argparse.ArgumentParser) -> None:
    """Adds the laws by which tokens pick experts."""
    parser.add_argument(
        "--routing",
        type=_laws,
        default=tuple(LAWS),
        help=f"how tokens of random weights pick experts, out of {','.join(LAWS)}: all alike, or "
        "the r-th as often as 1 / r; steps and prompts are timed by each, all else by the first",
    )


def _laws(text: str) -> tuple[str, ...]:
    laws = tuple(text.split(","))
    if set(laws) - set(LAWS) or len(set(laws)) < len(laws):
        raise argparse.ArgumentTypeError(
            f"must be of {', '.join(LAWS)}, each at most once, got {show(text)}"
        )
    return laws


def add_batches(parser: argparse.ArgumentParser, usual: str) -> None:
    """Adds numbers of requests; `usual` says what they are if not given."""
    parser.add_argument(
        "--batch",
        type=wholes(1, MAX_BATCH),
        help=f"requests, one number or more; if not given, {usual}",
    )


def add_contexts(parser: argparse.ArgumentParser, sizes: tuple[str, str]) -> None:
    """Adds contexts; `sizes` are those of a GPU and without one, if they are not given."""
    parser.add_argument(
        "--contexts",
        type=wholes(),
        help=f"tokens of each request, one number or more; if not given, {sizes[0]} on a GPU and "
        f"{sizes[1]} without one",
    )


def config_of(args: argparse.Namespace) -> DSV4Config:
    """The model that was asked for, with its first layers and as many experts as that says.

    Where no cache format was asked for, the model's own is put into `args`.

    Raises:
      ValueError: it has not so many layers, or a token picks more experts.
      NotImplementedError: the model has no cache of the format that was asked for.
    """
    config = read_config(args.config, drafts=False, follow_links=args.follow_links)
    layers = config.num_layers if args.layers is None else args.layers
    experts = config.num_routed_experts if args.experts is None else args.experts
    if experts < config.num_experts_per_token:
        raise ValueError(f"experts must be at least {config.num_experts_per_token}, got {experts}")
    config = dataclasses.replace(first_layers(config, layers), num_routed_experts=experts)
    args.cache_format = choose_cache_format(config, args.cache_format)
    return config


def status_of(rows: list[dict[str, Any]]) -> int:
    """1 if a case failed, else 0; a case skipped for lack of memory or time has not failed."""
    return int(any("failed" in row for row in rows))
