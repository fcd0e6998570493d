"""Which program an engine says that it compiles, and of how many."""

import threading
import types

import pytest

from dsv4_jax import progress
from dsv4_jax.serving.device.compile_lines import CompileLines
from dsv4_jax.serving.device.idle_steps import IdleStep, name_of
from dsv4_jax.serving.schedule.scheduler import StepPlan

PROMPTS = StepPlan.idle(24, holds_prompts=True)
DECODES = StepPlan.idle(4, is_plain=True)
STEPS = [IdleStep(name_of(plan), plan) for plan in (PROMPTS, DECODES)]
OPTIONS = {
    "is_plain": False, "only_decodes": False, "is_simple": False,
    "activations": "fp8", "wants_logprobs": False,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by hand, and no line but at a call."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "_TICK_S", 1e6)
    return now


def launch(lines, clock, plan, **options):
    with lines.of_first(plan, OPTIONS | options, lambda: STEPS) as bar:
        clock[0] += 4
        if bar is not None:
            bar.add(0)


def test_the_first_launch_of_a_program_is_told_with_its_number(clock, capsys):
    lines = CompileLines(shown=True)
    for _ in range(2):
        launch(lines, clock, PROMPTS)
        launch(lines, clock, DECODES, is_plain=True)
        launch(lines, clock, DECODES, is_plain=True, wants_logprobs=True)  # is no other program
    assert capsys.readouterr().err.splitlines() == [
        "compiling program 1 of at most 2 (step of 24 tokens): 4 s",
        "compiling program 2 of at most 2 (decode step of 4 tokens): 4 s",
    ]


def test_draws_that_are_launched_apart_are_told_once_of_each_kind(clock, capsys):
    lines = CompileLines(shown=True)
    for is_simple in (True, False, True, False):
        with lines.of_draws(is_simple=is_simple) as bar:
            clock[0] += 4
            if bar is not None:
                bar.add(0)
    assert capsys.readouterr().err.splitlines() == [
        "compiling simple draws: 4 s",
        "compiling all kinds of draws: 4 s",
    ]


class Runner:
    """Compiles the first step while the second is lowered, and the second while `finish` waits."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds
        self.devices = self
        self.cache = self.store = ()
        self.begun = []

    def run_idle(self, step, *, only_compiles=False):
        assert only_compiles
        self.clock[0] += self.seconds
        self.begun.append(self.when_compiled)
        if len(self.begun) == 2:
            thread = threading.Thread(target=self.begun[0])  # as in the pool of compilers
            thread.start()
            thread.join()

    def finish_compiling(self):
        self.clock[0] += self.seconds
        self.begun[1]()
        return [1.0, 2.0]


def run_all(lines, clock):
    def job():
        clock[0] += 6

    jobs = [("tables", job), *((step.name, job) for step in STEPS), ("verification", job)]
    return lines.run_all(Runner(clock, 6), STEPS, jobs)


def test_warmup_tells_the_number_of_each_program_that_takes_long(clock, capsys):
    times = run_all(CompileLines(shown=True), clock)
    assert [name for name, _ in times] == ["tables", *(s.name for s in STEPS), "verification"]
    assert times[1][1] >= 1
    assert times[2][1] >= 2
    assert capsys.readouterr().err.splitlines() == [
        "compiling programs 1 to 2 of 2: 6 s",
        "compiling program 2 of 2 (decode step of 4 tokens): 12 s in all",
        "compiling: 2 of 2 programs after 18 s",
        "starting: 1 of 4 parts after 6 s",
        "starting: 2 of 4 parts after 12 s",
        "starting: 3 of 4 parts after 18 s",
        "starting: 4 of 4 parts after 24 s",
    ]


def test_after_warmup_and_where_nobody_asked_nothing_is_told(clock, capsys):
    lines = CompileLines(shown=True)
    run_all(lines, clock)
    capsys.readouterr()
    assert lines.knows_all  # so that a launch does not ask
    silent = CompileLines(shown=False)
    assert silent.knows_all
    run_all(silent, clock)
    assert capsys.readouterr().err == ""
