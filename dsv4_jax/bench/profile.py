"""Where a program's time goes on a GPU, launch by launch, as JAX's profiler records it."""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

_STREAM = "Stream"  # lines of a device's plane that hold what ran, not what was made of it
_FUSION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*? (?:fusion|copy|sort)\((.*)")
_WEIGHT = re.compile(r"%params_(?:layers__\w+?___\d+__)?(\w+?)(?:\.\d+)*[,)]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def profile_launches(
    compiled: Any, run: Callable[[], object], *, calls: int
) -> list[dict[str, Any]]:
    """What one call of a compiled program launches, and how long that takes.

    Kernels may run side by side, so that the sum can exceed the time of a call.

    Args:
      compiled: the program, whose text says what its kernels do.
      run: calls it `calls` times and waits for the last.
      calls: how often.

    Returns:
      {what, launches, us} of each kind of launch, per call, the longest first; [] where the
      profiler saw no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        events = [event for file in files for event in _events(file.read_bytes())]
    return summarise(events, kernel_labels(compiled.as_text()), calls=calls)


def summarise(
    events: list[tuple[str, float]], labels: dict[str, str], *, calls: int
) -> list[dict[str, Any]]:
    """Events (kernel, us) of so many calls, joined by what the kernels do."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for kernel, us in events:
        times[labels.get(kernel) or re.sub(r"(_+\d+)+$", "", kernel)].append(us)
    rows = [
        {"what": what, "launches": len(each) / calls, "us": sum(each) / calls}
        for what, each in times.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def kernel_labels(hlo: str) -> dict[str, str]:
    """{kernel: the weights that it reads, or else the last of its op's name}, of XLA's kernels."""
    labels = {}
    for line in hlo.splitlines():
        if " fusion(" not in line[:1000] and " copy(" not in line[:1000]:
            continue
        if found := _FUSION.match(line):
            operands = found[2].split("), ")[0] + ")"
            weights = sorted(set(_WEIGHT.findall(operands)))
            op = _OP_NAME.search(line)
            place = [p for p in op[1].split("/") if not p.startswith("jit(")] if op else []
            what = " ".join(weights) or "/".join(place[-1:])
            labels[re.sub(r"[.-]", "_", found[1])] = f"{found[1].split('.')[0]} {what}".strip()
    return labels


def _events(serialised: bytes) -> list[tuple[str, float]]:
    """(name, us) of everything that ran on a GPU's streams."""
    data = jax.profiler.ProfileData.from_serialized_xspace(serialised)
    return [
        (event.name, event.duration_ns / 1e3)
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith(_STREAM)
        for event in line.events
    ]
