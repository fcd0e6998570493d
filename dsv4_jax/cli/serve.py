"""Answers HTTP clients; the room `serve` comes with an extra, and is imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from dsv4_jax.checkpoint.find import SHIPPED
from dsv4_jax.cli import quick_start
from dsv4_jax.cli.arguments import add_checkpoint, chosen_fields, chosen_mesh
from dsv4_jax.cli.engine_options import build_engine, find_model
from dsv4_jax.cli.serve_options import API_KEY, add_engine, add_limits, add_protocol
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serving.asynchronous.async_engine import AsyncEngine
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.requests.grammar_trials import GrammarBounds
from dsv4_jax.signals import end_at_once
from dsv4_jax.standard_streams import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_checkpoint(parser)
    add_protocol(parser)
    add_limits(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Loads, compiles, and serves until a signal says otherwise."""
    with end_at_once("dsv4-jax serve"):  # up to where the server sets handlers of its own
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    with needs_serve_extra():
        from dsv4_jax.serve import Server
        from dsv4_jax.serve.host_names import read_pattern
        from dsv4_jax.serve.server import bind
    settings = dataclasses.replace(
        answer_settings(args),
        api_keys=_find_keys(args.api_key),
        listens_at=args.host,
        allowed_hosts=tuple(read_pattern("--allowed-host", name) for name in args.allowed_host),
        stall_timeout_s=args.stall_timeout,
        drain_timeout_s=args.drain_timeout,
        has_page=args.page,
    )
    if args.max_held_bytes < args.max_body_bytes:
        raise ValueError(
            f"--max-held-bytes must be at least --max-body-bytes, got {args.max_held_bytes} and "
            f"{args.max_body_bytes}; let more be held, or make the largest body smaller"
        )
    bound = bind(args.host, args.port)  # before minutes of loading
    try:
        engine = build(args)
        _log_to_stderr()
        shared = AsyncEngine(
            engine, max_waiting=args.max_waiting, queue_timeout_s=args.queue_timeout
        )
        server = Server(shared, settings, bound)
    except BaseException:
        bound.close()
        raise
    obstacle = server.endpoints.conversations.obstacle
    if obstacle is not None:
        is_shipped = args.checkpoint in (None, SHIPPED)
        note(tell_of_completions(settings.model_name, obstacle, is_shipped=is_shipped))
    to_whom = "" if settings.api_keys else ", for everybody who reaches it: there is no --api-key"
    note(f"{settings.model_name} answers at {server.url}{to_whom}")
    server.run()
    engine.close()  # known prefixes go to a disk
    return 0


def tell_of_completions(name: str, obstacle: str, *, is_shipped: bool) -> str:
    """What a server says of a model that takes part in no conversations, which is no fault."""
    chats = "/v1/chat/completions, /v1/responses and /v1/messages"
    told = f"{name} completes text, at /v1/completions; requests for a chat are refused"
    if is_shipped:
        return (
            f"{told} ({chats}). Nothing is wrong: it has no words for chats, and "
            "examples/chat_checkpoint.py writes a small model that has them"
        )
    return f"{told} ({chats}), since {obstacle}"


@contextlib.contextmanager
def needs_serve_extra() -> Iterator[None]:
    """Says what to install where an import fails, in a `ValueError`."""
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed; the server's libraries come with the extra serve: "
            "pip install 'dsv4-jax[serve]'"
        ) from None


def answer_settings(args: argparse.Namespace) -> ServeSettings:
    """The settings that have options in a command, the others as they are by default."""
    return ServeSettings(
        **chosen_fields(args, ServeSettings),
        model_name=args.model_name or _name_of(args.checkpoint),
        thinks=args.think,
        grammar_bounds=GrammarBounds(
            seconds=args.grammar_seconds,
            memory_bytes=args.grammar_memory_bytes,
            at_once=args.grammars_at_once,
            held_bytes=args.grammars_held_bytes,
        ),
    )


def _name_of(checkpoint: str | None) -> str:
    """What a checkpoint's model is called if nobody says otherwise."""
    return SHIPPED if checkpoint is None else pathlib.Path(checkpoint).resolve().name


def build(args: argparse.Namespace, *, one_shape: bool = False) -> Engine:
    """The engine of the options of `add_engine`, which has compiled all that it can need.

    Args:
      args: with those options.
      one_shape: all its steps have one shape, so that what runs beside a request changes nothing.

    Raises:
      ValueError: as of `build_engine`; the context is longer than the model's; or other options
        ask for steps of several shapes.
    """
    folder, config = find_model(args)
    longest = config.max_position_embeddings
    if args.max_context_tokens > max(longest, EngineOptions.max_context_tokens):
        raise ValueError(
            f"--max-context-tokens must be at most {longest:,}, the longest that "
            f"{_name_of(args.checkpoint)} is meant for, got {args.max_context_tokens:,}"
        )
    fields: dict[str, Any] = {
        "mesh": chosen_mesh(args),
        "max_context_tokens": min(args.max_context_tokens, longest),
    }
    if one_shape:
        size = _one_size(args)
        fields |= {"prefill_tokens": (size,), "decode_tokens": size}
    else:
        fields |= quick_start.one_shape(args, -(-args.max_requests // (args.data or 1)))
    engine = build_engine(args, folder, config, **fields)
    note("compiling")
    start = time.perf_counter()
    engine.warmup()
    note(f"compiled in {time.perf_counter() - start:.0f} s")
    return engine


def _one_size(args: argparse.Namespace) -> int:
    """The size of all steps."""
    several = {
        "--steps-per-call": args.steps_per_call > 1,
        "--draft-tokens": args.draft_tokens > 0,
        "--prefill-activations": args.prefill_activations not in (None, args.activations),
        "--prefill-tokens of several sizes": len(args.prefill_tokens or ()) > 1,
        "--decode-batch-sizes": args.decode_batch_sizes is not None,
    }
    if given := [name for name, is_given in several.items() if is_given]:
        raise ValueError(
            f"steps must have one shape, and {given[0]} makes steps of another; leave it out"
        )
    if args.prefill_tokens:
        return args.prefill_tokens[0]
    return max(64, -(-args.max_requests // (args.data or 1)))


def _find_keys(given: list[str]) -> tuple[str, ...]:
    keys = given or [key for key in [os.environ.get(API_KEY, "")] if key]
    for key in keys:
        if not (key.isascii() and key.isprintable()) or " " in key or not key:
            raise ValueError("--api-key must be of printable ASCII characters without spaces")
    return tuple(keys)


def _log_to_stderr() -> None:
    """Lines of requests are JSON; those of the server's own troubles are text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name, level in (("dsv4_jax", logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
        logger.propagate = False


def note(text: str) -> None:
    """Says something on stderr."""
    say(f"[{text}]")
