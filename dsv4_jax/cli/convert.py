"""Converts a checkpoint to the formats of the release (FP8 and FP4), or to BF16.

One tensor is in memory at a time. Killed and started again, it compares what it had finished with
what it wrote, by size and SHA-256, makes again what differs, and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import pathlib

from dsv4_jax.checkpoint.convert import convert_checkpoint
from dsv4_jax.checkpoint.find import SHIPPED, find_checkpoint
from dsv4_jax.cli.arguments import add_drafts, add_loading, add_weights
from dsv4_jax.cli.memory import check_memory, largest_tensor_bytes
from dsv4_jax.cli.values import gib
from dsv4_jax.model.weight_forms import RELEASE_FORMS
from dsv4_jax.runtime import shown_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("source", type=pathlib.Path, help=f"checkpoint directory, or {SHIPPED}")
    parser.add_argument("destination", type=pathlib.Path, help="directory to write")
    add_weights(
        parser,
        RELEASE_FORMS,
        None,
        "stored: as the release stores them, block FP8, and MXFP4 for routed experts; what is "
        "quantised already stays. bfloat16: all decoded",
    )
    parser.add_argument(
        "--shard-gib",
        type=gib(2**-30, 2**20),
        default=5.0,
        help="GiB of tensors that a file holds at most",
    )
    add_drafts(parser)
    add_loading(parser)


def run(args: argparse.Namespace) -> int:
    """Converts, and says what was written."""
    source = find_checkpoint(SHIPPED) if str(args.source) == SHIPPED else args.source
    if source.is_dir():
        largest = largest_tensor_bytes(source, follow_links=args.follow_links)
        needs = {"a tensor and what it becomes": 2 * largest}
        check_memory(needs, "a machine with more memory", told=False)
    convert_checkpoint(
        source,
        args.destination,
        weights=args.weights,
        max_shard_bytes=int(args.shard_gib * 2**30),
        check_weights=args.check_weights,
        follow_links=args.follow_links,
        drafts=args.drafts != "off",
    )
    files = list(args.destination.glob("*.safetensors"))
    written = sum(file.stat().st_size for file in files)
    print(f"{args.destination}: {shown_bytes(written)} in {len(files)} file(s)")
    return 0
