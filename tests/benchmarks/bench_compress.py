"""Prefill flushes beside vLLM's: `python -m benchmarks.bench_compress [results]`.

Compress, norm, rotate, quantise and scatter every window that a prompt closes, in the released
format. With `--rival FOLDER`, vLLM's Triton kernels for the same compressor, which save a call's
projections before they compress them, are timed on the same GPU through torch; see
`rival_compressor`. The limit is 3 us of launch and the bytes that must move.
"""

import argparse
import functools
import sys

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
    cases = [case(*shape, bandwidth, args.rival) for shape in CASES]
    return harness.measure(cases, args.results)


def case(kind, families, tokens, bandwidth, folder):
    """A row."""
    num_bytes = layer_calls.flush_bytes(kind, families, tokens)
    return harness.Case(
        f"flush_{kind} {' + '.join(families)}",
        f"{tokens} tokens of one request",
        functools.partial(layer_calls.flush, kind=kind, families=families),
        lambda: layer_calls.flush_case(kind, families, tokens, layers=LAYERS),
        limit_us=LAUNCH_US + num_bytes / bandwidth * 1e6,
        rival=RIVAL if folder else None,
        rival_us=(lambda: rival_compressor.load(folder).prefill_us(kind, families, tokens))
        if folder
        else None,
    )


if __name__ == "__main__":
    sys.exit(main())
