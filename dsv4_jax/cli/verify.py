"""Checks a checkpoint, and a live cache that serves it: every row, owner and length, every step.

Prompts that share heads run through a small engine with drafts, forks, preemptions and prefix
hits, in the format that the model's cache has by default, or in each of several. The whole cache is
verified after every step, and every answer is compared with that of the same request alone, unless
quantised weights take other activations in steps that hold prompts: answers then depend on how
prompts are cut.
"""

from __future__ import annotations

import argparse
import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache.schema import choose_cache_format
from dsv4_jax.checkpoint.find import find_checkpoint
from dsv4_jax.checkpoint.finite import list_not_finite
from dsv4_jax.checkpoint.inventory import read_inventory
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.cli.arguments import (
    add_activations,
    add_checkpoint,
    add_drafts,
    add_hosts,
    add_loading,
    join_mesh,
)
from dsv4_jax.cli.memory import Loading, check_engine_memory
from dsv4_jax.cli.values import whole
from dsv4_jax.config import DSV4Config
from dsv4_jax.progress import Progress
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.requests.calls import CacheError
from dsv4_jax.serving.requests.request import Completion
from pallas_kernels.common.formats import CACHE_FORMATS, get_cache_format
from pallas_kernels.common.weights import is_quantized

_ALL = "all"
_REQUESTS, _BLOCKS = 3, 4
"""Slots of the engine, and blocks of a full context."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_checkpoint(parser)
    parser.add_argument(
        "--cache-format",
        choices=(*CACHE_FORMATS, _ALL),
        action="append",
        help="a format to check, repeatable, or all that the model may have; if not given, that in "
        "which the model was trained",
    )
    parser.add_argument(
        "--requests", type=whole(1, 10_000), default=6, help="prompts to serve in each format"
    )
    parser.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=0, help="seed of the prompts and of events"
    )
    add_activations(parser)
    add_hosts(parser)
    add_drafts(parser)
    add_loading(parser, check_weights=True)


def run(args: argparse.Namespace) -> int:
    """Prints one line per check; status 1 if one fails."""
    mesh, follows = join_mesh(args)
    drafts = args.drafts != "off"
    checkpoint = find_checkpoint(args.checkpoint, revision=args.revision, drafts=drafts)
    config = read_inventory(checkpoint, follow_links=args.follow_links, drafts=drafts).config
    formats = _formats(args.cache_format, config)
    options = EngineOptions(
        mesh=mesh,
        split_cache=args.split_cache,
        max_requests=_REQUESTS * (args.data or 1),
        max_context_tokens=_BLOCKS * config.block_tokens,
        activations=args.activations,
        prefill_activations=args.prefill_activations,
        debug=True,
    )
    check_engine_memory(
        config,
        # The largest of several.
        options.changed(cache_format=formats[0] if len(formats) == 1 else "f32", grammars=False),
        Loading(checkpoint, jnp.bfloat16, follow_links=args.follow_links, drafts=drafts),
        way_out="a smaller checkpoint or a larger device",
    )
    config, params = load_checkpoint(
        checkpoint,
        mesh=mesh,
        dtype=jnp.bfloat16,
        check_weights=False,
        follow_links=args.follow_links,
        drafts=drafts,
    )
    bad = list_not_finite(params) if args.check_weights else []
    if args.check_weights and not follows:
        print(f"{'parameters':<24}{'finite' if not bad else 'NOT FINITE: ' + ', '.join(bad)}")
    failed = bool(bad)
    compares = args.prefill_activations in (None, args.activations) or not any(
        map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))
    )
    with Progress(
        len(formats), unit="format", doing="verifying", shown=not follows, has_bar=False
    ) as bar:
        for cache_format in formats:
            chosen = options.changed(
                cache_format=cache_format,
                prefill_tokens=(48,),
                decode_tokens=48,
                draft_tokens=min(3, config.max_draft_tokens),
            )
            with contextlib.closing(Engine(config, params, chosen)) as engine:
                if follows:
                    engine.follow()
                    continue
                try:
                    steps, hits, problems = _serve(engine, args, compares)
                    summary = f"{steps} steps verified, {hits} tokens shared"
                    summary += ", answers not compared" * (not compares)
                except CacheError as error:
                    problems, summary = [str(error)], ""
            print(
                f"{cache_format:<24}{'; '.join(problems) or 'well'}{', ' * bool(summary)}{summary}"
            )
            failed |= bool(problems)
            bar.add()
    return int(failed)


def _formats(asked: list[str] | None, config: DSV4Config) -> list[str]:
    """Names of the formats to check.

    Raises:
      NotImplementedError: the model cannot have one that was asked for.
    """
    if asked is None:
        return [get_cache_format(choose_cache_format(config, None)).name]
    if _ALL not in asked:
        return [get_cache_format(choose_cache_format(config, name)).name for name in asked]
    formats = []
    for name in CACHE_FORMATS:
        with contextlib.suppress(NotImplementedError):  # of index keys that are rotated
            choose_cache_format(config, name)
            formats.append(name)
    return formats


def _serve(engine: Engine, args: argparse.Namespace, compares: bool) -> tuple[int, int, list[str]]:
    """Steps, tokens that hits spared, and what was wrong."""
    config, size = engine.config, engine.config.block_tokens
    rng = np.random.default_rng(args.seed)
    head = rng.integers(0, config.vocab_size, 2 * size)
    texts = [
        np.concatenate([head[: rng.integers(1, 2 * size)], rng.integers(0, config.vocab_size, 9)])
        for _ in range(args.requests)
    ]
    together = _complete(engine, texts, rng)
    problems = []
    for number, (text, done) in enumerate(zip(texts, together, strict=True) if compares else ()):
        request = engine.submit(
            text.tolist(), max_new_tokens=12, stop_token_ids=(), salt=f"alone {number}",
            speculate=False,
        )  # fmt: skip
        for _ in engine.stream(request):
            pass
        if engine.completion(request).token_ids != done.token_ids:
            problems.append(f"request {number} differs from itself alone")
    problems += [problem.message for problem in engine.verify().problems]
    return engine.metrics.steps, engine.metrics.hit_tokens, problems


def _complete(
    engine: Engine, texts: list[np.ndarray], rng: np.random.Generator
) -> list[Completion]:
    """All at once, with a preemption and a fork now and then."""
    ids = [engine.submit(t.tolist(), max_new_tokens=12, stop_token_ids=()) for t in texts]
    while engine.num_unfinished:
        engine.step()
        chosen = ids[rng.integers(0, len(ids))]
        event = rng.random()
        if event < 0.05:
            engine.preempt(chosen)
        elif event < 0.1:
            try:
                engine.cancel(engine.fork(chosen, seed=1))
            except ValueError:
                continue  # it has finished
    return [engine.completion(request) for request in ids]
