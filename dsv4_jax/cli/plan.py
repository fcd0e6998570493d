"""Prints what a cache and the weights take, family by family, and what fits one GPU or several.

The numbers are those of the arrays that `init_cache` and `load_checkpoint` would allocate. With
`--data-shards` or `--model-shards` they are those of one device of a mesh, and the least time of a
step follows.
"""

from __future__ import annotations

import argparse
import functools

from dsv4_jax.bench.floor import COLLECTIVE_S
from dsv4_jax.bench.gpus import GPUS
from dsv4_jax.bench.placement import STEP_TOKENS, fitting_meshes, place
from dsv4_jax.cache.empty_cache import cache_shapes
from dsv4_jax.cache.model_cache import family_bytes, family_kinds, tree_bytes
from dsv4_jax.cache.schema import FamilyKind, blocks_of, choose_cache_format
from dsv4_jax.checkpoint.find import SHIPPED
from dsv4_jax.cli.arguments import (
    add_drafts,
    add_fields,
    add_follow_links,
    add_mesh,
    add_weights,
)
from dsv4_jax.cli.gpus import Gpus, read_gpus
from dsv4_jax.cli.plan_files import Files, count_files
from dsv4_jax.cli.plan_mesh import draft_note, print_mesh_plan, print_weights
from dsv4_jax.cli.plan_tiers import add_tiers, print_tiers
from dsv4_jax.cli.presets import PRESETS
from dsv4_jax.cli.values import gib, real, whole
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.kinds import MAX_I32
from dsv4_jax.model.params import param_shapes
from dsv4_jax.model.weight_forms import STORED, WEIGHT_FORMS
from dsv4_jax.model.weight_sizes import bytes_by_family
from dsv4_jax.runtime import shown_bytes
from dsv4_jax.serving.options import EngineOptions

_MIB = 2**20

USUAL_CONTEXT = 131_072
"""Tokens of a request that nobody has told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help=f"{', '.join(PRESETS)}, {SHIPPED}, a directory, or a released model of the Hugging "
        "Face hub (owner/model)",
    )
    parser.add_argument(
        "--context",
        type=whole(),
        help=f"tokens per request, also as 128K or 1M; if not given, {USUAL_CONTEXT:,}, or the "
        "most that the model is meant for",
    )
    parser.add_argument("--requests", type=whole(1, 2**20), default=1, help="requests at once")
    add_fields(parser, EngineOptions, ["cache_format"])
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--gpu",
        type=read_gpus,
        default=read_gpus("h200"),
        help=f"{', '.join(GPUS)}, or several of a kind, such as b200x8",
    )
    memory.add_argument(
        "--gpu-gib",
        type=gib(0, 2**20),
        help="memory of a GPU in GiB, also as 80GiB; if not given, that of --gpu",
    )
    add_weights(
        parser,
        WEIGHT_FORMS,
        STORED,
        "FP8 and FP4 as the release stores them, or all decoded",
    )
    parser.add_argument(
        "--weights-gib",
        type=gib(0, 2**20),
        help="GiB that weights take, also as 80GiB; if not given, they are counted",
    )
    add_follow_links(parser)
    add_drafts(parser)
    add_mesh(
        parser,
        split_cache=True,
        if_not_given="those with room for most requests on several GPUs of --gpu, else 1",
    )
    add_tiers(parser)
    parser.add_argument(
        "--collective-us",
        type=real(0, 1e6),
        default=COLLECTIVE_S * 1e6,
        help="microseconds that a collective takes beside its bytes, on a mesh",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan, whether it fits first; status 1 if it does not."""
    config, files = count_files(
        args.config, follow_links=args.follow_links, drafts=args.drafts != "off"
    )
    longest = config.max_position_embeddings
    if args.context is None:
        args.context = min(USUAL_CONTEXT, longest)
    if args.context > longest:
        raise ValueError(
            f"--context must be at most {longest:,}, the longest that {args.config} is meant for, "
            f"got {args.context:,}"
        )
    num_blocks = args.requests * blocks_of(config, args.context)
    if num_blocks > MAX_I32:
        raise ValueError(
            f"--requests {args.requests} of --context {args.context} take {num_blocks:,} blocks, "
            f"and a block table can number {MAX_I32:,}; lower either"
        )
    args.cache_format = choose_cache_format(config, args.cache_format)
    if args.weights == STORED and files is not None and files.is_decoded:
        args.weights = "bfloat16"
    gpus = args.gpu
    if args.gpu_gib is not None:
        gpus = Gpus(None, 1, int(args.gpu_gib * 2**30))
    is_spread = gpus.count > 1 or args.data is not None or args.model is not None
    if is_spread or config.sources is not None:
        fits = print_mesh_plan(config, args, gpus)
        print_tiers(config, args)
        _print_files(files)
        return int(not fits)
    if args.split_cache:
        raise ValueError(
            "--split-cache deals a cache over the devices of a mesh; add --model-shards"
        )
    size = {"max_requests": args.requests, "max_context_tokens": args.context}
    cache = cache_shapes(config, cache_format=args.cache_format, **size)
    trunk = cache_shapes(config.without_draft(), cache_format=args.cache_format, **size)
    shapes, total = param_shapes(config, weights=args.weights), tree_bytes(cache)
    families = bytes_by_family(shapes)
    weights = sum(sum(sizes.values()) for sizes in families.values())
    taken = weights if args.weights_gib is None else int(args.weights_gib * 2**30)
    fits, rest = _fit(config, args, gpus, taken, total / args.requests)
    print(
        f"\n{args.config}, {args.cache_format}: {args.requests} request(s) of {args.context:,} "
        f"tokens, blocks of {cache.block_tokens} tokens"
    )
    per_request = {
        name: count / args.requests for name, count in family_bytes(trunk).items() if count
    }
    print(f"\n{'family':<28}{'MiB per request':>18}{'bytes per token':>18}")
    for name, count in per_request.items():
        print(f"{name:<28}{count / _MIB:>18,.2f}{count / args.context:>18,.2f}")
    kinds = family_kinds(trunk)
    growing, window, state = (
        sum(count for name, count in per_request.items() if kinds[name] is kind)
        for kind in (FamilyKind.ENTRIES, FamilyKind.WINDOW, FamilyKind.STATE)
    )
    for name, count in (
        ("blocks and window", growing + window),
        ("compressor states", state),
        ("trunk", growing + window + state),
    ):
        print(f"{name:<28}{count / _MIB:>18,.2f}{count / args.context:>18,.2f}")
    draft = (tree_bytes(cache) - tree_bytes(trunk)) / args.requests
    print(f"{'draft window':<28}{draft / _MIB:>18,.2f}")
    print(f"\ncache: {shown_bytes(total)}, tables and lengths included")
    print_weights(families, args.weights)
    print(f"\nweights: {shown_bytes(weights)}, {weights:,} bytes{draft_note(config)}")
    print("\n".join(rest))
    print_tiers(config, args)
    _print_files(files)
    return int(not fits)


def _print_files(files: Files | None) -> None:
    if files is not None:
        print("", *files.lines(), sep="\n")


def _fit(
    config: DSV4Config, args: argparse.Namespace, gpus: Gpus, weight_bytes: int, per_request: float
) -> tuple[bool, list[str]]:
    """Prints whether it fits one GPU, and if not, what would.

    Returns:
      Whether it does, and lines about what is left there.
    """
    place_model = functools.partial(
        place,
        config,
        context=args.context,
        cache_format=args.cache_format,
        weights=args.weights,
    )
    placed = place_model(data=1, model=1, gpu_bytes=gpus.memory_bytes)
    beside = weight_bytes + placed.workspace_bytes
    free = gpus.memory_bytes - beside
    fitting = max(int(free // per_request), 0)
    workspace = shown_bytes(placed.workspace_bytes)
    lines = [f"workspace: {workspace}, estimated, {STEP_TOKENS} tokens"]
    if fitting:
        lines.append(f"left for a cache: {shown_bytes(free)} of {gpus}")
        lines.append(f"requests that fit: {fitting:,}")
    needed = beside + args.requests * per_request
    asked = f"{args.requests:,} request(s) of {args.context:,} tokens"
    if needed <= gpus.memory_bytes:
        print(
            f"fits {gpus}: weights, workspace and {asked} take {shown_bytes(needed)} of its "
            f"{shown_bytes(gpus.memory_bytes)}, and at most {fitting:,} would fit"
        )
        return True, lines
    print(
        f"does not fit {gpus}: weights, workspace and {asked} take "
        f"{shown_bytes(needed)}, {shown_bytes(needed - gpus.memory_bytes)} more than "
        f"its {shown_bytes(gpus.memory_bytes)}"
    )
    would = [f"--requests {fitting}"] if fitting else []
    pools = placed.pools
    room = free - pools.bytes_per_slot
    blocks = int(room // pools.bytes_per_block) if pools.bytes_per_block else 0
    if blocks > 0 and not fitting:
        would.append(f"--context {blocks * pools.block_tokens}")
    would += [f"--gpu {kind}" for kind, gpu in GPUS.items() if gpu.memory_bytes >= needed]
    for kind in GPUS if gpus.kind is None else [gpus.kind]:
        if weight_bytes != placed.weight_bytes:
            break  # what is given instead cannot be spread
        meshes = fitting_meshes(functools.partial(place_model, gpu_bytes=GPUS[kind].memory_bytes))
        enough = [m for m in meshes if m.data * m.requests(args.context) >= args.requests]
        if enough and (count := enough[0].data * enough[0].model) > 1:
            would.append(f"--gpu {kind}x{count}")
    print(f"what would: {', '.join(would) or 'no GPU that plan knows'}")
    return False, lines
