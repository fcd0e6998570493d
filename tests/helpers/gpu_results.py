"""A pytest plugin that keeps the outcome of a GPU run: its device, date, jax version and counts.

The environment variable DSV4_GPU_RESULTS is the path of the file. The rows of benchmarks in it are
left alone.
"""

import collections
import os

from dsv4_jax.bench.results import describe_device, read_json, write_json

VARIABLE = "DSV4_GPU_RESULTS"


class Counts:
    """Counts the tests that ran; in a worker of pytest-xdist it counts nothing."""

    def __init__(self):
        self.outcomes = collections.Counter()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    def pytest_sessionfinish(self, session):
        if not hasattr(session.config, "workerinput"):
            counts = {
                outcome: self.outcomes[outcome] for outcome in ("passed", "failed", "skipped")
            }
            path = os.environ[VARIABLE]
            write_json(path, read_json(path) | {"tests": describe_device() | counts})
