"""What requests see of a schedule, by simulation: `python -m benchmarks.bench_schedule [options]`.

The engine's queue, scheduler and loop serve requests on a device that only takes time: what an H200
was measured to take for V4-Flash with 192 experts (`tests/helpers/simulated_device.py`). Prints
throughput, the time between two tokens of a request, and the time to its first token, without a
bound of `--max-step-ms` and with each of those given. It needs no GPU.
"""

import argparse

import numpy as np

from helpers.simulated_device import serve, simulated_engine

NO_BOUND = 600_000.0


def same(count, prompt, drawn):
    """Requests of one kind, which come as soon as there is room."""
    return [(prompt, drawn)] * count, None


def at_random(count, rate, longest, drawn, seed=0):
    """Prompts of log-uniform lengths from 16 tokens on, and answers of up to `drawn` tokens."""
    rng = np.random.default_rng(seed)
    prompts = np.exp(rng.uniform(np.log(16), np.log(longest), count)).astype(int)
    answers = rng.integers(1, drawn, count)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return list(zip(prompts.tolist(), answers.tolist(), strict=True)), arrivals.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-step-ms", type=float, nargs="*", default=[80.0, 130.0])
    parser.add_argument(
        "--prefill-tokens", type=int, nargs="+", default=[64, 256, 1024, 2048, 8192]
    )
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of prompts, or the most")
    parser.add_argument("--new-tokens", type=int, default=1024, help="drawn, or the most of them")
    parser.add_argument(
        "--rate", type=float, help="requests a second, at random times and of random lengths"
    )
    args = parser.parse_args()
    requests, arrivals = same(args.requests, args.prompt, args.new_tokens)
    if args.rate is not None:
        requests, arrivals = at_random(args.requests, args.rate, args.prompt, args.new_tokens)
    print(
        "| max_step_ms | prompt and drawn tokens/s | between tokens, ms: p50, p90, p99, most "
        "| first token, s: p50, p90, p99 | steps with prompts |\n| --- | --- | --- | --- | --- |"
    )
    for bound in [NO_BOUND, *args.max_step_ms]:
        engine, clock, device = simulated_engine(
            prefill_tokens=args.prefill_tokens,
            max_step_ms=bound,
            max_requests=args.concurrent,
            max_context_tokens=args.prompt + args.new_tokens,
        )
        times = serve(engine, clock, requests, arrivals_s=arrivals, concurrent=args.concurrent)
        gaps = ", ".join(f"{times.gap_ms(share):,.1f}" for share in (0.5, 0.9, 0.99, 1))
        first = ", ".join(f"{times.first_s(share):.2f}" for share in (0.5, 0.9, 0.99))
        steps = sum(not is_plain for _, is_plain, _ in device.calls)
        print(
            f"| {'none' if bound == NO_BOUND else f'{bound:g}'} "
            f"| {times.prompt_tokens / times.seconds:,.0f}, "
            f"{times.drawn_tokens / times.seconds:,.0f} | {gaps} | {first} | {steps:,} |"
        )


if __name__ == "__main__":
    main()
