"""What idle rows of a decode step take: `python -m benchmarks.bench_decode_sizes CONFIG`.

An engine whose decode steps all have room for `--slots` requests serves fewer, and then one with
steps of `--batch-sizes` too does. CONFIG is as for `bench_serving`. A row of the output gives how
many requests decode, the size of their step, and its ms, once for each round.
"""

import argparse
import json
import time

import numpy as np

import dsv4_jax as ds
from benchmarks.bench_engine import start
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS

PROMPT, WARM, ROUNDS = 200, 8, 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--slots", type=int, default=64, help="requests of the largest step")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="if not given, the engine's")
    parser.add_argument("--steps", type=int, default=100, help="steps of each round")
    parser.add_argument("--max-context-tokens", type=int, default=9472)
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    args = parser.parse_args()
    config, params = start(args)
    for batch_sizes in ((args.slots,), args.batch_sizes):
        engine = ds.Engine(
            config, params, max_requests=args.slots, max_context_tokens=args.max_context_tokens,
            prefill_tokens=(max(256, args.slots),), decode_batch_sizes=batch_sizes,
            num_snapshots=0, grammars=False,
        )  # fmt: skip
        engine.warmup()
        for requests in args.requests:
            size = engine.plan.step_sizes.warmed_up().holding(requests, prompts=False)
            ms = [milliseconds(engine, requests, args.steps) for _ in range(ROUNDS)]
            print(json.dumps({"requests": requests, "size": size, "ms": ms}), flush=True)
        engine.close()


def milliseconds(engine, requests, steps):
    """Of a step in which so many decode."""
    rng, ids = np.random.default_rng(0), []
    for seed in range(requests):
        text = rng.integers(2, engine.config.vocab_size - 8, PROMPT).tolist()
        answer = {"max_new_tokens": 2 * WARM + requests + steps, "stop_token_ids": ()}
        ids.append(engine.submit(text, seed=seed, **answer))
    while any(engine.requests[one].num_drawn < WARM for one in ids):
        engine.step()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    taken = 1e3 * (time.perf_counter() - started) / steps
    while engine.num_unfinished:
        engine.step()
    for one in ids:
        engine.completion(one)  # which forgets it
    return round(taken, 2)


if __name__ == "__main__":
    main()
