"""The options of `dsv4-jax serve`."""

from __future__ import annotations

import argparse

from dsv4_jax.cli.arguments import add_fields, add_loading, add_mesh, add_seconds
from dsv4_jax.cli.engine_options import add_engine_options
from dsv4_jax.cli.values import utf8_text, whole
from dsv4_jax.rules import UNITS
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serving.asynchronous.async_engine import DEFAULT_MAX_WAITING, MAX_COUNT
from dsv4_jax.serving.requests.grammar_trials import GrammarBounds

API_KEY = "DSV4_JAX_API_KEY"
"""Where the key is looked for if no option gives one."""


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """Adds where the server answers, to whom, and in which words."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is every interface"
    )
    parser.add_argument(
        "--port", type=whole(0, 2**16 - 1), default=8000, help="0 is one that is free"
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        help="name or address by which clients may call the server, repeatable; *.example.com and "
        "* stand for many; if not given, those of loopback, what --host says, and the address that "
        "they connect to; pages of the hosts that are given may use the server",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help="key that clients need, repeatable; prefixes of different keys are kept apart; if "
        f"not given, {API_KEY}, which other users of the machine do not see; else none",
    )
    add_answers(parser)
    parser.add_argument(
        "--page",
        action=argparse.BooleanOptionalAction,
        default=ServeSettings.has_page,
        help="show the engine at work at /, with counts and block ids of all requests",
    )
    add_fields(parser, ServeSettings, ["log_prompts"])


def add_answers(parser: argparse.ArgumentParser) -> None:
    """Adds what the model is called, and how conversations are rendered."""
    parser.add_argument(
        "--model-name",
        type=utf8_text,
        help="what clients call the model; if not given, the checkpoint's last name",
    )
    add_fields(parser, ServeSettings, ["release"])
    parser.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        default=ServeSettings.thinks,
        help="let conversations think unless a request says otherwise",
    )


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds what one client can take from the others."""
    parser.add_argument(
        "--max-waiting",
        type=whole(1, MAX_COUNT),
        default=DEFAULT_MAX_WAITING,
        help="most requests without a slot",
    )
    add_seconds(parser, "--queue-timeout", 60.0, "without a slot after which a request is refused")
    add_request_limits(parser)
    add_fields(parser, ServeSettings, ["max_held_bytes", "max_connections"])
    add_seconds(
        parser,
        "--stall-timeout",
        ServeSettings.stall_timeout_s,
        "without reading after which a client is cut off",
        least=0.1,
    )
    add_seconds(
        parser,
        "--drain-timeout",
        ServeSettings.drain_timeout_s,
        "that answers have to end after SIGTERM",
    )


def add_request_limits(parser: argparse.ArgumentParser) -> None:
    """Adds how large one request may be."""
    add_fields(parser, ServeSettings, ["max_body_bytes", "max_choices", "max_tools"])
    bounds = GrammarBounds()
    add_seconds(
        parser,
        "--grammar-seconds",
        bounds.seconds,
        "of a processor for reading the form of an answer, and as many for compiling it",
        least=0.01,
    )
    parser.add_argument(
        "--grammar-memory-bytes",
        type=whole(2**20, 2**40, units=UNITS),
        metavar="BYTES",
        default=bounds.memory_bytes,
        help="most memory for compiling the form of an answer",
    )
    parser.add_argument(
        "--grammars-held-bytes",
        type=whole(2**20, 2**44, units=UNITS),
        metavar="BYTES",
        default=bounds.held_bytes,
        help="most memory that the compiled forms of the answers of all requests hold together",
    )
    parser.add_argument(
        "--grammars-at-once",
        type=whole(1, 64),
        default=bounds.at_once,
        help="forms of answers that are compiled at the same time, by a process each",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes of the engine."""
    add_engine_options(parser, serves=True)
    add_mesh(parser, split_cache=True)
    add_loading(parser)
