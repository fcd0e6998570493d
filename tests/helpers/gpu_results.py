"""A pytest plugin that keeps the outcome of a GPU run: its device, date, jax version and counts.

The path is the environment variable DSV4_GPU_RESULTS. What else the file holds, such as the rows
of benchmarks, stays.
"""

import collections
import datetime
import json
import os
import pathlib

import jax

VARIABLE = "DSV4_GPU_RESULTS"


def read(path):
    """What a path holds; {} where there is nothing."""
    path = pathlib.Path(path)
    return json.loads(path.read_text()) if path.exists() else {}


def update(path, **fields):
    """Sets fields of the results at a path, beside the device, the date and the jax version."""
    results = read(path) | {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
    }
    replace(path, json.dumps(results | fields, indent=1) + "\n")


def replace(path, text):
    """Writes a file whole, so that a run that is cut off leaves the old one or the new one."""
    path = pathlib.Path(path)
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


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
            update(os.environ[VARIABLE], tests=counts)
