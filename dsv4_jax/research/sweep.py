"""A table of ideas by contexts: loss, speed and memory, kept line by line, so that it goes on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsv4_jax.cache.schema import choose_cache_format
from dsv4_jax.config import DSV4Config
from dsv4_jax.lines import split_lines, without_mark
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.regular_files import has_regular_file, read_regular
from dsv4_jax.research.intervals import mean_interval, paired_difference
from dsv4_jax.research.losses import losses_by_row
from dsv4_jax.research.named import find_idea
from dsv4_jax.research.speed import time_decode
from dsv4_jax.training.corpus import held_out_rows

_MAX_BYTES = 2**28
"""Of a file of cells."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep measures; what belongs together in one file.

    Attributes:
      checkpoint: what names the model.
      num_rows: rows of text for each loss; fewer where the text holds no more.
      num_requests: requests that decode at once.
      repeats: measurements of a decode step.
    """

    checkpoint: str
    num_rows: int
    num_requests: int
    repeats: int


def measure_cell(
    config: DSV4Config,
    params: DSV4Params,
    tokens: np.ndarray,
    plan: SweepPlan,
    *,
    idea: str,
    context: int,
) -> dict[str, Any]:
    """One idea at one context, as it is kept in the file.

    The loss is that of whole sequences, rounded as the cache rounds that the steps are timed on.

    Args:
      config: the model, without an idea.
      params: model parameters.
      tokens: i32[n], the text.
      plan: what is measured.
      idea: its name, `find_idea`.
      context: tokens of a row, and of each request before the timed steps.

    Raises:
      ValueError: there is no such idea, or the text is too short.
    """
    found = find_idea(idea)
    carried = found.applied_to(config)
    stored = dataclasses.replace(found, cache_format=choose_cache_format(carried, None))
    rows = held_out_rows(tokens, context)[: plan.num_rows]
    losses = losses_by_row(params, rows, config=stored.applied_to(config), progress=False)
    cost = time_decode(
        params,
        rows[0, :-1],
        config=carried,
        max_requests=plan.num_requests,
        repeats=plan.repeats,
    )
    return {
        **dataclasses.asdict(plan),
        "idea": idea,
        "context": context,
        "losses": np.round(losses.mean(axis=1, dtype=np.float64), 6).tolist(),
        "step_ms": [round(ms, 4) for ms in cost.step_ms],
        "cache_bytes": cost.cache_bytes,
        "workspace_bytes": cost.workspace_bytes,
    }


class SweepFile:
    """Cells of sweeps, one JSON object a line; each is written as soon as it is measured."""

    def __init__(self, path: pathlib.Path, plan: SweepPlan) -> None:
        """Reads what is there.

        Args:
          path: the file, which need not exist.
          plan: cells that were measured otherwise are left alone and not read.

        Raises:
          ValueError: a line but the last, which an interruption may have cut, is no cell; or it
            is no regular file.
        """
        self._path, self._plan = path, dataclasses.asdict(plan)
        self._cells: dict[tuple[str, int], dict[str, Any]] = {}
        data = read_regular(path, _MAX_BYTES) if has_regular_file(path) else b""
        lines = split_lines(without_mark(data).decode())
        whole = []
        for number, line in enumerate(lines, 1):
            try:
                cell = json.loads(line)
                key = cell["idea"], cell["context"]
            except (ValueError, KeyError, TypeError):
                if number == len(lines):
                    break  # cut by an interruption
                raise ValueError(f"line {number} of {path} is no cell of a sweep") from None
            whole.append(line)
            if all(cell.get(name) == value for name, value in self._plan.items()):
                self._cells[key] = cell
        if len(whole) < len(lines):
            path.write_text("".join(line + "\n" for line in whole))

    def missing(self, ideas: Sequence[str], contexts: Sequence[int]) -> list[tuple[str, int]]:
        """Cells that are not there yet, in the order in which they are to be measured."""
        wanted = [(idea, context) for context in contexts for idea in ideas]
        return [key for key in wanted if key not in self._cells]

    def add(self, cell: dict[str, Any]) -> None:
        """Keeps a cell."""
        with self._path.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        self._cells[cell["idea"], cell["context"]] = cell

    def table(self, ideas: Sequence[str], contexts: Sequence[int]) -> Iterator[str]:
        """Lines of a table; differences are from the first idea at the same context."""
        yield (
            f"{'context':>8}  {'idea':<32}{'loss':>8}{'difference, 95 % interval':>34}"
            f"{'ms/step, least to most':>28}{'cache MiB':>11}{'work MiB':>10}"
        )
        for context in contexts:
            first = self._cells.get((ideas[0], context))
            for idea in ideas:
                cell = self._cells.get((idea, context))
                if cell is not None and first is not None:
                    yield _line(cell, first)


def _line(cell: dict[str, Any], first: dict[str, Any]) -> str:
    loss = mean_interval(cell["losses"], resamples=1)
    shown = ""
    if cell is not first:
        difference = paired_difference(first["losses"], cell["losses"])
        shown = f"{difference.mean:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})"
    times = cell["step_ms"]
    spread = f"{np.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
    return (
        f"{cell['context']:>8}  {cell['idea']:<32}{loss.mean:>8.4f}{shown:>34}{spread:>28}"
        f"{cell['cache_bytes'] / 2**20:>11.2f}{cell['workspace_bytes'] / 2**20:>10.2f}"
    )
