"""Prints what a cache and the weights take, family by family, and what fits one GPU or several.

The numbers are those of the arrays that `init_cache` and `load_checkpoint` would allocate. With
`--data` or `--model` they are those of one device of a mesh, and the least time of a step follows.
"""

from __future__ import annotations

import argparse
import dataclasses

from dsv4_jax.bench.floor import COLLECTIVE_S
from dsv4_jax.cache.model_cache import cache_shapes, family_bytes, tree_bytes
from dsv4_jax.cache.schema import DEFAULT_CACHE_FORMAT, blocks_of
from dsv4_jax.cli.arguments import WEIGHTS, add_follow_links, add_mesh, real, whole
from dsv4_jax.cli.plan_mesh import print_mesh_plan, print_weights
from dsv4_jax.cli.presets import PRESETS, read_config
from dsv4_jax.config.kinds import MAX_I32
from dsv4_jax.model.params import param_shapes
from dsv4_jax.model.weight_sizes import bytes_by_family
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
    add_mesh(parser)
    parser.add_argument(
        "--collective-us",
        type=real(0, 1e6),
        default=COLLECTIVE_S * 1e6,
        help="microseconds that a collective takes beside its bytes, on a mesh",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    config = read_config(args.config, follow_links=args.follow_links)
    num_blocks = args.requests * blocks_of(config, args.context)
    if num_blocks > MAX_I32:
        raise ValueError(
            f"--requests {args.requests} of --context {args.context} take {num_blocks:,} blocks, "
            f"and a block table can number {MAX_I32:,}; lower either"
        )
    if args.data is not None or args.model is not None:
        print_mesh_plan(config, args)
        return 0
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
    shapes = param_shapes(config, "bfloat16", weights=WEIGHTS[args.weights])
    count = print_weights(bytes_by_family(shapes), args.weights)
    draft = ", draft block included" if config.num_mtp_layers else ""
    print(f"\nweights: {count / 2**30:,.2f} GiB, {count:,} bytes{draft}")
    weights_gib = count / 2**30
    if args.weights_gib is not None:
        weights_gib = args.weights_gib
    free = max(args.gpu_gib - weights_gib, 0.0) * 2**30
    fitting = int(free // (total / args.requests))
    print(f"requests that fit {free / 2**30:,.1f} GiB beside the weights: {fitting:,}")
    return 0
