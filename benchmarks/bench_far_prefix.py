"""First tokens of a prefix from where it lies: `python -m benchmarks.bench_far_prefix CONFIG`.

A prompt of so many random tokens is computed, asked again from the device's memory, evicted and
asked again from the host's, and with `--disk DIR` once more by a second engine that finds it in
files. Each row gives ms to the first token, the median and all of them, and the tokens that were
hit. Then a request decodes alone, while prefixes are brought back beside it, and in an engine that
has no tier. CONFIG is as for `bench_engine`.
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np

import dsv4_jax as ds
from benchmarks.bench_engine import load_model
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS

BLOCK, ANSWER, AFTER = 128, 4, 16
"""Of an answer, and tokens of a prompt after its last block."""

PORTION = 64
"""Blocks."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 102_400])
    parser.add_argument("--times", type=int, default=5, help="asked from each place")
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[64, 8192])
    parser.add_argument("--host-cache", default="16GiB")
    parser.add_argument("--disk", help="a directory for files, also of a second engine")
    parser.add_argument("--steps", type=int, default=200, help="of the request that decodes")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    args = parser.parse_args()
    ds.runtime.claim_memory()
    ds.set_xla_flags()
    ds.use_compilation_cache()
    config, params = load_model(args.config, args.weights, args.experts)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args}", flush=True)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(2, config.vocab_size - 8, size // BLOCK * BLOCK + AFTER).tolist()
        for size in sorted(args.tokens)
    ]
    disk = {"disk_cache_dir": args.disk, "disk_cache_bytes": "48GiB"} if args.disk else {}
    far = build(config, params, prompts, args, host_cache_bytes=args.host_cache, **disk)
    for prompt in prompts:
        say(len(prompt), "computed", [first_token(far, prompt)])
        for place, leave in (("device", lambda: None), ("host", lambda: evict(far))):
            asked = []
            for _ in range(args.times):
                leave()
                asked.append(first_token(far, prompt))
            say(len(prompt), place, asked)
    quiet = steps_ms(far, args, [])
    beside = steps_ms(far, args, prompts[-1:])
    far.close()
    if args.disk:
        del far
        second = build(config, params, prompts, args, **disk)
        for prompt in prompts:
            say(len(prompt), "disk", [first_token(second, prompt)])
        second.close()
        del second
    none = steps_ms(build(config, params, prompts, args), args, [])
    row = {"no tier": none, "never hit": quiet, "prefixes brought back": beside}
    print(json.dumps({"step_ms": row}), flush=True)


def say(tokens, place, asked):
    """One row."""
    ms = [round(1e3 * seconds, 2) for seconds, _ in asked]
    row = {"tokens": tokens, "from": place, "first_token_ms": round(statistics.median(ms), 2)}
    print(json.dumps(row | {"all_ms": ms, "hit_tokens": [hit for _, hit in asked]}), flush=True)


def build(config, params, prompts, args, **options):
    """An engine that has its programs."""
    longest = max(len(prompt) for prompt in prompts) + BLOCK
    engine = ds.Engine(
        config, params, max_requests=2, max_context_tokens=max(longest, 4 * args.steps),
        prefill_tokens=tuple(args.prefill_tokens), grammars=False, num_snapshots=512, **options,
    )  # fmt: skip
    begun = time.perf_counter()
    for _ in engine.warmup():
        pass
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({"options": sorted(options), "warmup_s": seconds}), flush=True)
    return engine


def first_token(engine, prompt):
    """Seconds until it is there, and the prompt's tokens that were hit."""
    begun = time.perf_counter()
    request = engine.submit(prompt, max_new_tokens=ANSWER, stop_token_ids=())
    while engine.requests[request].num_drawn == 0:
        engine.step()
    seconds = time.perf_counter() - begun
    while engine.num_unfinished:
        engine.step()
    return seconds, engine.completion(request).hit_tokens


def evict(engine):
    """Nothing that a request does not use stays on the devices; waits for the copies.

    In portions: more than an engine copies at once would be lost.
    """
    host = engine.loop.host
    for manager in engine.loop.shards.managers:
        while manager.evict(PORTION):
            host.keep()
            while host._stores._runs:
                time.sleep(0.001)
                host.keep()


def steps_ms(engine, args, prompts):
    """Ms of a step of a request that decodes: the median, and the 99th of 100.

    Each prompt is asked for beside it whenever the last has been answered, and evicted before.
    """
    request = engine.submit([2] * BLOCK, max_new_tokens=2 * args.steps, stop_token_ids=(), salt="a")
    while engine.requests[request].num_drawn < 8:
        engine.step()
    gaps, beside, last = [], None, time.perf_counter()
    while len(gaps) < args.steps and engine.requests[request].finish_reason is None:
        if prompts and (beside is None or engine.requests[beside].finish_reason):
            for manager in engine.loop.shards.managers:
                manager.evict(manager.num_blocks)
            beside = engine.submit(prompts[0], max_new_tokens=1, stop_token_ids=())
        drawn = {token.request_id for token in engine.step()}
        now = time.perf_counter()
        if request in drawn:
            gaps.append(1e3 * (now - last))
            last = now
    for one in (request, beside):
        if one is not None and engine.requests[one].finish_reason is None:
            engine.cancel(one)
    while engine.num_unfinished:
        engine.step()
    p50, p99 = np.quantile(gaps, (0.5, 0.99)).round(3).tolist()
    return {"p50": p50, "p99": p99, "mean": round(statistics.mean(gaps), 3), "steps": len(gaps)}


if __name__ == "__main__":
    main()
