"""A bar on a terminal, elsewhere a line now and then, and one default for all that load."""

import inspect
import io
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
        "loading: 200 of 1,000 tensors after 6 s",
        "loading: 700 of 1,000 tensors after 21 s",
    ]
    run(clock, shown=False)
    assert capsys.readouterr().err == ""


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
