"""Times many calls on a device, each beside other projects' kernels for the same work.

The loops of all cases are compiled before the first is timed, several at once. Each row is printed
as soon as it is measured, and kept as soon as it is complete.

Baselines run after all of our cases. Some calls of torch, among them those that make its streams,
make every later launch of the process take 0.5 us longer (H200); copies that JAX makes to and from
the device did not. So the times of baselines are those of torch as it is.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from dsv4_jax.bench.loops import Loops, enough_rounds
from dsv4_jax.bench.report import first_line
from dsv4_jax.bench.results import RowKeeper, command_line, describe_device

_WIDTHS = {
    "op": 24,
    "shape": 44,
    "ours_us": 9,
    "baseline": 37,
    "baseline_us": 11,
    "ratio": 6,
    "roofline_share": 14,
}
_OF_BASELINE = ("baseline", "baseline_us", "ratio", "baseline_failed")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call to time, which becomes a row.

    Attributes:
      op: name of the timed op.
      shape: shapes of its calls, in words.
      function: as for `loops.median_us`.
      make: () -> (state, inputs) for the function; a state of None means that there is none.
      roofline_us: microseconds that the bytes or the products alone would take, or None.
      rounds: as for `loops.median_us`; by default as many as a short call needs for a loop of 2 ms.
      baseline: name of another project's kernel, or None.
      baseline_us: () -> its microseconds; called after all of our cases were measured.
      rivals: more kernels, name -> as `baseline_us`; without a baseline the first takes its place.
    """

    op: str
    shape: str
    function: Callable[..., Any]
    make: Callable[[], tuple[Any, Any]]
    roofline_us: float | None = None
    rounds: int | None = None
    baseline: str | None = None
    baseline_us: Callable[[], float] | None = None
    rivals: Mapping[str, Callable[[], float]] = dataclasses.field(default_factory=dict)


def measure(cases: Iterable[Case], path: str | None = None) -> int:
    """Prints a row for each case, and again with each baseline; with a path, keeps it there.

    A row replaces that of the same op and shape. Its second and further baselines are its "rivals".
    A case that fails says why, and the others follow.

    Args:
      cases: the cases to time.
      path: JSON file for `results.RowKeeper`.

    Returns:
      The exit status: 1 if a case or a baseline failed, else 0.
    """
    print(", ".join(describe_device().values()), flush=True)
    keeper = None if path is None else RowKeeper(path, command_line())
    start = time.perf_counter()
    cases = list(cases)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        ahead = [attempt(_compile_ahead, case, pool) for case in cases]
    print(f"loops of {len(cases)} rows compiled in {time.perf_counter() - start:.0f} s")
    print(_line({key: key for key in _WIDTHS}), flush=True)
    compared: list[tuple[Case, float]] = []
    status = 0

    def report(measured: dict[str, Any], kept: dict[str, Any] | None) -> None:
        nonlocal status
        print(_line(measured), flush=True)
        if kept is not None and keeper is not None:
            keeper.keep(kept)
        if "failed" in measured or "baseline_failed" in measured:
            status = 1

    for case in cases:
        measured = _measured(case, *ahead.pop(0))
        alone = not _baselines(case) or "failed" in measured
        report(measured, measured if alone else None)
        if not alone:
            compared.append((case, measured["ours_us"]))
    for case, ours_us in compared:
        kept: dict[str, Any] | None = None
        for name, baseline_us in _baselines(case).items():
            measured = _beside_baseline(case, ours_us, name, baseline_us)
            kept = measured if kept is None else _with_rival(kept, measured)
            report(measured, kept)
    return status


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """The result of a call and None, or None and the first line of the error that it raised."""
    try:
        return call(*args), None
    except Exception as error:
        return None, first_line(error)


def row(
    op: str,
    shape: str,
    ours_us: float | None,
    *,
    baseline: str | None = None,
    baseline_us: float | None = None,
    roofline_us: float | None = None,
) -> dict[str, Any]:
    """One line of a report, with the ratio to the baseline and the share of the roofline."""
    share = ratio = None
    if ours_us is not None:
        share = None if roofline_us is None else round(roofline_us / ours_us, 2)
        ratio = None if baseline_us is None else round(ours_us / baseline_us, 2)
    return {
        "op": op,
        "shape": shape,
        "ours_us": None if ours_us is None else round(ours_us, 2),
        "baseline": baseline,
        "baseline_us": baseline_us,
        "ratio": ratio,
        "roofline_share": share,
    }


def _with_rival(kept: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A row beside one more baseline than it has, that of another row."""
    rival = {key: measured[key] for key in _OF_BASELINE if key in measured}
    return kept | {"rivals": [*kept.get("rivals", ()), rival]}


def _baselines(case: Case) -> dict[str | None, Callable[[], float]]:
    """The other kernels of a case by name, its baseline first."""
    first = {} if case.baseline_us is None else {case.baseline: case.baseline_us}
    return first | dict(case.rivals)


def _compile_ahead(case: Case, pool: concurrent.futures.Executor) -> Loops:
    state, inputs = jax.eval_shape(case.make)
    rounds = case.rounds or enough_rounds(case.roofline_us or 0.0, len(inputs))
    return Loops(case.function, inputs, state, rounds=rounds, pool=pool)


def _measured(case: Case, loops: Loops | None, failed: str | None) -> dict[str, Any]:
    """The row of a case without its baseline; its arrays are freed before the next are made."""
    ours_us = None
    if failed is None:
        ours_us, failed = attempt(_time, case, loops)
    made = row(case.op, case.shape, ours_us, roofline_us=case.roofline_us)
    return made if failed is None else made | {"failed": failed}


def _beside_baseline(
    case: Case, ours_us: float, name: str | None, time_us: Callable[[], float]
) -> dict[str, Any]:
    """The row of a case with one baseline."""
    baseline_us, failed = attempt(time_us)
    made = row(
        case.op,
        case.shape,
        ours_us,
        baseline=name,
        baseline_us=baseline_us,
        roofline_us=case.roofline_us,
    )
    return made if failed is None else made | {"baseline_failed": failed}


def _time(case: Case, loops: Loops) -> float:
    state, inputs = case.make()
    return loops.median_us(inputs, state)


def _line(cells: dict[str, Any]) -> str:
    """A row as text."""
    if "failed" in cells:
        text = f"{_padded(cells, ['op', 'shape'])}  failed, {cells['failed']}"
    else:
        text = _padded(cells, list(_WIDTHS))
    if "baseline_failed" in cells:
        text += f"  baseline failed, {cells['baseline_failed']}"
    return text.rstrip()


def _padded(cells: dict[str, Any], keys: Sequence[str]) -> str:
    texts = {key: "" if cells[key] is None else str(cells[key]) for key in keys}
    return "  ".join(text.ljust(_WIDTHS[key]) for key, text in texts.items())
