"""What an engine says while its programs compile, which takes from seconds to minutes for each."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from dsv4_jax.progress import Progress
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.idle_steps import IdleStep, name_of
from dsv4_jax.serving.schedule.scheduler import StepPlan

type Job = tuple[str, Callable[[], object]]
"""A name, and what compiles a program and runs it idle."""

_OF_PROGRAMS = ("is_plain", "only_decodes", "is_simple", "activations")
"""Options of a launch by which steps of one size have several programs."""


class RunsIdle(Protocol):
    """What runs steps in which nobody takes part."""

    @property
    def devices(self) -> EngineArrays:
        """The arrays."""
        ...

    def run_idle(self, step: IdleStep, *, only_compiles: bool = False) -> None:
        """Runs a step, or begins to compile its program."""


class CompileLines:
    """Lines on stderr; see `Progress`.

    Attributes:
      knows_all: nothing is said any more, as all programs are there, or nothing is to be said.
    """

    def __init__(self, *, shown: bool) -> None:
        """No program is compiled yet.

        Args:
          shown: whether anything is said.
        """
        self._shown = shown
        self._known: set[tuple[object, ...]] = set()
        self._known_draws: set[bool] = set()
        self.knows_all = not shown

    def of_first(
        self, plan: StepPlan, options: Mapping[str, Any], steps: Callable[[], Sequence[IdleStep]]
    ) -> contextlib.AbstractContextManager[object]:
        """For a launch, which compiles its program if it is the first of it.

        Args:
          plan: the step.
          options: those of the launch.
          steps: gives those of all programs that there can be.
        """
        key = plan.size, plan.num_steps, plan.upper_size, *(options[name] for name in _OF_PROGRAMS)
        if key in self._known:
            return contextlib.nullcontext()
        self._known.add(key)
        most = len(steps())
        place = f"{len(self._known)} of {'at most ' * (most > 1)}{most}"
        return _of_one(f"compiling program {place} ({name_of(plan)})")

    def of_draws(self, *, is_simple: bool) -> contextlib.AbstractContextManager[object]:
        """For draws that are launched apart from their trunk; the same."""
        if is_simple in self._known_draws:
            return contextlib.nullcontext()
        self._known_draws.add(is_simple)
        return _of_one(f"compiling {'simple' * is_simple or 'all kinds of'} draws")

    def run_all(
        self, runner: RunsIdle, steps: Sequence[IdleStep], jobs: Sequence[Job]
    ) -> list[tuple[str, float]]:
        """Compiles the programs of steps side by side, and then runs every job once.

        Compiling takes nearly all of the time. Each of the two has lines of its own.

        Args:
          runner: what runs them.
          steps: those of all programs.
          jobs: all there is to run, steps among them.

        Returns:
          Names and seconds of each, from when it was begun; those of steps overlap.
        """
        devices, times = runner.devices, []
        told: dict[str, Any] = {"shown": self._shown, "has_bar": False, "tells_left": False}
        with Progress(len(steps), unit="program", doing="compiling", **told) as bar:
            try:
                for step in steps:
                    bar.begin(step.name)
                    devices.when_compiled = functools.partial(bar.add, name=step.name)
                    runner.run_idle(step, only_compiles=True)
            finally:  # none is left for the next call
                seconds = devices.finish_compiling()
        compiled = dict(zip((step.name for step in steps), seconds, strict=True))
        with Progress(len(jobs), unit="part", doing="starting", **told) as bar:
            for name, job in jobs:
                bar.begin(name)
                started = time.perf_counter()
                job()
                jax.block_until_ready((devices.cache, devices.store))
                times.append((name, compiled.get(name, 0.0) + time.perf_counter() - started))
                bar.add(name=name)
        self.knows_all = True
        return times


def _of_one(doing: str) -> Progress:
    return Progress(1, unit="program", doing=doing, has_bar=False)
