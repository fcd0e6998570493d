"""Profiles a program on a GPU, launch by launch, with JAX's profiler."""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

_STREAM = "Stream"  # lines of a device plane that hold launches; other lines group them
_FUSION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*? (?:fusion|copy|sort)\((.*)")
_WEIGHT = re.compile(r"%params_(?:layers__\w+?___\d+__)?(\w+?)(?:\.\d+)*[,)]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def profile_launches(
    compiled: Any, run: Callable[[], object], *, calls: int, devices: int = 1
) -> list[dict[str, Any]]:
    """Lists the launches of one call of a compiled program, and their times.

    Kernels may run concurrently, so the sum of the times can exceed the time of a call. Collectives
    include the wait for other devices; the least of all launches has least of that.

    Args:
      compiled: the program; its HLO text says what its kernels do.
      run: calls the program `calls` times and waits for the last call.
      calls: number of calls.
      devices: GPUs that run it.

    Returns:
      {what, launches, us, least_us} for each kind of launch, the longest first; [] if the profiler
      saw no GPU. Launches and us are those of one call on one device, least_us is one launch.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        events = [event for file in files for event in read_events(file.read_bytes())]
    return summarise(events, kernel_labels(compiled.as_text()), calls=calls * devices)


def summarise(
    events: list[tuple[str, float]], labels: dict[str, str], *, calls: int
) -> list[dict[str, Any]]:
    """Averages events (kernel, us) over the calls, grouped by what the kernels do."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for kernel, us in events:
        times[labels.get(kernel) or re.sub(r"(_+\d+)+$", "", kernel)].append(us)
    rows = [
        {
            "what": what,
            "launches": len(each) / calls,
            "us": sum(each) / calls,
            "least_us": min(each),
        }
        for what, each in times.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def kernel_labels(hlo: str) -> dict[str, str]:
    """{kernel: names of the weights that it reads, or else of its op}, for XLA's kernels."""
    labels = {}
    for line in hlo.splitlines():
        if " fusion(" not in line[:1000] and " copy(" not in line[:1000]:
            continue
        if match := _FUSION.match(line):
            operands = match[2].split("), ")[0] + ")"
            weights = sorted(set(_WEIGHT.findall(operands)))
            op = _OP_NAME.search(line)
            scopes = [p for p in op[1].split("/") if not p.startswith("jit(")] if op else []
            what = " ".join(weights) or "/".join(scopes[-1:])
            labels[re.sub(r"[.-]", "_", match[1])] = f"{match[1].split('.')[0]} {what}".strip()
    return labels


def read_events(serialised: bytes) -> list[tuple[str, float]]:
    """(name, us) of every launch on a GPU's streams."""
    data = jax.profiler.ProfileData.from_serialized_xspace(serialised)
    return [
        (event.name, event.duration_ns / 1e3)
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith(_STREAM)
        for event in line.events
    ]
