"""Prints what a cache and the weights take, family by family, and what fits one GPU or several.

The numbers are those of the arrays that `load_checkpoint` and an engine would allocate, counted as
`serve` counts them. With `--data-shards` or `--model-shards` they are those of one device of a
mesh, and the least time of a step follows. Where all fits, the last line is the command that serves
it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from dsv4_jax.bench.floor import COLLECTIVE_S
from dsv4_jax.bench.gpus import GPUS
from dsv4_jax.bench.placement import Placement, fitting_meshes, place
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
from dsv4_jax.cli.engine_options import auto_drafts
from dsv4_jax.cli.gpus import Gpus, read_gpus
from dsv4_jax.cli.plan_files import Files, count_files
from dsv4_jax.cli.plan_mesh import (
    draft_note,
    plan_mesh,
    print_cache,
    print_mesh_plan,
    print_weights,
    step_lines,
)
from dsv4_jax.cli.plan_serve import not_run, serve_line
from dsv4_jax.cli.plan_tiers import add_tiers, print_tiers
from dsv4_jax.cli.presets import PRESETS
from dsv4_jax.cli.values import gib, real, whole
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.kinds import MAX_I32
from dsv4_jax.model.weight_forms import STORED, WEIGHT_FORMS
from dsv4_jax.runtime import look_for_no_gpu, shown_bytes
from dsv4_jax.serving.options import MAX_REQUESTS, EngineOptions

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
    parser.add_argument(
        "--requests", type=whole(1, MAX_REQUESTS), help="requests at once; if not given, 1"
    )
    add_fields(parser, EngineOptions, ["cache_format", "prefill_tokens"])
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
        if_not_given="those with room for most requests on several GPUs of --gpu, or beside the "
        "other what is left of them; else 1",
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
    look_for_no_gpu()
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
    given = argparse.Namespace(**vars(args))
    args.requests = args.requests or 1
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
    place_model = functools.partial(
        place,
        config,
        context=args.context,
        cache_format=args.cache_format,
        weights=args.weights,
        draft_tokens=auto_drafts(config)[0],
        prefill_tokens=args.prefill_tokens,
        split_cache=args.split_cache,
    )
    is_spread = gpus.count > 1 or args.data is not None or args.model is not None
    if is_spread or config.sources is not None:
        if args.weights_gib is not None:
            raise ValueError("--weights-gib is for one device; on a mesh weights are computed")
        placed = plan_mesh(args, gpus, place_model)
        fits = print_mesh_plan(config, args, gpus, placed, place_model)
    else:
        if args.split_cache:
            raise ValueError(
                "--split-cache deals a cache over the devices of a mesh; add --model-shards"
            )
        weight_bytes = None if args.weights_gib is None else int(args.weights_gib * 2**30)
        placed = place_model(
            data=1, model=1, gpu_bytes=gpus.memory_bytes, given_weight_bytes=weight_bytes
        )
        fits = _print_one(config, args, gpus, placed, place_model)
    print_tiers(config, args)
    _print_files(files)
    if fits:
        if untried := not_run(placed):
            print(f"\nno GPU has run this yet: {', '.join(untried)}")
        print(f"\nto serve it: {serve_line(given, placed)}")
    return int(not fits)


def _print_one(
    config: DSV4Config,
    args: argparse.Namespace,
    gpus: Gpus,
    placed: Placement,
    place_model: Callable[..., Placement],
) -> bool:
    """Prints the plan of one GPU, whether it fits first, and says that."""
    size = {"max_requests": args.requests, "max_context_tokens": args.context}
    cache = cache_shapes(config, cache_format=args.cache_format, **size)
    trunk = cache_shapes(config.without_draft(), cache_format=args.cache_format, **size)
    fits, rest = _fit(args, gpus, placed, place_model)
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
    print()
    print_cache(placed.beside(args.requests), args.context)
    counted = print_weights(placed.families, args.weights)
    print(f"\nweights: {shown_bytes(counted)}, {counted:,} bytes{draft_note(config)}")
    print("\n".join(rest))
    return fits


def _print_files(files: Files | None) -> None:
    if files is not None:
        print("", *files.lines(), sep="\n")


def _fit(
    args: argparse.Namespace,
    gpus: Gpus,
    placed: Placement,
    place_model: Callable[..., Placement],
) -> tuple[bool, list[str]]:
    """Prints whether it fits one GPU, and if not, what would.

    Returns:
      Whether it does, and lines about what is left there.
    """
    beside, fitting = placed.beside(args.requests), placed.requests
    needed = placed.weight_bytes + beside.total_bytes
    lines = step_lines(beside)
    if fitting:
        free = gpus.memory_bytes - needed + beside.cache_bytes
        lines.append(f"left for a cache: {shown_bytes(max(free, 0))} of {gpus}")
        cache = shown_bytes(placed.beside(fitting).pools.memory_bytes)
        lines.append(f"requests that fit: {fitting:,}, whose cache takes {cache}")
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
    if not fitting and (longest := placed.longest_context()):
        would.append(f"--context {longest}")
    would += [f"--gpu {kind}" for kind, gpu in GPUS.items() if gpu.memory_bytes >= needed]
    for kind in GPUS if gpus.kind is None else [gpus.kind]:
        if placed.given_weight_bytes is not None:
            break  # what is given instead cannot be spread
        meshes = fitting_meshes(functools.partial(place_model, gpu_bytes=GPUS[kind].memory_bytes))
        enough = [mesh for mesh in meshes if mesh.data * mesh.requests >= args.requests]
        if enough and (count := enough[0].data * enough[0].model) > 1:
            would.append(f"--gpu {kind}x{count}")
    print(f"what would: {', '.join(would) or 'no GPU that plan knows'}")
    return False, lines
