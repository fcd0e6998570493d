"""What benchmarks beside other projects' kernels share: options, and those kernels' times."""

import argparse
import math
import re
import statistics
import traceback

_REPLAYS = 20
_LEAST_MS = 50.0
"""Of a measurement: about as long as one of ours, so that the GPU's clock falls as far."""


def make_parser(doc, baseline=None, **options):
    """The parser of a benchmark with this docstring; `baseline` and others describe its options."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("results", nargs="?", help="JSON file that keeps the rows")
    if baseline is not None:
        parser.add_argument("--baseline", help=f"{baseline}; without it only ours is timed")
    for name, text in options.items():
        parser.add_argument(f"--{name}", help=text)
    return parser


def add_only(parser):
    """The option that leaves rows out, for `chosen`."""
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help='the rows whose "op: shape" matches a regular expression: "Flash.*: (1|64) x"',
    )


def chosen(cases, pattern):
    """The cases whose op and shape match."""
    return [case for case in cases if re.search(pattern, f"{case.op}: {case.shape}")]


class Held:
    """What a function made of the last arguments, or why it failed; freed before it makes more."""

    def __init__(self, make):
        self._make = make
        self._arguments = self._made = self._error = None

    def get(self, *arguments):
        if arguments != self._arguments:
            self._made = self._error = None
            self._arguments = arguments
            try:
                self._made = self._make(*arguments)
            except Exception as error:
                traceback.print_exc()
                self._error = error.with_traceback(None)
        if self._error is not None:
            raise self._error
        return self._made


def median_us(calls, replays=_REPLAYS):
    """Median device time of one call, in microseconds; one CUDA graph replays all of the calls."""
    import torch

    def call_each():
        for call in calls:
            call()

    call_each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX's threads may allocate
        for _ in range(replays):
            call_each()

    def milliseconds(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    milliseconds(1)  # the first replay loads the graph
    times = max(1, math.ceil(_LEAST_MS / milliseconds(1)))
    middle = statistics.median(milliseconds(times) for _ in range(9))
    return round(middle * 1e3 / (times * replays * len(calls)), 2)
