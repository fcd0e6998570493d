"""What benchmarks beside other projects' kernels share: options, and those kernels' times."""

import argparse
import statistics

_REPLAYS = 20


def make_parser(doc, baseline=None, **options):
    """The parser of a benchmark with this docstring; `baseline` and others describe its options."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON file that keeps the rows")
    if baseline is not None:
        parser.add_argument("--baseline", help=f"{baseline}; without it only ours is timed")
    for name, text in options.items():
        parser.add_argument(f"--{name}", help=text)
    return parser


def median_us(calls):
    """Median device time of one call, in microseconds; one CUDA graph replays all of the calls."""
    import torch

    def call_each():
        for call in calls:
            call()

    call_each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX's threads may allocate
        for _ in range(_REPLAYS):
            call_each()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (_REPLAYS * len(calls)))
    return round(statistics.median(times), 2)
