"""What is an error when tests are collected."""

import types

import jax
import numpy as np
import pytest

from helpers import compiles_nothing
from helpers.arrays import on_device, ones, zeros


@pytest.fixture
def watch():
    found = compiles_nothing.Watch()
    yield found
    jax.monitoring.unregister_event_duration_listener(found._count)


def collected(watch, module, outcome="passed"):
    """The report of a module whose import is that function."""
    hook = watch.pytest_make_collect_report(types.SimpleNamespace(nodeid="tests/test_one.py"))
    next(hook)
    module()
    passed = outcome == "passed"
    report = types.SimpleNamespace(outcome=outcome, passed=passed, longrepr=None)
    with pytest.raises(StopIteration) as stopped:
        hook.send(report)
    return stopped.value.value


def compile_two():
    for scale in (2, 3):
        jax.jit(lambda x, scale=scale: x * scale)(np.ones(7, np.float32))


def test_a_module_that_compiles_when_it_is_imported_is_named(watch):
    report = collected(watch, compile_two)
    assert report.outcome == "failed"
    assert report.longrepr.startswith("tests/test_one.py compiles 2 programs while it is imported")
    assert collected(watch, lambda: None).outcome == "passed"


def test_another_error_of_a_module_stays_what_it_was(watch):
    report = collected(watch, compile_two, outcome="failed")
    assert (report.outcome, report.longrepr) == ("failed", None)


def test_arrays_come_to_a_device_without_a_program(watch):
    made = [ones((3, 53)), zeros(59, np.int32), on_device(np.arange(61), np.float32)]
    assert watch.compiled == 0
    assert [one.dtype for one in made] == [np.float32, np.int32, np.float32]
    assert all(isinstance(one, jax.Array) for one in made)
    assert ones((3, 53)).sum() == 3 * 53
    assert watch.compiled > 0
