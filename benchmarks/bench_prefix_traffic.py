"""Running requests while prefixes move: `python -m benchmarks.bench_prefix_traffic CONFIG`.

Requests decode, and beside them prefixes come back from the host's memory, so many GB/s at most.
They come in turns, and push out of the device what came some prefixes earlier. Windows of some
seconds take turns: nothing moves; prefixes come back, and what leaves is on the host already;
prefixes come back, and all that leaves is copied, after which the rest is, untimed. Each row of a
kind has tokens/s of the running requests beside those of windows in which nothing moves, ms of
their steps, and GB/s both ways. Who asks for a prefix is not admitted, and its prompt is hashed
before: what a prompt adds is no cost of moving its prefix. CONFIG is as for `bench_engine`.
"""

import argparse
import dataclasses
import itertools
import json
import time

import numpy as np

import dsv4_jax as ds
from benchmarks.bench_engine import start
from benchmarks.bench_far_prefix import BLOCK, evict, make_prefix
from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.cache.packed_rows import row_bytes
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS

KINDS = ("nothing moves", "back", "back and there")
HELD = 1
"""Prefixes that the device holds beside the running requests and those on their way."""


@dataclasses.dataclass(eq=False)
class Asker:
    """In the place of a request that waits for its prefix."""

    request_id: int


class Mover:
    """Asks for prefixes in turn, of which so many at most are on their way back."""

    def __init__(self, engine, prompts, asked):
        """Of prompts whose prefixes are on the host, more than the device has room for."""
        self._asked = asked
        self._host, self._ids = engine.loop.host, itertools.count(10**9)
        hashed = [HashedTokens(np.array(prompt, np.int32), b"", BLOCK) for prompt in prompts]
        for tokens in hashed:
            tokens.upto(len(tokens) // BLOCK)
        self._prompts = itertools.cycle(hashed)
        self._askers = {}
        self.brought = 0  # prefixes

    def move(self, *, begins, copies):
        """What happens between two steps; with `begins` the next prefix may be asked for.

        With `copies` the host forgets what has come, so that it is copied when it leaves.
        """
        for asker in [one for one in self._askers if not self._host.is_fetching(one)]:
            tokens = self._askers.pop(asker)
            self._host.forget(asker)
            self.brought += 1
            if copies:
                forget(self._host.tier, tokens)
        if begins and len(self._askers) < self._asked:
            tokens, asker = next(self._prompts), Asker(next(self._ids))
            if self._host.begin(asker, 0, tokens, len(tokens)):
                self._askers[asker] = tokens
            else:  # its copies have not all come to the host
                self._host.forget(asker)

    def rests(self):
        """Whether nothing is on its way."""
        return not (self._askers or self._host.stores.begun_bytes)


def forget(tier, tokens):
    """What lies on the host of a prefix is not there."""
    slabs = {}
    for content in tokens.contents:
        for of in ("blocks", "snapshots"):
            if page := tier.get(of, content.key):
                slabs[page.slab] = None
    for slab in slabs:
        if slab.holders:
            continue
        for page in list(slab.pages):
            tier.drop(page)


def serve_window(engine, mover, args, kind):
    """Tokens, seconds, ms of steps and bytes both ways of a window; then all comes to rest."""
    metrics, gaps, tokens = engine.metrics, [], 0
    start = metrics.host_loaded_bytes, metrics.host_stored_bytes
    begun = last = time.perf_counter()
    brought = mover.brought
    while last - begun < args.seconds:
        tokens += len(engine.step())
        moved = metrics.host_loaded_bytes + metrics.host_stored_bytes - sum(start)
        begins = kind != KINDS[0] and moved < 1e9 * args.gb_s * (last - begun)
        mover.move(begins=begins, copies=kind == KINDS[2])
        now = time.perf_counter()
        gaps.append(1e3 * (now - last))
        last = now
    back, there = metrics.host_loaded_bytes, metrics.host_stored_bytes
    row = {"tokens": tokens, "seconds": last - begun, "gaps": gaps}
    row |= {"back": back - start[0], "there": there - start[1], "brought": mover.brought - brought}
    while not mover.rests():
        engine.step()
        mover.move(begins=False, copies=kind == KINDS[2])
    return row


def build(config, params, args, requests):
    """An engine that has its programs."""
    prefix, context = args.tokens // BLOCK, max(args.tokens, BLOCK + args.answer) + 2 * BLOCK
    held = requests * (1 + (BLOCK + args.answer) // BLOCK)
    engine = ds.Engine(
        config, params, max_requests=requests, max_context_tokens=context, grammars=False,
        prefill_tokens=(max(64, 4 * requests),), num_snapshots=max(64, 4 * requests),
        num_blocks=held + (HELD + args.asked) * prefix + requests, host_cache_bytes=args.host_cache,
    )  # fmt: skip
    begun = time.perf_counter()
    engine.warmup()
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({"requests": requests, "warmup_s": seconds}), flush=True)
    return engine


def run(engine, args, requests):
    """Rows of all kinds."""
    rng = np.random.default_rng(0)
    vocab = engine.config.vocab_size - 8

    def random_tokens(count):
        return rng.integers(2, vocab, count).tolist()

    blocks = args.tokens // BLOCK
    # Too many to have room on the device, also while the running requests hold no block.
    count = engine.plan.pools.num_blocks // blocks + args.asked
    prompts = [random_tokens(blocks * BLOCK + 1) for _ in range(count)]
    for prompt in prompts:
        make_prefix(engine, prompt)
        evict(engine)

    def submit():
        return engine.submit(random_tokens(BLOCK), max_new_tokens=args.answer, stop_token_ids=())

    running = {submit() for _ in range(requests)}
    while any(engine.requests[one].num_drawn < 8 for one in running):
        engine.step()
    mover, windows = Mover(engine, prompts, args.asked), {kind: [] for kind in KINDS}
    for kind in KINDS:  # what is slow the first time
        serve_window(engine, mover, dataclasses.replace(args, seconds=args.warm_seconds), kind)
    for number in range(args.rounds):
        for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
            short = {one for one in running if has_little_left(engine, one, args)}
            for one in short:
                engine.cancel(one)
            running = (running - short) | {submit() for _ in short}
            while any(engine.requests[one].num_drawn < 8 for one in running):
                engine.step()
            windows[kind].append(serve_window(engine, mover, args, kind))
            if kind == KINDS[2]:
                bring_all_to_the_host(engine, mover, args)
    for one in running:
        engine.cancel(one)
    engine.step()
    return rows_of(windows, requests)


def bring_all_to_the_host(engine, mover, args):
    """What the host forgot is copied as it leaves, so that no window after this one copies it."""
    short = dataclasses.replace(args, seconds=args.warm_seconds / 4)
    for _ in range(40):
        row = serve_window(engine, mover, short, KINDS[1])
        if row["there"] < 0.02 * row["back"]:  # what running requests let go
            return


def has_little_left(engine, request, args):
    """Whether it might end in the next window: an eighth of its answer is left, or less."""
    return engine.requests[request].num_drawn > 7 * args.answer // 8


def rows_of(windows, requests):
    """By kind: a row for print."""
    rows, quiet = {}, None
    for kind, found in windows.items():
        seconds = sum(one["seconds"] for one in found)
        each = [one["tokens"] / one["seconds"] for one in found]
        gaps = np.array([gap for one in found for gap in one["gaps"]])
        speed = sum(one["tokens"] for one in found) / seconds
        quiet = quiet or speed
        rows[kind] = {
            "requests": requests,
            "tokens_s": round(speed, 1),
            "of_quiet": round(speed / quiet, 4),
            "windows_tokens_s": [round(one, 1) for one in each],
            "step_ms_p50_p90_p99": np.quantile(gaps, (0.5, 0.9, 0.99)).round(3).tolist(),
            "back_gb_s": significant(sum(one["back"] for one in found) / 1e9 / seconds),
            "there_gb_s": significant(sum(one["there"] for one in found) / 1e9 / seconds),
            "prefixes": sum(one["brought"] for one in found),
        }
    return rows


def significant(number):
    """Three digits of it."""
    return float(f"{number:.3g}")


@dataclasses.dataclass(frozen=True)
class Args:
    """Of a run, as `main` reads them."""

    tokens: int = 102_400
    asked: int = 2
    gb_s: float = 20.0
    seconds: float = 2.0
    warm_seconds: float = 1.0
    rounds: int = 3
    answer: int = 8192
    host_cache: str = "16GiB"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64], help="that decode")
    for field in dataclasses.fields(Args):
        helps = {"tokens": "of a prefix", "asked": "prefixes on their way at a time",
                 "gb_s": "both ways together, at most", "seconds": "of a window",
                 "rounds": "windows of each kind"}  # fmt: skip
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(
            option, type=type(field.default), default=field.default, help=helps.get(field.name)
        )
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    given = parser.parse_args()
    args = Args(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Args)})
    config, params = start(given)
    for requests in given.requests:
        engine = build(config, params, args, requests)
        print(json.dumps({"block_bytes": row_bytes(engine.cache.paged)}), flush=True)
        for kind, row in run(engine, args, requests).items():
            print(json.dumps({"kind": kind} | row), flush=True)
        engine.close()
        del engine


if __name__ == "__main__":
    main()
