"""What memory of the host, or a disk, holds of known prefixes."""

from __future__ import annotations

import argparse

from dsv4_jax.allocator.pool_plan import plan_pools
from dsv4_jax.cli.values import num_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.runtime import shown_bytes


def add_tiers(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes of what lies beside the devices."""
    parser.add_argument(
        "--host-cache",
        type=num_bytes,
        metavar="BYTES",
        help="of the host's memory, for prefixes that gave way on the devices, such as 64GiB; "
        "if not given, none",
    )
    parser.add_argument(
        "--disk-cache-size",
        type=num_bytes,
        metavar="BYTES",
        help="of a disk, for prefixes that outlive the process, such as 500GiB; if not given, none",
    )


def print_tiers(config: DSV4Config, args: argparse.Namespace) -> None:
    """Prints what fits, if a size is given; arguments as of `plan`.

    A prefix resumes at a snapshot, so that it is counted with one at its end.
    """
    sizes = {"the host": args.host_cache, "a disk": args.disk_cache_size}
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given:
        return
    pools = plan_pools(
        config.without_draft() if args.drafts == "off" else config,
        max_requests=1,
        max_context_tokens=args.context,
        cache_format=args.cache_format,
    )
    blocks = max(args.context // pools.block_tokens, 1)
    prefix = blocks * pools.bytes_per_block + pools.bytes_per_snapshot
    print(
        f"\nprefixes: {pools.bytes_per_block:,} bytes for a block of {pools.block_tokens} tokens, "
        f"{pools.bytes_per_snapshot:,} for a snapshot"
    )
    for name, size in given.items():
        tokens = size // pools.bytes_per_block * pools.block_tokens if pools.bytes_per_block else 0
        print(
            f"on {name}, in {shown_bytes(size)}: {size // prefix:,} prefixes of "
            f"{blocks * pools.block_tokens:,} tokens with a snapshot each, or {tokens:,} tokens "
            "of blocks"
        )
