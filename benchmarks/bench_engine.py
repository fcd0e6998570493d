"""The engine beside a loop on the device: `python -m benchmarks.bench_engine CONFIG [options]`.

Both decode as many requests of the same length, greedily, with the same weights. The loop calls one
jitted step that takes its tokens from the one before, and reads none of them. The engine hands out
every token. CONFIG is as for `bench_serving`. Prints ms a step, and what the engine takes more.
Of a model with Engram tables, `--engram-tables` says where the engine's steps read them, one engine
for each place; the loop reads them in the first one.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from benchmarks.bench_serving import load
from dsv4_jax.bench.fill import filled_cache
from dsv4_jax.bench.timing import time_calls
from dsv4_jax.cache.schema import choose_cache_format
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.engram import place_tables
from dsv4_jax.engram.placed_tables import PLACES
from dsv4_jax.model.weight_forms import RELEASE_FORMS

PROMPT, ROUNDS = 64, 7


def start(arguments):
    """Sets JAX up, says what runs on what, and gives the model of `load_model`."""
    ds.runtime.claim_memory()
    ds.set_xla_flags()
    ds.use_compilation_cache()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {arguments}", flush=True)
    layers = getattr(arguments, "layers", None)
    return load_model(arguments.config, arguments.weights, arguments.experts, layers)


def load_model(name, weights, experts, layers=None):
    """Config and parameters: of a checkpoint as stored, of a preset random, without drafts."""
    config, params = load(name, layers, experts, weights=weights, drafts=False)
    return config, ds.unstack_layers(params)


def loop_ms(config, params, *, requests, context, steps):
    """Median, least and most ms of a step that keeps its tokens on the device."""
    cache = filled_cache(
        config,
        length_tokens=np.full(requests, PROMPT),
        max_context_tokens=context,
        cache_format=choose_cache_format(config, None),
    )
    rows = jnp.arange(requests, dtype=jnp.int32)

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(params, state):
        cache, tokens = state
        step = ds.StepInput(token_ids=tokens, request_ids=rows, request_slots=rows)
        cache, logits = ds.decode_step(params, cache, step, config=config)
        return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def rewind(state):
        length = jnp.full(requests, PROMPT, jnp.int32)
        return dataclasses.replace(state[0], length_tokens=length), state[1]

    timing, _ = time_calls(
        lambda state: decode(params, state), (cache, rows), rewind=rewind, max_calls=steps
    )
    return [1e3 * s for s in (timing.median_s, timing.least_s, timing.most_s)]


def engine_ms(config, params, *, requests, context, steps, **options):
    """The same of the engine's steps, once every request decodes."""
    engine = ds.Engine(
        config,
        params,
        max_requests=requests,
        max_context_tokens=context,
        prefill_tokens=(max(64, requests),),
        **options,
    )
    engine.warmup()
    compiled = engine.metrics.compiles
    rng = np.random.default_rng(0)
    for _ in range(requests):
        engine.submit(
            rng.integers(0, config.vocab_size, PROMPT).tolist(),
            max_new_tokens=context - PROMPT,
            stop_token_ids=(),
        )
    while len(engine.step()) < requests:
        pass  # prompts
    steps_per_call = options["steps_per_call"]
    times, calls = [], -(-steps // steps_per_call)
    for _ in range(ROUNDS):
        started = time.perf_counter()
        drawn = sum(len(engine.step()) for _ in range(calls))
        times.append(1e3 * (time.perf_counter() - started) * requests / drawn)
        assert steps_per_call > 1 or drawn == calls * requests, "every request is in every step"
    assert engine.metrics.compiles == compiled
    return [statistics.median(times), min(times), max(times)]


def placed(params, where):
    """Parameters whose Engram tables, if there are any, lie there."""
    if params.engram is None or where == "host":
        return params
    return dataclasses.replace(params, engram=place_tables(params.engram, where))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    parser.add_argument("--layers", type=int, help="use only the first so many layers of a preset")
    parser.add_argument(
        "--engram-tables", nargs="+", choices=(*PLACES, "host"), default=["host"],
        help="of a model that has some, one engine for each of these",
    )  # fmt: skip
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64, help="steps of each of seven rounds")
    parser.add_argument("--steps-per-call", type=int, default=1, help="of the engine")
    arguments = parser.parse_args()
    assert PROMPT + (ROUNDS + 2) * arguments.steps < arguments.context, "a longer --context"
    config, params = start(arguments)
    for requests in arguments.requests:
        sizes = {"requests": requests, "context": arguments.context, "steps": arguments.steps}
        loop = loop_ms(config, placed(params, arguments.engram_tables[0]), **sizes)
        for where in arguments.engram_tables if config.engram else ["host"]:
            options = {"steps_per_call": arguments.steps_per_call, "engram_tables": where}
            engine = engine_ms(config, params, **sizes, **options)
            row = {"requests": requests, "loop_ms": loop, "engine_ms": engine}
            row |= {"engram_tables": where} if config.engram else {}
            print(json.dumps(row | {"engine_more_ms": engine[0] - loop[0]}), flush=True)


if __name__ == "__main__":
    main()
