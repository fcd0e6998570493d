"""Options of the commands that load a checkpoint into an engine, and the engine that they name."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from tokenizers import Tokenizer

from dsv4_jax.checkpoint.find import find_checkpoint
from dsv4_jax.checkpoint.inventory import read_inventory
from dsv4_jax.cli.arguments import add_fields, add_weights, chosen_fields
from dsv4_jax.cli.memory import Loading, check_engine_memory
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.weight_forms import STORED, WEIGHT_FORMS, dtype_beside
from dsv4_jax.rules import rules_of
from dsv4_jax.runtime import shown_bytes
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.sizing import find_host_cache_bytes
from dsv4_jax.standard_streams import say

_OF_SERVERS = (
    "max_requests",
    "max_context_tokens",
    "prefill_tokens",
    "decode_batch_sizes",
    "max_step_ms",
    "gpu_memory_fraction",
    "host_cache_bytes",
    "disk_cache_dir",
    "disk_cache_bytes",
    "grammars",
)
"""Fields whose options are a server's: `generate` sizes its engine by its prompts."""


def add_engine_options(parser: argparse.ArgumentParser, *, serves: bool = False) -> None:
    """Adds every field of `EngineOptions` that has a help, and the form of weights.

    Args:
      parser: what is added to.
      serves: with those of `_OF_SERVERS`.
    """
    names = [name for name, ruled in rules_of(EngineOptions).items() if ruled.help]
    names.remove("split_cache")  # `add_mesh` adds it
    if not serves:
        names = [name for name in names if name not in _OF_SERVERS]
    add_fields(parser, EngineOptions, names)
    add_weights(parser, WEIGHT_FORMS, STORED, "FP8 and FP4 weights as they are stored, or decoded")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of activations; if not given, that of decoded weights, or else bfloat16",
    )
    parser.add_argument(
        "--drafts",
        choices=("auto", "off"),
        help="auto: as many as the draft of the checkpoint guesses at once, of DSpark stages those "
        "that are likely enough to be kept, and none of a checkpoint without a draft; off: none, "
        "whatever config and files say; if not given, as many as --draft-tokens says",
    )


def find_model(
    args: argparse.Namespace, *, needs_tokenizer: bool = False
) -> tuple[pathlib.Path, DSV4Config]:
    """The checkpoint's directory, and the config of what is loaded of it.

    A draft is loaded if --draft-tokens or --drafts auto asks for it. One that does not agree with
    the config is refused in any case, unless there is --drafts off.

    Args:
      args: with the options of `add_checkpoint` and `add_engine_options`; --drafts auto sets
        `draft_tokens` and `draft_cut`.
      needs_tokenizer: as of `find_checkpoint`.

    Raises:
      FileNotFoundError: there is no such directory, or it lacks a config.
      ValueError: it cannot be read, it has no draft for --draft-tokens or none of so many, or this
        is given together with --drafts.
    """
    drafts = args.drafts != "off"
    if args.draft_tokens and args.drafts is not None:
        does = "chooses how many" if drafts else "loads no draft"
        raise ValueError(
            f"--drafts {args.drafts} {does}, got --draft-tokens {args.draft_tokens} too; leave one "
            "of them out"
        )
    folder = find_checkpoint(
        args.checkpoint, revision=args.revision, needs_tokenizer=needs_tokenizer, drafts=drafts
    )
    config = _find_config(args, folder, drafts)
    if args.drafts == "auto":
        args.draft_tokens, args.draft_cut = auto_drafts(config)
    if args.draft_tokens and not config.has_draft:
        raise ValueError(
            f"--draft-tokens {args.draft_tokens} needs a draft, and {folder} has none; leave it out"
        )
    if args.draft_tokens > (most := config.max_draft_tokens):
        raise ValueError(
            f"--draft-tokens must be at most {most}, which the draft of {folder} guesses at once, "
            f"got {args.draft_tokens}"
        )
    return folder, config if args.draft_tokens else config.without_draft()


def _find_config(args: argparse.Namespace, folder: pathlib.Path, drafts: bool) -> DSV4Config:
    """The config by the files; where these are missing by itself, since loading will say so."""
    try:
        return read_inventory(folder, follow_links=args.follow_links, drafts=drafts).config
    except FileNotFoundError:
        return DSV4Config.from_hf(
            folder,
            follow_links=args.follow_links,
            text_only=True,
            drafts=args.draft_tokens > 0 or args.drafts == "auto",
        )


def auto_drafts(config: DSV4Config) -> tuple[int, bool]:
    """How many drafts --drafts auto takes, and whether they are cut.

    A block of DSpark stages, cut by their confidences. One of an MTP block, which was trained to
    guess one token and does not say how sure it is.
    """
    if config.dspark is not None:
        return config.dspark.block_size, True
    return config.num_mtp_layers, False


def build_engine(
    args: argparse.Namespace,
    folder: pathlib.Path,
    config: DSV4Config,
    *,
    tokenizer: Tokenizer | None = None,
    **fields: Any,
) -> Engine:
    """Loads the checkpoint, after asking whether it fits.

    With `gpu_memory_fraction` the engine sizes itself by that, and nothing is asked.

    Args:
      args: with the options of `add_engine_options`, `add_loading` and `add_mesh`.
      folder: the checkpoint.
      config: of what is loaded of it.
      tokenizer: that of the checkpoint, if it was read already.
      **fields: of `EngineOptions`, in the place of what `args` has, or beside it.

    Raises:
      MemoryError: it does not fit; the message says what would.
    """
    options = EngineOptions(**chosen_fields(args, EngineOptions) | fields)
    find_host_cache_bytes(options)  # before minutes of loading
    if options.gpu_memory_fraction is None:
        smaller = "" if options.prefill_tokens is None else "smaller steps (--prefill-tokens), "
        check_engine_memory(
            config,
            options,
            Loading(
                folder,
                dtype=dtype_beside(args.weights, args.dtype),
                weights=args.weights,
                follow_links=args.follow_links,
                drafts=config.has_draft,
            ),
            way_out=f"fewer requests at once (--max-requests), {smaller}a shorter context, another "
            "--cache-format, or what `dsv4-jax plan` says would fit",
        )
    engine = Engine.from_checkpoint(
        folder,
        options,
        tokenizer=tokenizer,
        weights=args.weights,
        dtype=args.dtype,
        check_weights=args.check_weights,
        follow_links=args.follow_links,
    )
    if options.host_cache_bytes == "auto":
        found = engine.plan.host_cache_bytes
        say(f"[--host-cache auto: {shown_bytes(found)}, half of what is free]")
    return engine
