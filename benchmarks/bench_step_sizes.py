"""What a step with prompts takes by its size: `python -m benchmarks.bench_step_sizes CONFIG`.

A step has one token for each request that decodes, and a prompt's tokens in the rest of its rows. A
row of the output gives the step's size, how many of its rows hold tokens, and ms: median, least and
most. CONFIG is as for `bench_serving`.
"""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from benchmarks.bench_serving import load
from dsv4_jax.bench.fill import filled_cache
from dsv4_jax.bench.program import compile_program
from dsv4_jax.bench.timing import time_calls
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS
from dsv4_jax.step.prefill import jit_prefill


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 1536, 2048])
    parser.add_argument(
        "--filled", type=float, nargs="+", default=[1.0], help="shares of a size that hold tokens"
    )
    parser.add_argument("--decoding", type=int, default=31, help="requests that decode beside it")
    parser.add_argument("--context", type=int, default=4096, help="tokens that each request holds")
    parser.add_argument("--cache-format", default="fp8_ue8m0")
    parser.add_argument("--layers", type=int, help="use only the first so many layers of a preset")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    args = parser.parse_args()
    ds.runtime.claim_memory()
    ds.set_xla_flags()
    ds.use_compilation_cache()
    config, params = load(args.config, args.layers, args.experts, weights=args.weights)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args}", flush=True)
    slots = args.decoding + 1
    lengths = np.full(slots, args.context)
    lengths[-1] = 0
    cache = filled_cache(
        config,
        length_tokens=lengths,
        max_context_tokens=args.context + max(args.sizes),
        cache_format=args.cache_format,
    )
    for size in args.sizes:
        step = step_of(config, args, size, size)
        program = compile_program(jit_prefill, params, cache, step, config=config)
        for share in args.filled:
            tokens = max(slots, round(share * size))
            step = step_of(config, args, size, tokens)
            timing, cache = time_calls(
                lambda cache, program=program, step=step: program.run(params, cache, step)[0],
                cache,
                rewind=lambda cache: rewound(cache, lengths),
                max_calls=4,
                repeats=5,
            )
            row = {"size": size, "tokens": tokens, "decoding": args.decoding}
            print(json.dumps(row | timing.fields()), flush=True)


def step_of(config, args, size, tokens):
    """A step of so many rows, of which so many hold tokens."""
    slots = args.decoding + 1
    rows = np.full(size, -1, np.int32)
    rows[:tokens] = np.minimum(np.arange(tokens), args.decoding)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, size)
    return ds.StepInput(
        token_ids=jnp.asarray(ids, jnp.int32),
        request_ids=jnp.asarray(rows),
        request_slots=jnp.arange(slots, dtype=jnp.int32),
    )


def rewound(cache, lengths):
    """The cache with the lengths that it began with."""
    return dataclasses.replace(cache, length_tokens=jnp.asarray(lengths, jnp.int32))


if __name__ == "__main__":
    main()
