"""Arguments that several commands take."""

from __future__ import annotations

import argparse

from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from pallas_kernels.common.weights import ACTIVATIONS

WEIGHTS = {"released": "released", "bfloat16": "dense"}
"""`--weights` and what `param_shapes` calls them: FP8 and FP4 as the release, or all bfloat16."""


def add_activations(parser: argparse.ArgumentParser, *, prefill: bool = True) -> None:
    """Adds what multiplies quantised weights, with `prefill` for decode and prefill apart."""
    parser.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default=DEFAULT_ACTIVATIONS,
        help="what multiplies FP8 and FP4 weights: rows rounded to E4M3, or as they are",
    )
    if prefill:
        parser.add_argument(
            "--prefill-activations",
            choices=ACTIVATIONS,
            help="the same in steps that hold prompt tokens; if not given, as --activations",
        )
