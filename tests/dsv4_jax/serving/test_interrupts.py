"""Interrupts at any line, calls from a second thread, and streams that are dropped.

All runs are steps of one program, so that equal means equal to the bit.
"""

import functools
import gc
import random
import signal
import threading
import time

import numpy as np
import pytest

from dsv4_jax.serving import runner
from helpers.interrupts import Failure, Interrupt, Life, Lines, may_raise, scarce_engine, truth
from helpers.serving import make_engine, prompt, run_to_end


@functools.cache
def undisturbed():
    """An engine, the answers of its first life, and how often each line ran in a second one."""
    engine, lines = scarce_engine(), Lines()
    answers = Life(engine, lines).run()
    lines.counts.clear()
    assert Life(engine, lines).run() == answers
    return engine, answers, dict(lines.counts)


def disturbed(chosen, error=Interrupt):
    """Lives with interrupts at chosen lines, {line: which time}; the lines that raised."""
    engine, answers, _ = undisturbed()
    lines = Lines(lambda line, count: chosen.get(line) == count and may_raise(line, count), error)
    assert Life(engine, lines).run() == answers
    return set(lines.raised)


def is_a_tokenizer_error(line):
    """What is raised while a token is added is taken for its request's own error."""
    return line.function.startswith(("Request.add", "TextStream"))


def test_a_life_has_all_that_happens_to_requests():
    engine, answers, counts = undisturbed()
    metrics = engine.metrics
    assert min(metrics.preempted, metrics.evicted_blocks, metrics.evicted_snapshots) > 0
    assert min(metrics.drafted_tokens, metrics.hit_tokens, metrics.finished["cancelled"]) > 0
    assert len({(line.file, line.function) for line in counts}) > 140
    assert answers["fork"] == answers["cold"]


def test_an_interrupt_in_any_function_changes_no_token():
    """One line of each, the first time it runs."""
    rng, functions = random.Random(0), {}
    for line in sorted(undisturbed()[2]):
        functions.setdefault((line.file, line.function), []).append(line)
    chosen = {rng.choice(lines): 1 for lines in functions.values()}
    raised = disturbed(chosen)
    assert len(raised) > 0.95 * len(chosen)


def test_an_error_in_any_function_changes_no_token():
    """Of a signal's handler, say; what the engine catches by itself must not hide it."""
    lines = [line for line in sorted(undisturbed()[2]) if not is_a_tokenizer_error(line)]
    files = ("request_queue.py", "loop.py", "manager.py")
    chosen = dict.fromkeys([line for line in lines if line.file in files][::12], 1)
    assert len(disturbed(chosen, Failure)) > 0.9 * len(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("error", [Interrupt, Failure])
def test_an_interrupt_at_any_line_changes_no_token(error):
    """Every line: the first time that it runs, the middle one, and the last."""
    counts, tried, missed = undisturbed()[2], 0, 0
    rng = random.Random(1)
    for place in (0.0, 0.5, 1.0):
        lines = sorted(counts)
        if error is Failure:
            lines = [line for line in lines if not is_a_tokenizer_error(line)]
        rng.shuffle(lines)
        for start in range(0, len(lines), 20):
            chosen = {
                line: 1 + int(place * (counts[line] - 1)) for line in lines[start : start + 20]
            }
            tried += len(chosen)
            missed += len(chosen) - len(disturbed(chosen, error))
    print(f"\n{tried} lines, {tried - missed} interrupts")
    assert missed < 0.1 * tried
