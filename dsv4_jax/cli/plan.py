"""Prints what a cache takes: bytes per family, per token and per request, and what fits a GPU.

The numbers are those of the arrays that `init_cache` would allocate.
"""

from __future__ import annotations

import argparse
import dataclasses

from dsv4_jax.cache.model_cache import cache_shapes, family_bytes, tree_bytes
from dsv4_jax.cache.schema import DEFAULT_CACHE_FORMAT
from dsv4_jax.cli.presets import PRESETS, read_config
from dsv4_jax.model.params import param_shapes
from pallas_kernels.common.formats import CACHE_FORMATS

_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("config", help=f"{', '.join(PRESETS)}, or a checkpoint directory")
    parser.add_argument("--context", type=int, default=131_072, help="tokens per request")
    parser.add_argument("--requests", type=int, default=1, help="requests at once")
    parser.add_argument("--cache-format", choices=CACHE_FORMATS, default=DEFAULT_CACHE_FORMAT)
    parser.add_argument("--gpu-gib", type=float, default=141 * 1e9 / 2**30, help="GPU memory")
    parser.add_argument(
        "--weights-gib", type=float, default=None, help="GPU memory that weights take; else 0"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    config = read_config(args.config)
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
    print(f"bf16 weights: {tree_bytes(param_shapes(config, 'bfloat16')) / 2**30:,.1f} GiB")
    free = (args.gpu_gib - (args.weights_gib or 0.0)) * 2**30
    fitting = max(int(free // (total / args.requests)), 0)
    print(f"requests that fit {free / 2**30:,.1f} GiB beside the weights: {fitting:,}")
    return 0
