"""Serving under load: `python -m benchmarks.bench_serving CONFIG [options]`.

CONFIG is a checkpoint directory, `shipped`, or a preset (`tiny`, `flash`, `pro`, `flash_slim`,
`pro_slim`, `v41_flash`). The weights of a preset are random, and prompts are random tokens of which
half share a head, or of one length, with nothing shared. Prints throughput, latency percentiles,
acceptance, prefix hits and how much memory grew. With several bounds of `--max-step-ms` it serves
as often, by an engine each, and prints how long steps with prompts took and were predicted to take.
"""

import argparse
import collections
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.bench.engram_reads import make_tables, reduced
from dsv4_jax.bench.memory import bytes_in_use
from dsv4_jax.bench.routing_laws import LAWS
from dsv4_jax.bench.weights import random_params
from dsv4_jax.cli.arguments import add_mesh, add_weights, chosen_mesh
from dsv4_jax.config.first_layers import first_layers
from dsv4_jax.model.weight_forms import RELEASE_FORMS, STORED

PRESETS = ("tiny", "flash", "pro", "flash_slim", "pro_slim", "v41_flash")
ENGRAM_ROWS = 2**20


def load(
    name, num_layers=None, num_experts=None, *, weights="bfloat16", mesh=None, routing="uniform",
    drafts=True, engram_rows=ENGRAM_ROWS,
):  # fmt: skip
    """Config and parameters.

    Of a preset its first layers and so many experts, if given, with what drafts need or without it,
    and Engram tables of so many rows in the host's memory where it has any.
    """
    if name not in PRESETS:
        return ds.load_checkpoint(ds.SHIPPED_CHECKPOINT if name == "shipped" else name)
    config = getattr(ds.DSV4Config, name)()
    if not drafts or num_layers is not None:
        config = dataclasses.replace(config, num_mtp_layers=0, dspark=None)
    if num_layers is not None:
        config = first_layers(config, num_layers)
    if num_experts is not None:
        config = dataclasses.replace(config, num_routed_experts=num_experts)
    if config.engram is not None:
        config = dataclasses.replace(config, engram=reduced(config.engram, engram_rows))
    if jax.default_backend() == "gpu" or weights == STORED:
        params = random_params(config, weights=weights, mesh=mesh, routing=routing)
    else:
        params = ds.init_params(config, jax.random.key(0), dtype=jnp.bfloat16)
    if config.engram is not None:
        params = dataclasses.replace(params, engram=make_tables(config, None))
    return config, params


def add_model(parser):
    """Adds the options that say which model an engine has, in which form and on which devices."""
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--steps-per-call", type=int, default=1)
    parser.add_argument("--cache-format", help="if not given, the model's own")
    parser.add_argument("--layers", type=int, help="use only the first so many layers of a preset")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    parser.add_argument(
        "--engram-rows", type=int, default=ENGRAM_ROWS,
        help="of each Engram table, which lie in the host's memory",
    )  # fmt: skip
    parser.add_argument(
        "--routing", choices=list(LAWS), default="uniform",
        help="how tokens pick the experts of a preset on a GPU",
    )  # fmt: skip
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    add_mesh(parser, split_cache=True)


def load_model(args):
    """Sets JAX up, and gives config, parameters and mesh of the options of `add_model`."""
    ds.runtime.claim_memory()
    ds.set_xla_flags()
    ds.use_compilation_cache()
    mesh = chosen_mesh(args)
    config, params = load(
        args.config, args.layers, args.experts,
        weights=args.weights, mesh=mesh, routing=args.routing,
        drafts=args.draft_tokens > 0, engram_rows=args.engram_rows,
    )  # fmt: skip
    return config, params, mesh


def make_prompt(rng, head, longest, vocab_size):
    """A prompt of log-uniform length; half of them start with the common head."""
    length = int(np.exp(rng.uniform(np.log(16), np.log(longest))))
    own = rng.integers(0, vocab_size, length)
    if rng.random() < 0.5:
        own[: min(length // 2, len(head))] = head[: min(length // 2, len(head))]
    return own.tolist()


def keep_times(engine):
    """Milliseconds of steps with prompts by size, as the engine learns: measured and predicted."""
    times, measured = engine.loop.pace.times, collections.defaultdict(list)
    learn = times.learn

    def note(load, seconds):
        measured[load.size].append((1e3 * seconds, 1e3 * times.predict(load)))
        learn(load, seconds)

    times.learn = note
    return measured


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--requests", type=int, default=64, help="number of requests")
    parser.add_argument("--concurrent", type=int, default=32, help="requests at a time")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--prompt-tokens", type=int, help="tokens of every prompt")
    parser.add_argument(
        "--max-step-ms",
        type=step_bound,
        nargs="+",
        default=[None],
        help="of an engine each; 'default' is its own",
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="submit new requests until so many steps"
    )
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="seconds of serving; then it reports"
    )
    add_model(parser)
    args = parser.parse_args()
    config, params, mesh = load_model(args)
    for max_step_ms in args.max_step_ms:
        serve(config, params, mesh, args, max_step_ms)


def step_bound(text):
    """Ms, or None for `default`."""
    return None if text == "default" else float(text)


def serve(config, params, mesh, args, max_step_ms):
    """Serves all requests, and prints what was seen."""
    engine = ds.Engine(
        config,
        params,
        mesh=mesh,
        max_step_ms=max_step_ms,
        split_cache=args.split_cache,
        max_requests=args.concurrent,
        max_context_tokens=args.context,
        prefill_tokens=args.prefill_tokens,
        draft_tokens=args.draft_tokens,
        steps_per_call=args.steps_per_call,
        cache_format=args.cache_format,
    )
    for name, seconds in engine.warmup():
        print(f"compiled {name:<32}{seconds:>8.1f} s", flush=True)
    compiled, measured = engine.metrics.compiles, keep_times(engine)
    rng = np.random.default_rng(0)
    longest = args.context - args.new_tokens
    head = rng.integers(0, config.vocab_size, longest)
    submitted, first, gaps, last, started_at = 0, [], [], {}, {}
    memory, steps, begun = [], 0, time.perf_counter()
    while True:
        wants_more = submitted < args.requests or steps < args.steps
        while wants_more and engine.num_unfinished < args.concurrent:
            if args.prompt_tokens is None:
                prompt = make_prompt(rng, head, longest, config.vocab_size)
            else:
                prompt = rng.integers(0, config.vocab_size, args.prompt_tokens).tolist()
            request = engine.submit(
                prompt,
                max_new_tokens=args.new_tokens,
                stop_token_ids=(),
            )
            started_at[request] = time.perf_counter()
            submitted += 1
            wants_more = submitted < args.requests or steps < args.steps
        if not engine.num_unfinished or time.perf_counter() - begun > args.budget_s:
            break
        tokens = engine.step()
        steps, now = steps + 1, time.perf_counter()
        for token in tokens:
            if token.request_id not in last:
                first.append(now - started_at.pop(token.request_id))
            else:
                gaps.append(now - last[token.request_id])
            last[token.request_id] = now
            if token.finish_reason:
                del last[token.request_id]
                engine.completion(token.request_id)
        if steps % 100 == 0:
            memory.append(bytes_in_use())
        if steps % 1000 == 0:
            moved, seconds = memory[-1] - memory[0], time.perf_counter() - begun
            print(f"step {steps:>6}, {seconds:.0f} s, memory {moved:+,} bytes", flush=True)
    seconds, metrics = time.perf_counter() - begun, engine.metrics
    read = metrics.prompt_tokens - metrics.hit_tokens
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args}")
    bound_ms = 1e3 * engine.loop.pace.bound_s(args.concurrent)
    print(f"steps with prompts beside {args.concurrent} requests: {bound_ms:,.1f} ms at most")
    print(
        f"{submitted} requests, {engine.num_unfinished} unfinished, {steps} steps, {seconds:.1f} s"
    )
    print(f"prompt tokens   {read / seconds:>12,.0f} per s read, {metrics.hit_tokens:,} shared")
    print(f"drawn tokens    {metrics.generated_tokens / seconds:>12,.0f} per s")
    for name, values in (("first token", first), ("between tokens", gaps)):
        p50, p90, p99, most = np.percentile(values or [np.nan], [50, 90, 99, 100]) * 1e3
        print(
            f"{name:<16}{p50:>12,.1f} ms p50 {p90:>12,.1f} ms p90 {p99:>12,.1f} ms p99 "
            f"{most:>12,.1f} ms most"
        )
    for size, pairs in sorted(measured.items()):
        seen, predicted = np.array(pairs).T
        print(
            f"{size:>6} tokens of prompts: {len(seen):>6} steps, {np.median(seen):,.1f} ms "
            f"({seen.min():,.1f} to {seen.max():,.1f}), predicted {np.median(predicted):,.1f}"
        )
    print(f"accepted        {metrics.acceptance:>12.1%}   preempted {metrics.preempted}")
    if memory:
        print(f"memory          {max(memory) - memory[0]:>+12,} bytes of {memory[0]:,}")
    print(f"compiled while serving: {metrics.compiles - compiled}")


if __name__ == "__main__":
    main()
