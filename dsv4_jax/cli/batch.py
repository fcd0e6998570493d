"""Answers a file of requests, with what the server answers them with."""

from __future__ import annotations

import argparse
import pathlib

from dsv4_jax.cli.arguments import add_checkpoint
from dsv4_jax.cli.output_files import output_file
from dsv4_jax.cli.serve import answer_settings, build, needs_serve_extra, note
from dsv4_jax.cli.serve_options import add_answers, add_engine, add_request_limits
from dsv4_jax.progress import Progress
from dsv4_jax.serving.options import NO_STEP_BOUND_MS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_checkpoint(parser)
    parser.add_argument(
        "requests",
        type=pathlib.Path,
        help="JSON-lines file in OpenAI's batch format: custom_id, method, url and body",
    )
    parser.add_argument(
        "answers",
        type=output_file(),
        help="JSON-lines file for the answers, in any order; requests that have one there are not "
        "done again",
    )
    parser.add_argument(
        "--repeatable",
        action="store_true",
        help="make the answers depend on requests and options alone, bit for bit, whatever runs "
        "beside a request and however often this was interrupted: steps of one shape, answers in "
        "the order of requests, seeds and ids by custom_id, and times of 0",
    )
    add_answers(parser)
    add_request_limits(parser)
    add_engine(parser)
    parser.set_defaults(max_requests=32)  # nobody waits for a single answer


def run(args: argparse.Namespace) -> int:
    """Answers what has no answer yet; 1 if a request was refused or failed."""
    with needs_serve_extra():
        from dsv4_jax.serve.batch import Batch
    if args.max_step_ms is None:
        args.max_step_ms = NO_STEP_BOUND_MS  # nobody waits for a single token
    served = {True: 0, False: 0}
    with Batch(
        args.requests, args.answers, settings=answer_settings(args), repeatable=args.repeatable
    ) as batch:
        if batch.num_left and not batch.has_names:
            raise ValueError(
                f"{args.requests} must have requests, one a line, such as "
                '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}; '
                f"none of its {batch.num_left:,} lines has a custom_id"
            )
        if batch.num_left:
            engine = build(args, one_shape=args.repeatable)
            with Progress(batch.num_left, unit="request", doing="answering") as bar:

                def count(is_good: bool) -> None:
                    served[is_good] += 1
                    bar.add()

                batch.run(engine, count)
            engine.close()  # known prefixes go to a disk
    note(
        f"{served[True]} answered, {served[False]} refused or failed, {batch.num_done} were there "
        f"already; {args.answers}"
    )
    return int(served[False] > 0)
