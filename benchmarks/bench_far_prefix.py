"""First tokens of a prefix from where it lies: `python -m benchmarks.bench_far_prefix CONFIG`.

A prompt of so many random tokens is computed, asked again from the device's memory, evicted and
asked again from the host's, and with `--disk DIR` once more by a second engine that finds it in
files. Each row gives ms to the first token, the median and all of them, and the tokens that were
hit. Then a request decodes alone, while prefixes are brought back beside it, and in an engine that
has no tier. CONFIG is as for `bench_engine`.
"""

import argparse
import gc
import json
import pathlib
import statistics
import time

import numpy as np

import dsv4_jax as ds
from benchmarks.bench_engine import start
from dsv4_jax.allocator.block_contents import contents_of
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
    parser.add_argument("--made", type=int, nargs="*", default=[], help="tokens, not computed")
    parser.add_argument("--times", type=int, default=5, help="asked from each place")
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[64, 8192])
    parser.add_argument("--host-cache", default="16GiB")
    parser.add_argument("--disk", help="a directory for files, also of a second engine")
    parser.add_argument("--steps", type=int, default=200, help="of the request that decodes")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    args = parser.parse_args()
    config, params = start(args)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(2, config.vocab_size - 8, size // BLOCK * BLOCK + AFTER)
        for size in (*sorted(args.tokens), *sorted(args.made))
    ]
    disk = {"disk_cache_dir": args.disk, "disk_cache_bytes": "48GiB"} if args.disk else {}
    far = build(config, params, prompts, args, host_cache_bytes=args.host_cache, **disk)
    for number, prompt in enumerate(prompts):
        if number < len(args.tokens):
            say(len(prompt), "computed", [first_token(far, prompt)])
        else:
            make_prefix(far, prompt)
        for place, leave in (("device", lambda: None), ("host", lambda: evict(far))):
            asked = []
            for _ in range(args.times):
                leave()
                asked.append(first_token(far, prompt))
            say(len(prompt), place, asked)
    quiet = steps_ms(far, args, [])
    beside = steps_ms(far, args, prompts[len(args.tokens) - 1 : len(args.tokens)])
    far.close()
    if args.disk:
        del far
        gc.collect()  # the pools go with it
        second = build(config, params, prompts, args, **disk)
        for prompt in prompts:
            say(len(prompt), "disk", [first_token(second, prompt)])
        second.close()
        del second
    none = steps_ms(build(config, params, prompts, args), args, [])
    row = {"no tier": none, "never hit": quiet, "prefixes brought back": beside}
    print(json.dumps({"step_ms": row}), flush=True)


def say(tokens, place, asked):
    """One row; `submit_ms` of its times is for the prompt as such, `host_gib` of the process."""
    ms = [round(1e3 * one[0], 2) for one in asked]
    row = {"tokens": tokens, "from": place, "first_token_ms": round(statistics.median(ms), 2)}
    row |= {"submit_ms": round(1e3 * statistics.median(one[1] for one in asked), 2)}
    row |= {"all_ms": ms, "hit_tokens": [one[2] for one in asked], "host_gib": resident_gib()}
    print(json.dumps(row), flush=True)


def resident_gib():
    """Memory of the process."""
    status = pathlib.Path("/proc/self/status").read_text()
    return round(int(status.split("VmRSS:")[1].split()[0]) / 2**20, 2)


def make_prefix(engine, prompt):
    """A prefix of blocks that hold anything: what it takes to move it does not depend on that."""
    (manager,) = engine.loop.shards.managers
    ids = np.asarray(prompt, np.int32)
    contents, chain = [one for one, _ in contents_of(ids, b"", BLOCK)], []
    manager.prefixes.bring_back(chain, contents)
    assert len(chain) == len(contents)
    tree = manager.prefixes.tree
    tree.put_snapshot(chain[-1], tree.take_snapshot_place())
    tree.leave(*chain)


def build(config, params, prompts, args, **options):
    """An engine that has its programs."""
    longest = max(len(prompt) for prompt in prompts) + BLOCK
    engine = ds.Engine(
        config, params, max_requests=2, max_context_tokens=max(longest, 17 * args.steps),
        prefill_tokens=tuple(args.prefill_tokens), grammars=False, num_snapshots=512, **options,
    )  # fmt: skip
    begun = time.perf_counter()
    for _ in engine.warmup():
        pass
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({"options": sorted(options), "warmup_s": seconds}), flush=True)
    return engine


def first_token(engine, prompt):
    """Seconds until it is there, those of `submit`, and the prompt's tokens that were hit."""
    begun = time.perf_counter()
    request = engine.submit(prompt, max_new_tokens=ANSWER, stop_token_ids=())
    submitted = time.perf_counter() - begun
    while engine.requests[request].num_drawn == 0:
        engine.step()
    seconds = time.perf_counter() - begun
    while engine.num_unfinished:
        engine.step()
    return seconds, submitted, engine.completion(request).hit_tokens


def evict(engine):
    """Nothing that a request does not use stays on the devices; waits for the copies.

    In portions: more than an engine copies at once would be lost.
    """
    host = engine.loop.host
    for manager in engine.loop.shards.managers:
        while manager.evict(PORTION):
            host.keep()
            while host.stores.begun:
                time.sleep(0.001)
                host.keep()


def steps_ms(engine, args, prompts):
    """Ms of a step of a request that decodes: the median, and the 99th of 100.

    Each prompt is asked for beside it whenever the last has been answered, and evicted before. Then
    those steps count in which it is on its way and has no slot yet.
    """
    count = 16 * args.steps
    request = engine.submit([2] * BLOCK, max_new_tokens=count, stop_token_ids=(), salt="a")
    while engine.requests[request].num_drawn < 8:
        engine.step()
    gaps, beside, moved, last = [], None, 0, time.perf_counter()
    while len(gaps) < args.steps and engine.requests[request].finish_reason is None:
        if prompts and (beside is None or engine.requests[beside].finish_reason):
            evict(engine)
            beside = engine.submit(prompts[0], max_new_tokens=1, stop_token_ids=())
            last = time.perf_counter()
        was_coming, loaded = is_coming(engine), engine.metrics.host_loaded_bytes
        drawn = {token.request_id for token in engine.step()}
        now = time.perf_counter()
        is_counted = not prompts or (was_coming and is_coming(engine))
        if request in drawn and is_counted:
            gaps.append(1e3 * (now - last))
            moved += engine.metrics.host_loaded_bytes - loaded
        last = now
    for one in (request, beside):
        if one is not None and engine.requests[one].finish_reason is None:
            engine.cancel(one)
    while engine.num_unfinished:
        engine.step()
    p50, p99 = np.quantile(gaps, (0.5, 0.99)).round(3).tolist()
    row = {"p50": p50, "p99": p99, "mean": round(statistics.mean(gaps), 3), "steps": len(gaps)}
    return row | {"moved_gb_s": round(moved / 1e6 / sum(gaps), 2)}


def is_coming(engine):
    """Whether a prefix is on its way."""
    return any(fetch.is_coming for fetch in engine.loop.host.fetches.values())


if __name__ == "__main__":
    main()
