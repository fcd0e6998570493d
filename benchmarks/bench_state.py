"""What reading an engine's state costs the thread that steps: `python -m benchmarks.bench_state`.

One layer of random weights, 64 requests of 1,200 tokens, and as many that were before them. Prints
CPU time of the thread, and that of making JSON of the state, which the event loop does.
"""

import argparse
import json
import platform
import time

import numpy as np

from dsv4_jax.serving.engine_state import read_state
from helpers.serve import small_engine


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1200, help="tokens of a prompt")
    parser.add_argument("--looks", type=int, default=200)
    args = parser.parse_args()
    engine = small_engine(
        max_requests=args.requests, prefill_tokens=(2048,), decode_tokens=2048, num_snapshots=512
    )
    rng = np.random.default_rng(0)
    ids = []
    for _ in range(2):
        for one in ids:
            engine.cancel(one)
            engine.completion(one)
        ids = [
            engine.submit(rng.integers(0, 200, args.tokens).tolist(), max_new_tokens=400)
            for _ in range(args.requests)
        ]
        while any(not engine.requests[one].num_drawn for one in ids):
            engine.step()
    spent = np.zeros((args.looks, 2))
    for look in spent:
        began = time.thread_time()
        state = read_state(engine)
        read = time.thread_time()
        text = json.dumps(state, separators=(",", ":"))
        look[:] = read - began, time.thread_time() - read
    for name, column in zip(("read", "JSON"), spent.T * 1e3, strict=True):
        p50, p99 = np.percentile(column, [50, 99])
        print(f"{name:<6}{p50:8.2f} ms p50 {p99:8.2f} ms p99")
    print(
        f"{len(text):,} bytes; {len(state['requests'])} requests, {len(state['prefixes'])} blocks"
    )
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {args}"
    )


if __name__ == "__main__":
    main()
