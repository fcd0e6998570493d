"""Options of the commands that load a checkpoint into an engine, and the engine that they name."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from tokenizers import Tokenizer

from dsv4_jax.checkpoint.find import find_checkpoint
from dsv4_jax.cli.arguments import add_activations, add_cache_format, whole
from dsv4_jax.cli.memory import check_engine_memory
from dsv4_jax.config import DSV4Config
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.sizing import MAX_DRAFT_TOKENS, MAX_STEPS_PER_CALL


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds drafts, steps of a call, the cache's format, and the form of weights and activations."""
    parser.add_argument(
        "--draft-tokens",
        type=whole(0, MAX_DRAFT_TOKENS),
        default=0,
        help="tokens that the draft block guesses in a step; 0 is no speculation",
    )
    parser.add_argument(
        "--steps-per-call",
        type=whole(1, MAX_STEPS_PER_CALL),
        default=1,
        help="decode steps that the host launches at once; more are faster where it is slower than "
        "the GPUs, but tokens come in groups",
    )
    add_cache_format(parser)
    parser.add_argument(
        "--weights",
        choices=("stored", "bfloat16", "float32"),
        default="stored",
        help="FP8 and FP4 weights as they are stored, or decoded",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of activations; if not given, that of decoded weights, or else bfloat16",
    )
    add_activations(parser)


def find_model(
    args: argparse.Namespace, *, needs_tokenizer: bool = False
) -> tuple[pathlib.Path, DSV4Config]:
    """The checkpoint's directory and its config.

    Args:
      args: with the options of `add_checkpoint` and `add_engine_options`.
      needs_tokenizer: as of `find_checkpoint`.

    Raises:
      ValueError: there is none, it cannot be read, it has no draft block for --draft-tokens, or
        these are given together with --steps-per-call.
    """
    if args.draft_tokens and args.steps_per_call > 1:
        raise ValueError(
            f"--steps-per-call {args.steps_per_call} makes steps without drafts, got "
            f"--draft-tokens {args.draft_tokens} too; leave one of them out"
        )
    folder = find_checkpoint(
        args.checkpoint, revision=args.revision, needs_tokenizer=needs_tokenizer
    )
    config = DSV4Config.from_hf(folder, follow_links=args.follow_links, text_only=True)
    if args.draft_tokens and not config.num_mtp_layers:
        raise ValueError(
            f"--draft-tokens {args.draft_tokens} needs a draft (MTP) block, and {folder} has none; "
            "leave it out"
        )
    return folder, config


def build_engine(
    args: argparse.Namespace,
    folder: pathlib.Path,
    config: DSV4Config,
    mesh: Mesh | None,
    *,
    max_requests: int,
    max_context_tokens: int,
    prefill_tokens: tuple[int, ...] | None = None,
    decodes_alone: bool = True,
    gpu_memory_fraction: float | None = None,
    grammars: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    """Loads the checkpoint, after asking whether it fits.

    Args:
      args: with the options of `add_engine_options`, `add_loading` and `add_mesh`.
      folder: the checkpoint.
      config: its config.
      mesh: as of `Engine`, like all that follows.
      max_requests: requests that run at once.
      max_context_tokens: longest prompt and answer.
      prefill_tokens: sizes of steps that hold prompts.
      decodes_alone: steps without a prompt are a program of their own, and not the largest of
        those.
      gpu_memory_fraction: what the engine may take; it sizes itself by that, and is not asked.
      grammars: as of `Engine`.
      tokenizer: that of the checkpoint, if it was read already.

    Raises:
      MemoryError: it does not fit; the message says what would.
    """
    shared: dict[str, Any] = {
        "mesh": mesh,
        "max_requests": max_requests,
        "max_context_tokens": max_context_tokens,
        "cache_format": args.cache_format,
        "split_cache": args.split_cache,
        "draft_tokens": args.draft_tokens,
        "prefill_tokens": prefill_tokens,
        "grammars": grammars,
        "weights": args.weights,
        "follow_links": args.follow_links,
    }
    if gpu_memory_fraction is None:
        decoded = None if args.weights == "stored" else args.weights
        smaller = "" if prefill_tokens is None else "smaller steps (--prefill-tokens), "
        check_engine_memory(
            config,
            folder,
            dtype=jnp.dtype(args.dtype or decoded or jnp.bfloat16),
            way_out=f"fewer requests at once (--max-requests), {smaller}a shorter context, another "
            "--cache-format, or what `dsv4-jax plan` says would fit",
            **shared,
        )
    return Engine.from_checkpoint(
        folder,
        dtype=args.dtype,
        check_weights=args.check_weights,
        gpu_memory_fraction=gpu_memory_fraction,
        tokenizer=tokenizer,
        activations=args.activations,
        prefill_activations=args.prefill_activations,
        steps_per_call=args.steps_per_call,
        decode_tokens=None if decodes_alone or prefill_tokens is None else prefill_tokens[-1],
        **shared,
    )
