"""Measures ideas by contexts: loss with its interval, decode steps and memory.

What is measured is kept in a file at once, and steps of the ideas of a context are timed in turns.
The rows of a context are printed as soon
as its steps have been timed. Started again, the command measures what the file lacks, and prints
the table of all of it.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from dsv4_jax.checkpoint.find import find_checkpoint
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.cli.arguments import add_checkpoint, add_follow_links, find_named
from dsv4_jax.cli.memory import check_weights_memory
from dsv4_jax.cli.old_names import is_first_word
from dsv4_jax.cli.output_files import output_file
from dsv4_jax.cli.values import whole, wholes
from dsv4_jax.config import DSV4Config
from dsv4_jax.progress import Progress
from dsv4_jax.research.losses import trace_loss
from dsv4_jax.research.named import find_idea
from dsv4_jax.research.sweep import (
    HEADER,
    SweepFile,
    SweepPlan,
    count_measurements,
    measure_context,
)
from dsv4_jax.research.users_code import telling_users_frames
from dsv4_jax.standard_streams import say
from dsv4_jax.training.corpus import held_out_rows, read_held_out
from pallas_kernels.common.formats import CACHE_FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_checkpoint(parser, words_after="ideas")
    parser.add_argument(
        "ideas",
        nargs="*",
        metavar="IDEA",
        help="none, a cache format, or module:name of an Idea or a selector; differences are from "
        "the first",
    )
    parser.add_argument(
        "--contexts", type=wholes(2), default=[512, 1024], help="tokens, with commas between"
    )
    parser.add_argument(
        "--rows", type=whole(2, 2**20), default=16, help="rows of text for each loss"
    )
    parser.add_argument(
        "--requests", type=whole(1, 4096), default=1, help="requests that decode at once"
    )
    parser.add_argument(
        "--repeats", type=whole(1, 1000), default=7, help="measurements of a decode step"
    )
    parser.add_argument(
        "--out", type=output_file(".jsonl"), required=True, help="the file that keeps the cells"
    )
    parser.add_argument(
        "--corpus",
        type=pathlib.Path,
        help="a file of dsv4_jax.training.corpus; if not given, this Python's own documentation",
    )
    add_follow_links(parser)


def _settle_ideas(args: argparse.Namespace) -> None:
    """Takes a first argument that is an idea's name for one: the checkpoint was left out.

    Raises:
      ValueError: there is no idea.
    """
    first = args.checkpoint
    if is_first_word(args) and (first in ("none", *CACHE_FORMATS) or ":" in first):
        args.ideas, args.checkpoint = [first, *args.ideas], None
    if not args.ideas:
        raise ValueError("there must be an IDEA: none, a cache format, or module:name; add one")


def run(args: argparse.Namespace) -> int:
    """Measures what is missing, and prints the table."""
    _settle_ideas(args)
    checkpoint = find_checkpoint(args.checkpoint, revision=args.revision, drafts=False)
    config = DSV4Config.from_hf(
        checkpoint, follow_links=args.follow_links, text_only=True, drafts=False
    )
    ideas = [find_named("IDEA", find_idea, name) for name in args.ideas]
    carried = [idea.applied_to(config) for idea in ideas]
    if max(args.contexts) > config.max_position_embeddings:
        raise ValueError(
            f"--contexts must be at most {config.max_position_embeddings}, the model's longest, "
            f"got {max(args.contexts)}"
        )
    tokens = read_held_out(args.corpus)
    for context in args.contexts:
        held_out_rows(tokens, context)
    with telling_users_frames():
        for one in carried:
            trace_loss(one, min(args.contexts))
    plan = SweepPlan(
        checkpoint=str(checkpoint),
        num_rows=args.rows,
        num_requests=args.requests,
        repeats=args.repeats,
    )
    kept = SweepFile(args.out, plan)
    missing = kept.missing(args.ideas, args.contexts)
    if missing:
        check_weights_memory(checkpoint, jnp.float32, follow_links=args.follow_links)
        config, params = load_checkpoint(
            checkpoint, dtype=jnp.float32, follow_links=args.follow_links, drafts=False
        )
        wanted = {
            context: [idea for idea in args.ideas if (idea, context) in missing]
            for context in args.contexts
        }
        total = sum(count_measurements(len(ideas)) for ideas in wanted.values())
        with (
            Progress(
                total, unit="measurement", doing="sweep", has_bar=False, tells_left=False
            ) as bar,
            telling_users_frames(),
        ):

            def begin(name: str) -> Callable[[], object]:
                bar.begin(name)
                return functools.partial(bar.add, name=name)

            print(HEADER, flush=True)
            for context, ideas in wanted.items():
                told: dict[str, Any] = {"begin": begin, "tell": lambda text: say(f"[{text}]")}
                if ideas:
                    sizes: dict[str, Any] = {"ideas": ideas, "context": context}
                    measure_context(config, params, tokens, kept, **sizes, **told)
                _print_rows(kept, args.ideas, context)
                bar.tells_left = bool(ideas) or bar.tells_left  # one of each kind has been made
    else:
        print(HEADER)
        for context in args.contexts:
            _print_rows(kept, args.ideas, context)
    return 0


def _print_rows(kept: SweepFile, ideas: list[str], context: int) -> None:
    """Prints a context's lines of the table, at once."""
    for line in kept.rows(ideas, context):
        print(line, flush=True)
