"""Completes prompts, from the checkpoint that ships in the package or from a directory."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
import time

from tokenizers import Tokenizer
from tqdm import tqdm

from dsv4_jax.cache.schema import DEFAULT_CACHE_FORMAT
from dsv4_jax.checkpoint.load import SHIPPED_CHECKPOINT, load_checkpoint
from dsv4_jax.cli.arguments import add_activations
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.text import TextStream, load_tokenizer
from dsv4_jax.step.sampling import SamplingParams
from pallas_kernels.common.formats import CACHE_FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument("prompt", nargs="+", help="text to complete; several run in one batch")
    parser.add_argument("--checkpoint", type=pathlib.Path, default=SHIPPED_CHECKPOINT)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=SamplingParams.top_k, help="0 is no limit")
    parser.add_argument("--top-p", type=float, default=SamplingParams.top_p)
    parser.add_argument("--seed", type=int, default=SamplingParams.seed)
    parser.add_argument("--cache-format", choices=CACHE_FORMATS, default=DEFAULT_CACHE_FORMAT)
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


def run(args: argparse.Namespace) -> int:
    """Streams one prompt's text to stdout; several are printed one after another when done."""
    started = time.perf_counter()
    sampling = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    engine, tokenizer = _build(args)
    _note(f"compiling for the first tokens ({time.perf_counter() - started:.1f} s to load)")
    ids = [engine.submit(prompt, sampling=sampling) for prompt in args.prompt]
    stream = engine.stream(*ids)
    texts = [TextStream(tokenizer) for _ in args.prompt]
    pieces: list[list[str]] = [[prompt] for prompt in args.prompt]
    single = len(args.prompt) == 1
    bar = tqdm(total=args.max_new_tokens * len(args.prompt), unit="token", disable=single)
    count, first, second = 0, 0.0, 0.0
    for token in stream:
        if not count:
            first = time.perf_counter()
            if single:
                print(args.prompt[0], end="", flush=True)
        count += 1
        if count == 2 * len(args.prompt):
            second = time.perf_counter()  # both programs are compiled by now
        idx = ids.index(token.request_id)
        piece = texts[idx].add(token.token_id)
        pieces[idx].append(piece)
        bar.update()
        if single:
            print(piece, end="", flush=True)
    bar.close()
    if single:
        print()
    else:
        for idx, parts in enumerate(pieces):
            print(f"--- {idx}\n{''.join(parts)}")
    _note(f"{count} tokens, the first after {first - started:.1f} s")
    if second and count > 2 * len(args.prompt):
        rate = (count - 2 * len(args.prompt)) / (time.perf_counter() - second)
        _note(f"{rate:.0f} tokens/s once compiled, at {second - started:.1f} s")
    return 0


def _build(args: argparse.Namespace) -> tuple[Engine, Tokenizer]:
    """An engine with a context for the longest prompt and its answer, in powers of two."""
    config, params = load_checkpoint(
        args.checkpoint, weights=args.weights, dtype=args.dtype, progress=True
    )
    tokenizer = load_tokenizer(args.checkpoint)
    if tokenizer is None:
        raise ValueError(f"{args.checkpoint} has no tokenizer.json, so text cannot be encoded")
    longest = max(len(tokenizer.encode(prompt).ids) for prompt in args.prompt)
    context = 2 ** math.ceil(math.log2(longest + args.max_new_tokens))
    engine = Engine(
        config,
        params,
        max_requests=len(args.prompt),
        max_context_tokens=min(context, config.max_position_embeddings),
        cache_format=args.cache_format,
        activations=args.activations,
        prefill_activations=args.prefill_activations,
        tokenizer=tokenizer,
    )
    return engine, tokenizer


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
