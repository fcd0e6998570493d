"""What a step costs the host while all requests decode: calls of ours, and frames to the program.

A number that no test holds comes back. The bounds are what was reached, and lower is welcome.
"""

import collections
import functools
import pathlib
import sys

import pytest

import dsv4_jax as ds
from helpers.serving import single_steps

pytestmark = [pytest.mark.unoptimised, pytest.mark.slow]

PACKAGE = str(pathlib.Path(ds.__file__).parent)
CALLS, FRAMES = 106, 8


@functools.cache
def decoding_engine():
    """In which all requests decode, far from the ends of blocks, with a step in flight."""
    engine = single_steps()
    for seed in range(3):
        engine.submit([1 + seed], max_new_tokens=100, stop_token_ids=(), seed=seed)
    for _ in range(6):
        engine.step()
    return engine


def calls_of_a_step(engine):
    """Functions of the package that a step calls, generated methods of its dataclasses included."""
    calls = collections.Counter()

    def note(frame, event, _):
        code = frame.f_code
        is_generated = code.co_filename == "<string>"
        if event == "call" and (is_generated or code.co_filename.startswith(PACKAGE)):
            calls[code.co_qualname] += 1

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    # Where other engines ran before, jax may compare two keys of programs in one look-up.
    calls.pop("__create_fn__.<locals>.__eq__", None)
    return calls


def test_a_steady_step_makes_few_calls_on_the_host():
    engine = decoding_engine()
    for _ in range(3):
        calls = calls_of_a_step(engine)
        assert calls["EngineArrays.launch"] == calls["EngineArrays.read"] == 1
        assert calls.total() <= CALLS, calls.most_common()
    assert engine.metrics.running == 3
    assert not any("auges" in name for name in calls)  # to look is not among them


def test_few_frames_lie_between_a_step_and_its_program(monkeypatch):
    engine, depths = decoding_engine(), []
    arrays = engine.loop.runner.devices
    launcher = arrays.launcher

    def note(program, *arguments, **static):
        frame, names = sys._getframe(1), []
        while frame.f_code is not test_few_frames_lie_between_a_step_and_its_program.__code__:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        depths.append(names)
        return launcher(program, *arguments, **static)

    monkeypatch.setattr(arrays, "launcher", note)
    engine.step()
    [names] = depths
    assert "EngineCore.step" in names
    assert len(names) + 1 <= FRAMES, names  # the launcher's own is one
