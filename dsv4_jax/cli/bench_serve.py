"""Times a server under load: this project's, or any other with OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from urllib.parse import urlsplit

from dsv4_jax.bench import load
from dsv4_jax.bench.load_figures import report_lines, summarise
from dsv4_jax.bench.results import write_json
from dsv4_jax.cli.arguments import add_seconds
from dsv4_jax.cli.output_files import output_file
from dsv4_jax.cli.serve_options import API_KEY
from dsv4_jax.cli.values import real, utf8_text, whole, wholes
from dsv4_jax.config.kinds import show
from dsv4_jax.progress import Progress
from dsv4_jax.step.sampling import MAX_TOKENS

_MAX_REQUESTS = 10**6
_DEFAULT_REQUESTS = 100
_MAX_DRAWN_TOKENS = 2**28
"""Of random prompts together, which take 36 bytes each."""

_TOLD = ("concurrency", "seed", "prompts", "shared", "max_tokens", "temperature")
"""Arguments that the file of figures repeats."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "url",
        type=server_url,
        help="where the server answers, such as http://127.0.0.1:8000; any server that streams "
        "OpenAI's completions will do, such as dsv4-jax serve, vLLM or SGLang",
    )
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--rate",
        type=real(1e-3, 1e5),
        default=4.0,
        help="requests a second on average; they come whether or not the server keeps up",
    )
    loop.add_argument(
        "--concurrency",
        type=whole(1, _MAX_REQUESTS),
        help="requests at a time; each next one is sent when an answer has ended, and its times "
        "count from then; if not given, --rate decides",
    )
    parser.add_argument(
        "--requests",
        type=whole(1, _MAX_REQUESTS),
        help=f"how many; if not given, those of --prompts, or else {_DEFAULT_REQUESTS}",
    )
    parser.add_argument(
        "--prompts",
        help="JSON-lines file; a line is a text, or an object with prompt or messages and further "
        "fields of the request; if not given, prompts are random tokens",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=wholes(1, MAX_TOKENS),
        default=[64, 768],
        help="shortest and longest random prompt; lengths between them are log-uniform",
    )
    parser.add_argument(
        "--shared",
        type=real(0, 1),
        default=0.5,
        help="share of random prompts whose first half is that of one document; a server that "
        "keeps prefixes in blocks hits whole ones alone, which here have 128 tokens",
    )
    parser.add_argument(
        "--vocab-size", type=whole(1), default=256, help="random token ids are below it"
    )
    parser.add_argument(
        "--max-tokens", type=whole(), default=64, help="most tokens of an answer; one "
        "to a random prompt has exactly so many"
    )  # fmt: skip
    parser.add_argument(
        "--temperature",
        type=real(0, 2),
        help="of random prompts' requests; if not given, the server's own",
    )
    parser.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        help="seed of arrivals and prompts; a server that keeps prefixes knows the prompts of an "
        "earlier run with the same seed",
    )
    parser.add_argument(
        "--api-key",
        help=f"key of the server; if not given, {API_KEY}, which other users of the machine do "
        "not see; else none",
    )
    parser.add_argument(
        "--model",
        type=utf8_text,
        help="name of the model; if not given, the server's first",
    )
    add_seconds(parser, "--timeout-s", 600.0, "after which a request is given up", least=0.1)
    parser.add_argument(
        "--json", type=output_file(), help="JSON file for the figures; if not given, none"
    )


def run(args: argparse.Namespace) -> int:
    """Sends the load, and prints figures; 1 if no request was served, 0 if any was."""
    if len(args.prompt_tokens) != 2 or args.prompt_tokens[0] > args.prompt_tokens[1]:
        given = ",".join(map(str, args.prompt_tokens))
        raise ValueError(f"--prompt-tokens must be LEAST,MOST, two ascending numbers, got {given}")
    bodies = _choose_bodies(args)
    key = args.api_key or os.environ.get(API_KEY, "")
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError("--api-key must be of printable ASCII characters")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    model = args.model or load.find_model(args.url, headers, min(args.timeout_s, 30.0))
    bodies = [{"model": model} | body for body in bodies]
    is_closed = args.concurrency is not None
    arrivals = None if is_closed else load.draw_arrivals(len(bodies), args.rate, seed=args.seed)
    with Progress(  # requests run beside each other, so ends say little of the time that is left
        len(bodies), unit="request", doing="asking", tells_left=False
    ) as bar:
        outcomes, seconds = asyncio.run(
            load.run_load(
                args.url,
                bodies,
                arrivals,
                headers=headers,
                timeout_s=args.timeout_s,
                concurrency=args.concurrency,
                on_end=lambda outcome: bar.add(),
            )
        )
    figures = summarise(outcomes, seconds)
    loop = f"{args.concurrency} at a time" if is_closed else f"{args.rate:g} per s came"
    print("\n".join(report_lines(figures, loop)))
    if args.json:
        told = {"command": "bench serve", "date": time.strftime("%Y-%m-%d"), "url": args.url}
        told |= {"model": model, "rate": None if is_closed else args.rate}
        told |= {name: getattr(args, name) for name in _TOLD}
        told["prompt_token_bounds"] = args.prompt_tokens  # prompt_tokens are those of all prompts
        write_json(args.json, told | figures)
    return int(not figures["served"])


def server_url(text: str) -> str:
    """Takes the address of a server, without what comes after its port."""
    try:
        parts = urlsplit(text)
        _ = parts.port  # which raises where it is no number
    except ValueError:
        parts = urlsplit("")
    is_plain = not (parts.username or parts.query or parts.path.rstrip("/") not in ("", "/v1"))
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise argparse.ArgumentTypeError(
            f"must be the address of a server, such as http://127.0.0.1:8000, got {show(text)}"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _choose_bodies(args: argparse.Namespace) -> list[dict]:
    """Requests of a file, again and again if more are wanted; or random ones."""
    if args.prompts:
        found = load.read_bodies(args.prompts, max_tokens=args.max_tokens)
        return [found[number % len(found)] for number in range(args.requests or len(found))]
    least, most = args.prompt_tokens
    requests = args.requests or _DEFAULT_REQUESTS
    if requests * most > _MAX_DRAWN_TOKENS:
        raise ValueError(
            f"--requests {requests} times the longest of --prompt-tokens {least},{most} must be at "
            f"most {_MAX_DRAWN_TOKENS:,}, since all prompts are drawn beforehand, "
            f"got {requests * most:,}"
        )
    return load.draw_bodies(
        requests,
        seed=args.seed,
        prompt_tokens=(least, most),
        shared=args.shared,
        vocab_size=args.vocab_size,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
    )
