"""What a benchmark refuses before it allocates anything."""

from __future__ import annotations

import argparse

import jax

from dsv4_jax.bench import decode
from dsv4_jax.bench.memory import memory_limit
from dsv4_jax.bench.workspace import workspace_bytes
from dsv4_jax.cache.empty_cache import cache_shapes
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.cli.arguments import chosen_mesh
from dsv4_jax.cli.memory import check_memory, weight_share
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import param_shapes

_WAY_OUT = "config tiny, fewer --layers or --experts, --weights stored, or a larger device"


def check_mesh(args: argparse.Namespace) -> None:
    """Refuses what runs on one device alone, and batches that do not divide.

    Raises:
      ValueError: there is more than one device, and the command or an option takes one.
    """
    if args.what == "decode" and _splits(args) and (args.model or 1) == 1:
        raise ValueError("a split cache is dealt over --model-shards; add --model-shards 2 or more")
    if chosen_mesh(args) is None:
        return
    if args.what == "kernels":
        raise ValueError(
            "bench kernels times ops of one device; leave --data-shards and --model-shards out"
        )
    if args.what == "decode":
        parts = ("step",) if args.quick else args.parts
        if args.depths:
            raise ValueError(
                "--depths runs on one device; leave --data-shards and --model-shards out"
            )
        if args.drafts and not args.quick:
            raise ValueError(
                "bench decode --drafts times whole steps and rounds alone on a mesh; add --quick"
            )
        if not set(parts) <= {"step", "loop"}:
            raise ValueError(
                "bench decode times whole steps on a mesh, alone and in a loop; add --parts step"
            )
        for batch in args.batch:
            if batch % (args.data or 1):
                raise ValueError(f"--batch must divide over --data-shards {args.data}, got {batch}")


def _splits(args: argparse.Namespace) -> bool:
    """Whether the cache of some point is split."""
    return args.split_cache or any(split for _, _, split in args.points or ())


def check_case_memory(
    args: argparse.Namespace,
    config: DSV4Config,
    batch: int,
    context: int,
    *,
    weights: str | None,
    call_tokens: int | None = None,
) -> None:
    """Asks for the weights, if any, the cache of one case and a call; larger ones are skipped.

    Args:
      args: of the command.
      config: the model.
      batch: requests.
      context: tokens of each.
      weights: form of the weights; None is without them.
      call_tokens: tokens of a prefill call on a data shard; None is a decode step.

    Raises:
      MemoryError: that does not fit.
    """
    needs = {"cache": _cache_bytes(config, args, batch, context)}
    if weights is not None:
        shapes, mesh = param_shapes(config, weights=weights), chosen_mesh(args)
        share = 1.0 if mesh is None else weight_share(config, mesh, weights=weights)
        needs = {"weights": int(share * tree_bytes(shapes))} | needs
    if jax.default_backend() != "cpu":
        needs["a step"] = _step_bytes(args, config, context, call_tokens)
    smaller = "" if call_tokens is None else "a smaller --chunk, "
    check_memory(needs, smaller + _WAY_OUT)


def _step_bytes(
    args: argparse.Namespace, config: DSV4Config, context: int, call_tokens: int | None
) -> int:
    if call_tokens is None:
        return decode.MARGIN_BYTES
    data, model = args.data or 1, args.model or 1
    workspace = workspace_bytes(
        config, data=data, model=model, context=context, step_tokens=call_tokens, logit_rows=1
    )
    return max(decode.MARGIN_BYTES, workspace)


def find_shortage(
    config: DSV4Config, args: argparse.Namespace, batch: int, context: int
) -> str | None:
    """What a cache needs beyond what there is, or None."""
    needed, limit = _cache_bytes(config, args, batch, context), memory_limit()
    if limit is None or needed <= limit:
        return None
    return f"needs {needed / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB"


def _cache_bytes(config: DSV4Config, args: argparse.Namespace, batch: int, context: int) -> int:
    parts = (args.model or 1) if getattr(args, "split_cache", False) else 1
    shapes = cache_shapes(
        config,
        max_requests=-(-batch // (args.data or 1)),
        max_context_tokens=-(-context // parts),
        cache_format=args.cache_format,
    )
    return tree_bytes(shapes)


def check_contexts(config: DSV4Config, name: str, contexts: list[int]) -> None:
    """Refuses contexts longer than the model's.

    Raises:
      ValueError: one is.
    """
    for context in contexts:
        if context > config.max_position_embeddings:
            raise ValueError(
                f"{name} must be in 1..{config.max_position_embeddings}, got {context}"
            )
