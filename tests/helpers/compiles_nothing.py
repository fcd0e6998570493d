"""A module of tests that compiles while it is imported is an error of its collection.

Every worker of a run imports all modules, so that each would compile the same programs.
"""

import jax
import pytest

EVENT = "/jax/core/compile/backend_compile_duration"


class Watch:
    """A plugin of pytest, from when it is made."""

    def __init__(self):
        self.compiled = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event, _, **__):
        self.compiled += event == EVENT

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        before = self.compiled
        report = yield
        if (count := self.compiled - before) and report.passed:
            report.outcome = "failed"
            report.longrepr = (
                f"{collector.nodeid} compiles {count} programs while it is imported: make arrays "
                "by helpers/arrays.py or NumPy, and what is computed a fixture"
            )
        return report
