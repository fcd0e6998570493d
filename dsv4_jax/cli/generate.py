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
from dsv4_jax.cli.arguments import (
    add_activations,
    add_loading,
    add_mesh,
    prompt_text,
    real,
    refuse_mesh,
    whole,
)
from dsv4_jax.config import DSV4Config
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.text import TextStream, load_tokenizer
from dsv4_jax.step.sampling import SamplingParams
from pallas_kernels.common.formats import CACHE_FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "prompt", nargs="+", type=prompt_text, help="text to complete; several run in one batch"
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, default=SHIPPED_CHECKPOINT)
    parser.add_argument("--max-new-tokens", type=whole(), default=256)
    parser.add_argument("--temperature", type=real(0, 1e30), default=0.6, help="0 is greedy")
    parser.add_argument(
        "--top-k", type=whole(0), default=SamplingParams.top_k, help="0 is no limit"
    )
    parser.add_argument("--top-p", type=real(0, 1), default=SamplingParams.top_p)
    parser.add_argument("--seed", type=whole(-(2**63), 2**63 - 1), default=SamplingParams.seed)
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
    add_mesh(parser)
    add_loading(parser)


def run(args: argparse.Namespace) -> int:
    """Streams one prompt's text to stdout; several are printed one after another when done."""
    refuse_mesh(args)
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
    context, tokenizer = _check_prompts(args)
    config, params = load_checkpoint(
        args.checkpoint,
        weights=args.weights,
        dtype=args.dtype,
        progress=True,
        check_weights=args.check_weights,
        follow_links=args.follow_links,
    )
    engine = Engine(
        config,
        params,
        max_requests=len(args.prompt),
        max_context_tokens=context,
        cache_format=args.cache_format,
        activations=args.activations,
        prefill_activations=args.prefill_activations,
        tokenizer=tokenizer,
    )
    return engine, tokenizer


def _check_prompts(args: argparse.Namespace) -> tuple[int, Tokenizer]:
    """The context that is needed, by config and tokenizer alone, which are read at once."""
    config = DSV4Config.from_hf(args.checkpoint, follow_links=args.follow_links)
    tokenizer = load_tokenizer(args.checkpoint, follow_links=args.follow_links)
    if tokenizer is None:
        raise ValueError(f"{args.checkpoint} has no tokenizer.json, so text cannot be encoded")
    limit, longest = config.max_position_embeddings, 0
    for number, prompt in enumerate(args.prompt, 1):
        token_ids = tokenizer.encode(prompt).ids
        if not token_ids:
            raise ValueError(f"prompt {number} must have at least one token, got {prompt!r}")
        if max(token_ids) >= config.vocab_size:
            raise ValueError(
                f"{args.checkpoint}/tokenizer.json gives prompt {number} the token "
                f"{max(token_ids)}, and config.json has vocab_size={config.vocab_size}"
            )
        length = len(token_ids) + args.max_new_tokens
        if length > limit:
            raise ValueError(
                f"prompt {number} of {len(token_ids)} tokens and --max-new-tokens "
                f"{args.max_new_tokens} must be at most max_position_embeddings={limit} together, "
                f"got {length}"
            )
        longest = max(longest, length)
    return min(2 ** math.ceil(math.log2(longest)), limit), tokenizer


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
