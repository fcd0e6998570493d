"""Times other projects' kernels, called through torch, as ours are: device time of a call."""

import statistics

_REPLAYS = 20


def median_us(calls):
    """Median of one call's time, in microseconds; `calls` are functions, replayed as one graph."""
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
