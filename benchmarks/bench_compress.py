"""Prefill flushes beside vLLM's: `python -m benchmarks.bench_compress [results]`.

A flush compresses, norms, rotates, quantises and scatters every window that a prompt closes, in the
released format. With `--baseline FOLDER`, vLLM's Triton kernels for the same compressor are timed
on the same GPU through torch; they save a call's projections before they compress them, see
`vllm_compressor`. The roofline here is 3 us of launch and the bytes that must move.
"""

import functools
import sys

from benchmarks import baselines, layer_calls, vllm_compressor
from benchmarks.cases.cache import FLUSHED, LAYERS
from dsv4_jax.bench import compare, timing

CASES = [
    (kind, families, tokens)
    for kind, families in (
        ("csa", ("main",)),
        ("csa", ("index",)),
        ("csa", ("main", "index")),
        ("hca", ("main",)),
    )
    for tokens in FLUSHED
]
LAUNCH_US = 3.0
BASELINE = "vLLM save + compress (Triton)"


def main():
    args = baselines.make_parser(__doc__, "folder of vLLM's Triton ops").parse_args()
    bandwidth = timing.copy_bandwidth()
    cases = [case(*shape, bandwidth, args.baseline) for shape in CASES]
    return compare.measure(cases, args.results)


def case(kind, families, tokens, bandwidth, folder):
    """The flush of a prompt's windows, as one row."""
    num_bytes = layer_calls.flush_bytes(kind, families, tokens)
    return compare.Case(
        f"flush_{kind} {' + '.join(families)}",
        f"{tokens} tokens of one request",
        functools.partial(layer_calls.flush, kind=kind, families=families),
        lambda: layer_calls.flush_case(kind, families, tokens, layers=LAYERS["prefill"]),
        roofline_us=LAUNCH_US + num_bytes / bandwidth * 1e6,
        baseline=BASELINE if folder else None,
        baseline_us=(lambda: vllm_compressor.load(folder).prefill_us(kind, families, tokens))
        if folder
        else None,
    )


if __name__ == "__main__":
    sys.exit(main())
