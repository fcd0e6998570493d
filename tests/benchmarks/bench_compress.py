"""Prefill flushes beside vLLM's: `python -m benchmarks.bench_compress [results]`.

Compress, norm, rotate, quantise and scatter every window that a prompt closes, in the released
format. With `--rival FOLDER`, vLLM's Triton kernels for the same compressor, which save a call's
projections before they compress them, are timed on the same GPU through torch; see
`rival_compressor`. The limit is 3 us of launch and the bytes that must move.
"""

import argparse
import functools

from benchmarks import harness, layer_calls, rival_compressor

CASES = [
    (kind, families, tokens)
    for kind, families in (
        ("csa", ("main",)),
        ("csa", ("index",)),
        ("csa", ("main", "index")),
        ("hca", ("main",)),
    )
    for tokens in (8192, 32768)
]
LAYERS = 4
LAUNCH_US = 3.0
RIVAL = "vLLM save + compress (Triton)"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON to keep the rows in")
    parser.add_argument(
        "--rival", help="folder of vLLM's Triton ops; without it only ours is timed"
    )
    args = parser.parse_args()
    bandwidth = harness.copy_bandwidth()
    rival = rival_compressor.load(args.rival) if args.rival else None
    rows = []
    for kind, families, tokens in CASES:
        pools, inputs, num_bytes = layer_calls.flush_case(kind, families, tokens, layers=LAYERS)
        flush = functools.partial(layer_calls.flush, kind=kind, families=families)
        rows.append(
            harness.row(
                f"flush_{kind} {' + '.join(families)}",
                f"{tokens} tokens of one request",
                harness.median_us(flush, inputs, state=pools),
                rival=RIVAL if rival else None,
                rival_us=rival and rival.prefill_us(kind, families, tokens),
                limit_us=LAUNCH_US + num_bytes / bandwidth * 1e6,
            )
        )
    harness.report(rows, args.results)


if __name__ == "__main__":
    main()
