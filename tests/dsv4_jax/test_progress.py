"""A bar on a terminal, elsewhere a line now and then, and one default for all that load."""

import inspect
import io
import itertools
import threading
import types

import pytest

import dsv4_jax as ds
from dsv4_jax import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run(clock, *, shown=True):
    with progress.Progress(1000, unit="tensor", doing="loading", shown=shown) as bar:
        for _ in range(10):
            clock[0] += 3
            bar.add(100)


def test_without_a_terminal_there_is_a_line_now_and_then(clock, capsys):
    run(clock)
    assert capsys.readouterr().err.splitlines() == [
        "loading: 100 of 1,000 tensors after 3 s",
        "loading: 300 of 1,000 tensors after 9 s, some 21 s left",
        "loading: 500 of 1,000 tensors after 15 s, some 15 s left",
        "loading: 700 of 1,000 tensors after 21 s, some 9 s left",
        "loading: 900 of 1,000 tensors after 27 s, some 3 s left",
    ]
    run(clock, shown=False)
    assert capsys.readouterr().err == ""


def test_the_first_unit_may_compile_and_is_no_measure_of_the_others(clock, capsys):
    """It takes 60 s and each other one 2 s."""
    with progress.Progress(20, unit="row", doing="loss", compiles=True) as bar:
        for seconds in (60, 2, 2, 2, 2, 2, 2, 2, 2):
            clock[0] += seconds / 2
            bar.add(0)
            clock[0] += seconds / 2
            bar.add()
    assert capsys.readouterr().err.splitlines() == [
        "loss: compiling, 30 s",
        "loss: 1 of 20 rows after 60 s",
        "loss: 3 of 20 rows after 65 s, some 33 s left",
        "loss: 6 of 20 rows after 70 s, some 28 s left",
        "loss: 8 of 20 rows after 75 s, some 23 s left",
    ]


def test_the_time_that_is_left_falls_while_a_unit_takes_long(clock, capsys):
    """And none is told where it takes longer than all were expected to."""
    with progress.Progress(5, unit="cell", doing="sweep") as bar:
        for count, seconds in ((1, 10), (1, 20), (0, 15), (0, 15), (0, 15), (0, 16), (1, 0)):
            clock[0] += seconds
            bar.add(count)
    assert capsys.readouterr().err.splitlines() == [
        "sweep: 1 of 5 cells after 10 s",
        "sweep: 2 of 5 cells after 30 s, some 60 s left",
        "sweep: 2 of 5 cells after 45 s, some 45 s left",
        "sweep: 2 of 5 cells after 60 s, some 30 s left",
        "sweep: 2 of 5 cells after 75 s, some 15 s left",
        "sweep: 2 of 5 cells after 91 s",
    ]


def test_what_is_under_way_is_named_with_its_number(clock, capsys):
    """Programs take any time, so that none is told that is left."""
    with progress.Progress(4, unit="program", doing="compiling", tells_left=False) as bar:
        bar.begin("step of 24 tokens")
        clock[0] += 4
        bar.add(0)
        bar.begin("decode step")
        clock[0] += 5
        bar.add(0)
        bar.add(name="step of 24 tokens")
        clock[0] += 5
        bar.add(0)
        bar.add(name="decode step")
        bar.begin("tables")
        clock[0] += 5
        bar.add(name="tables")
    assert capsys.readouterr().err.splitlines() == [
        "compiling program 1 of 4 (step of 24 tokens): 4 s",
        "compiling programs 1 to 2 of 4: 9 s",
        "compiling program 2 of 4 (decode step): 14 s in all",
        "compiling: 3 of 4 programs after 19 s",
    ]


def test_lines_of_a_work_of_hours_come_less_often(clock, capsys):
    with progress.Progress(10_000, unit="tensor", doing="loading") as bar:
        for _ in range(1200):
            clock[0] += 1
            bar.add()
    seconds = [int(line.split()[6]) for line in capsys.readouterr().err.splitlines()]
    gaps = [after - before for before, after in itertools.pairwise(seconds)]
    assert gaps == [5] * 120 + [30] * 19


def test_lines_come_while_a_unit_takes_long(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_TICK_S", 0.001)
    told = threading.Event()
    monkeypatch.setattr(progress, "say", lambda text: (print(text), told.set()))
    with progress.Progress(2, unit="program", doing="compiling") as bar:
        clock[0] += 2.9
        assert not told.wait(0.05)
        for seconds in (0.2, 5):
            clock[0] += seconds
            assert told.wait(10)
            told.clear()
        bar.end()
        clock[0] += 100
        assert not told.wait(0.05)
    assert capsys.readouterr().out.splitlines() == [
        "compiling: 0 of 2 programs after 3 s",
        "compiling: 0 of 2 programs after 8 s",
    ]
    with progress.Progress(1, unit="program", doing="compiling") as bar:
        clock[0] += 4
        assert told.wait(10)
    assert capsys.readouterr().out == "compiling: 4 s\n"
    assert not [one for one in threading.enumerate() if one.name == "progress of compiling"]


def test_a_terminal_shows_a_bar(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    run(clock)
    shown = terminal.getvalue()
    assert "loading: 100%" in shown
    assert "1000/1000" in shown
    assert "\n" not in shown.rstrip("\n")


def test_whatever_loads_shows_it_unless_told_otherwise():
    functions = (
        ds.load_checkpoint,
        ds.Engine.from_checkpoint,
        ds.checkpoint.convert_checkpoint,
        ds.checkpoint.find_checkpoint,
    )
    assert {inspect.signature(f).parameters["progress"].default for f in functions} == {True}
