"""Prints what a cache and the weights take, family by family, and what fits a GPU.

The numbers are those of the arrays that `init_cache` and `load_checkpoint` would allocate.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses

from dsv4_jax.cache.model_cache import cache_shapes, family_bytes, tree_bytes
from dsv4_jax.cache.schema import DEFAULT_CACHE_FORMAT, blocks_of
from dsv4_jax.cli.arguments import WEIGHTS, add_follow_links, real, whole
from dsv4_jax.cli.presets import PRESETS, read_config
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.kinds import MAX_I32
from dsv4_jax.model.params import param_shapes
from dsv4_jax.model.weight_sizes import FORMATS, bytes_by_family
from pallas_kernels.common.formats import CACHE_FORMATS

_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("config", help=f"{', '.join(PRESETS)}, or a checkpoint directory")
    parser.add_argument("--context", type=whole(), default=131_072, help="tokens per request")
    parser.add_argument("--requests", type=whole(1, 2**20), default=1, help="requests at once")
    parser.add_argument("--cache-format", choices=CACHE_FORMATS, default=DEFAULT_CACHE_FORMAT)
    parser.add_argument(
        "--gpu-gib", type=real(0, 2**20), default=141 * 1e9 / 2**30, help="GPU memory"
    )
    parser.add_argument(
        "--weights",
        choices=tuple(WEIGHTS),
        default="released",
        help="FP8 and FP4 as the release stores them, or all decoded to bfloat16",
    )
    parser.add_argument(
        "--weights-gib",
        type=real(0, 2**20),
        default=None,
        help="GPU memory that weights take, in place of what they are computed to",
    )
    add_follow_links(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    config = read_config(args.config, follow_links=args.follow_links)
    num_blocks = args.requests * blocks_of(config, args.context)
    if num_blocks > MAX_I32:
        raise ValueError(
            f"--requests {args.requests} of --context {args.context} take {num_blocks:,} blocks, "
            f"and a block table can number {MAX_I32:,}; lower either"
        )
    size = {"max_requests": args.requests, "max_context_tokens": args.context}
    cache = cache_shapes(config, cache_format=args.cache_format, **size)
    trunk = cache_shapes(
        dataclasses.replace(config, num_mtp_layers=0), cache_format=args.cache_format, **size
    )
    print(
        f"{args.config}, {args.cache_format}: {args.requests} request(s) of {args.context:,} "
        f"tokens, blocks of {cache.block_tokens} tokens"
    )
    per_request = {
        name: count / args.requests for name, count in family_bytes(trunk).items() if count
    }
    print(f"\n{'family':<28}{'MiB per request':>18}{'bytes per token':>18}")
    for name, count in per_request.items():
        print(f"{name:<28}{count / _MIB:>18,.2f}{count / args.context:>18,.2f}")
    growing = sum(n for name, n in per_request.items() if name.endswith(("entries", "keys")))
    window = sum(n for name, n in per_request.items() if name.endswith("window"))
    state = sum(n for name, n in per_request.items() if name.endswith("state"))
    for name, count in (
        ("blocks and window", growing + window),
        ("compressor states", state),
        ("trunk", growing + window + state),
    ):
        print(f"{name:<28}{count / _MIB:>18,.2f}{count / args.context:>18,.2f}")
    draft = (tree_bytes(cache) - tree_bytes(trunk)) / args.requests
    print(f"{'draft block window':<28}{draft / _MIB:>18,.2f}")
    total = tree_bytes(cache)
    print(f"\ncache: {total / 2**30:,.2f} GiB, tables and lengths included")
    weights_gib = _print_weights(config, args.weights) / 2**30
    if args.weights_gib is not None:
        weights_gib = args.weights_gib
    free = max(args.gpu_gib - weights_gib, 0.0) * 2**30
    fitting = int(free // (total / args.requests))
    print(f"requests that fit {free / 2**30:,.1f} GiB beside the weights: {fitting:,}")
    return 0


def _print_weights(config: DSV4Config, weights: str) -> int:
    """Prints a table of families and formats; all bytes."""
    shapes = param_shapes(config, "bfloat16", weights=WEIGHTS[weights])
    families = bytes_by_family(shapes)
    formats = [name for name in FORMATS if any(name in sizes for sizes in families.values())]
    print(f"\n{f'weights, {weights}':<28}{''.join(f'{f"{name} MiB":>14}' for name in formats)}")
    total = collections.Counter[str]()
    for sizes in families.values():
        total.update(sizes)
    for family, sizes in [*families.items(), ("all", total)]:
        cells = (f"{sizes[name] / _MIB:,.2f}" if name in sizes else "-" for name in formats)
        print(f"{family:<28}{''.join(f'{cell:>14}' for cell in cells)}")
    count = total.total()
    draft = ", draft block included" if config.num_mtp_layers else ""
    print(f"\nweights: {count / 2**30:,.2f} GiB, {count:,} bytes{draft}")
    return count
