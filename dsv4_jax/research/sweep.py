"""A table of ideas by contexts: loss, speed and memory, kept line by line, so that it goes on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
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
from dsv4_jax.research.speed import DecodeTimer
from dsv4_jax.training.corpus import held_out_rows

_MAX_BYTES = 2**28
"""Of a file of cells."""
HEADER = (
    f"{'context':>8}  {'idea':<32}{'loss':>8}{'difference, 95 % interval':>34}"
    f"{'ms/step, least to most':>28}{'cache MiB':>11}{'work MiB':>10}"
)
"""Of a table of cells."""


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


class SweepFile:
    """Cells of sweeps, one JSON object a line; each is written as soon as it is measured.

    A line with losses alone comes before the line of the whole cell.
    """

    def __init__(self, path: pathlib.Path, plan: SweepPlan) -> None:
        """Reads what is there.

        Args:
          path: the file, which need not exist.
          plan: cells that were measured otherwise are left alone and not read.

        Raises:
          ValueError: a line but the last, which an interruption may have cut, is no cell; or it
            is no regular file.
        """
        self.plan = plan
        self._path, self._plan = path, dataclasses.asdict(plan)
        self._losses: dict[tuple[str, int], list[float]] = {}
        self._cells: dict[tuple[str, int], dict[str, Any]] = {}
        data = read_regular(path, _MAX_BYTES) if has_regular_file(path) else b""
        lines = split_lines(without_mark(data).decode())
        whole = []
        for number, line in enumerate(lines, 1):
            try:
                cell = json.loads(line)
                _ = cell["idea"], cell["context"]
            except (ValueError, KeyError, TypeError):
                if number == len(lines):
                    break  # cut by an interruption
                raise ValueError(f"line {number} of {path} is no cell of a sweep") from None
            whole.append(line)
            if all(cell.get(name) == value for name, value in self._plan.items()):
                self._note(cell)
        if len(whole) < len(lines):
            path.write_text("".join(line + "\n" for line in whole))

    def missing(self, ideas: Sequence[str], contexts: Sequence[int]) -> list[tuple[str, int]]:
        """Cells that are not there yet, in the order in which they are to be measured."""
        wanted = [(idea, context) for context in contexts for idea in ideas]
        return [key for key in wanted if key not in self._cells]

    def losses(self, idea: str, context: int) -> list[float] | None:
        """Those of an idea's rows, if they were measured."""
        return self._losses.get((idea, context))

    def add(self, idea: str, context: int, **figures: Any) -> None:
        """Keeps what was measured of a cell: its losses alone, or all of it."""
        cell = {**self._plan, "idea": idea, "context": context, **figures}
        with self._path.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        self._note(cell)

    def _note(self, cell: dict[str, Any]) -> None:
        key = cell["idea"], cell["context"]
        self._losses[key] = cell.get("losses", [])
        if "step_ms" in cell:
            self._cells[key] = cell

    def rows(self, ideas: Sequence[str], context: int) -> Iterator[str]:
        """Lines of a context below `HEADER`; differences are from the first idea."""
        first = self._cells.get((ideas[0], context))
        for idea in ideas:
            cell = self._cells.get((idea, context))
            if cell is not None and first is not None:
                yield _line(cell, first)


def count_measurements(num_ideas: int) -> int:
    """How many `measure_context` makes: each idea's loss and step, and the timing of all steps."""
    return 2 * num_ideas + 1 if num_ideas else 0


def measure_context(
    config: DSV4Config,
    params: DSV4Params,
    tokens: np.ndarray,
    kept: SweepFile,
    *,
    ideas: Sequence[str],
    context: int,
    begin: Callable[[str], Callable[[], object]] = lambda name: lambda: None,
    tell: Callable[[str], object] = lambda text: None,
) -> None:
    """Ideas at one context: the loss of each, then decode steps of all in turns.

    What is measured is kept at once. The loss is that of whole sequences, rounded as the cache
    rounds that the steps are timed on. In turns, a machine that grows slower meanwhile does not
    look like a difference between ideas.

    Args:
      config: the model, without an idea.
      params: model parameters.
      tokens: i32[n], the text.
      kept: where cells go, and what is to be measured.
      ideas: their names, `find_idea`.
      context: tokens of a row, and of each request before the timed steps.
      begin: called with the name of each of `count_measurements`, as it begins; what it gives is
        called as that ends.
      tell: called with a line for each loss that was measured.

    Raises:
      ValueError: there is no such idea, or the text is too short.
    """
    plan, timers = kept.plan, {}
    rows = held_out_rows(tokens, context)[: plan.num_rows]
    for idea in ideas:
        end = begin(f"the loss of {idea} at {context:,} tokens")
        if kept.losses(idea, context) is None:
            found = find_idea(idea)
            stored_as = choose_cache_format(found.applied_to(config), None)
            stored = dataclasses.replace(found, cache_format=stored_as).applied_to(config)
            losses = losses_by_row(params, rows, config=stored, progress=False)
            kept.add(idea, context, losses=losses.mean(axis=1, dtype=np.float64).round(6).tolist())
            tell(f"{idea} at {context:,} tokens: a loss of {losses.mean():.4f}")
        end()
    for idea in ideas:
        end = begin(f"compiling a decode step of {idea} at {context:,} tokens")
        timers[idea] = DecodeTimer(
            params,
            rows[0, :-1],
            config=find_idea(idea).applied_to(config),
            max_requests=plan.num_requests,
        )
        timers[idea].measure_ms()
        end()
    end = begin(f"timing the steps of {len(ideas)} idea(s) at {context:,} tokens, in turns")
    turns = [[timer.measure_ms() for timer in timers.values()] for _ in range(plan.repeats)]
    for (idea, timer), times in zip(timers.items(), zip(*turns, strict=True), strict=True):
        cost = timer.cost(round(ms, 4) for ms in times)
        kept.add(
            idea,
            context,
            losses=kept.losses(idea, context),
            step_ms=list(cost.step_ms),
            cache_bytes=cost.cache_bytes,
            workspace_bytes=cost.workspace_bytes,
        )
    end()


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
