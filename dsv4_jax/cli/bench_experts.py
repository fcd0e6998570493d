"""`dsv4-jax bench experts`: how many different experts neighbouring rows pick."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from dsv4_jax.bench import routing
from dsv4_jax.bench.report import table_lines
from dsv4_jax.bench.results import Output
from dsv4_jax.bench.routing_laws import expected_experts
from dsv4_jax.checkpoint.find import find_checkpoint
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.cli.arguments import add_checkpoint, add_corpus, add_follow_links
from dsv4_jax.cli.memory import check_weights_memory
from dsv4_jax.cli.output_files import output_file
from dsv4_jax.cli.values import whole
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_types import RouterType
from dsv4_jax.training.corpus import held_out_rows, read_held_out

_EXPONENTS = (0.5, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_checkpoint(parser)
    add_corpus(parser)
    parser.add_argument("--length", type=whole(16, 2**16), default=512, help="tokens of a text")
    parser.add_argument("--texts", type=whole(1, 2**16), default=8, help="texts to run")
    parser.add_argument("--rows", type=whole(1, 16), default=6, help="the most neighbouring rows")
    parser.add_argument(
        "--experts", type=whole(), default=192, help="experts of the laws, of Flash's 6 a token"
    )
    parser.add_argument(
        "--json", type=output_file(), help="JSON file for the figures; if not given, none"
    )
    add_follow_links(parser)


def run(args: argparse.Namespace) -> int:
    """Prints what laws say of Flash, then what a checkpoint does on text that it never saw."""
    output = Output(args.json, command="bench experts")
    rows = range(1, args.rows + 1)
    flash = dataclasses.replace(DSV4Config.flash(), num_routed_experts=args.experts)
    laws = [
        {"rows": count, "independent": expected_experts(flash, rows=count)}
        | {
            f"zipf {exponent:g}": expected_experts(flash, rows=count, exponent=exponent)
            for exponent in _EXPONENTS
        }
        for count in rows
    ]
    output.set(experts=args.experts, laws=laws)
    print(f"{args.experts} experts, {flash.num_experts_per_token} for a token:")
    print(_table(laws), flush=True)
    checkpoint = find_checkpoint(args.checkpoint, revision=args.revision)
    check_weights_memory(checkpoint, jnp.float32, follow_links=args.follow_links)
    config, params = load_checkpoint(checkpoint, dtype=jnp.float32, follow_links=args.follow_links)
    texts = held_out_rows(read_held_out(args.corpus), args.length)[: args.texts, : args.length]
    picked = routing.picks_of_texts(config, params, texts)
    for router in RouterType:
        layers = [i for i, each in enumerate(config.router_types) if each == router]
        if not layers:
            continue
        found = routing.overlaps(config, picked[layers], rows)
        table = [dataclasses.asdict(one) | _new(one, config) for one in found]
        output.set(**{f"checkpoint_{router}": table})
        print(
            f"{len(layers)} {router} layers of the checkpoint, {config.num_routed_experts} "
            f"experts, {config.num_experts_per_token} for a token, {texts.size:,} tokens:"
        )
        print(_table(table), flush=True)
    return 0


def _new(one: routing.Overlap, config: DSV4Config) -> dict[str, float]:
    """Of the experts that independent rows read beside those of one, how many neighbours read."""
    own = config.num_experts_per_token
    if one.rows == 1:
        return {}
    return {"of new": (one.neighbours - own) / (one.independent - own)}


def _table(rows: Sequence[dict[str, float]]) -> str:
    """Rows as text, a column for each key of the last."""

    def column(key: str) -> Callable[[dict[str, float]], str]:
        return lambda row: f"{row[key]}" if key == "rows" else f"{row[key]:.2f}"

    return "\n".join(table_lines({key: column(key) for key in rows[-1]}, rows))
