"""Grammars are compiled within bounds of time and memory, in a process that a bound may end."""

import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from dsv4_jax.schemas.json_values import json_value
from dsv4_jax.schemas.read_schema import Schema
from dsv4_jax.serving.requests import compile_grammar, grammar_trials, helper_processes
from dsv4_jax.serving.requests.grammar_trials import GrammarBounds, GrammarTrials
from dsv4_jax.serving.requests.helper_processes import HelperKilledError, HelpersClosedError
from helpers import slow
from helpers.serving import byte_tokenizer, until

pytestmark = pytest.mark.usefixtures("interrupts_arrive")

GOOD = "start: /[a-z]{30}/"
END, VOCAB = 257, 260


def grammar(schema):
    """A grammar of a schema as it is: what refuses costly ones beforehand is left out."""
    return f"start: {json_value(Schema(schema, {}))}"


ENDLESS = grammar(
    {"allOf": [{"type": "integer", "multipleOf": 60_013}, {"type": "integer", "multipleOf": 999}]}
)
LARGE = grammar({"type": "integer", "multipleOf": 604_800})


def make(**bounds):
    return GrammarTrials(byte_tokenizer().to_str(), VOCAB, [END], GrammarBounds(**bounds))


@pytest.fixture
def trials():
    made = make(seconds=0.3)
    yield made
    made.close()


def test_a_grammar_that_compiles_passes_and_is_not_tried_again(trials, monkeypatch):
    trials.check(GOOD)
    monkeypatch.setattr(trials, "_try", None)
    trials.check(GOOD)
    with pytest.raises(TypeError):
        trials.check(GOOD + "?")


@pytest.mark.parametrize(
    ("text", "told"),
    [("start: )", "expecting rule"), ("start: T\nT: /a/ & /b/", "nothing fulfils")],
)
def test_what_is_wrong_with_one_is_said_as_where_it_is_compiled_here(trials, text, told):
    vocabulary = compile_grammar.read_vocabulary(byte_tokenizer().to_str(), VOCAB, [END])
    compiler = compile_grammar.Compiler(vocabulary)
    with pytest.raises(ValueError, match=told) as expected:
        compiler.compile(text)
    with pytest.raises(ValueError, match=told) as error:
        trials.check(text)
    assert str(error.value) == str(expected.value)


def test_time_is_bounded_and_the_next_grammar_is_compiled(trials):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^it must compile within 0.3 s of a processor; ask"):
            trials.check(ENDLESS)
        trials.check(GOOD + "?")


def test_memory_is_bounded_and_the_next_grammar_is_compiled():
    trials = make(seconds=60, memory_bytes=16 * 2**20)
    with pytest.raises(ValueError, match=r"^it must compile within 16 MiB of memory; ask"):
        trials.check(LARGE)
    trials.check(GOOD)
    trials.close()


def test_so_many_at_once_and_not_more():
    trials, running, most = make(at_once=2), [0], []
    lock, try_one = threading.Lock(), trials._try

    def count(text):
        with lock:
            running[0] += 1
            most.append(running[0])
        time.sleep(0.02)
        try:
            return try_one(text)
        finally:
            with lock:
                running[0] -= 1

    trials._try = count
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        list(threads.map(trials.check, [f"start: /a{{{n}}}/" for n in range(1, 13)]))
    assert max(most) == 2
    assert len(trials._helpers.idle) == 2
    trials.close()


def test_a_process_that_was_ended_is_replaced(trials):
    trials.check(GOOD)
    (helper,) = trials._helpers.idle
    helper.process.kill()
    helper.process.wait()
    trials.check(GOOD + "?")
    assert trials._helpers.idle != [helper]


def test_a_process_that_was_started_before_takes_the_first_grammar(trials):
    trials.prepare()
    (helper,) = trials._helpers.idle
    trials.check(GOOD)
    assert trials._helpers.idle == [helper]


def test_nothing_is_left_after_its_end(trials):
    trials.check(GOOD)
    (helper,) = trials._helpers.idle
    trials.close()
    assert helper.process.poll() is not None
    assert not trials._helpers.idle


def test_its_end_waits_for_no_grammar():
    trials = make(seconds=60, memory_bytes=2**32)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        compiling = threads.submit(trials.check, ENDLESS)
        until(lambda: trials._helpers.living)
        trials.close()
        with pytest.raises(HelpersClosedError):
            compiling.result(20)
    assert not trials._helpers.living
    for call in (trials.prepare, lambda: trials.check(GOOD)):
        with pytest.raises(HelpersClosedError):
            call()
    assert not trials._helpers.living


def processor_seconds(pid):
    """What a process has taken of a processor, outside of the kernel."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("number", slow.all_but([signal.SIGKILL], [signal.SIGKILL, signal.SIGQUIT]))
def test_a_process_that_others_end_is_no_fault_of_a_grammar(number, request):
    """As a kernel does that is out of memory; the bound of time is the process's own."""
    if number == signal.SIGQUIT:  # a shell starts what runs in the background without it
        before = signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, before))
    trials = make(seconds=60, memory_bytes=2**32)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        trials.check(GOOD)  # it has been started
        (helper,) = trials._helpers.idle
        before_s = processor_seconds(helper.process.pid)
        compiling = threads.submit(trials.check, ENDLESS)
        # One that ends before it has begun is replaced, and the grammar compiled to its end.
        until(lambda: processor_seconds(helper.process.pid) > before_s + 0.1)
        helper.process.send_signal(number)
        told = f"that compiles grammars was ended from outside, with signal {number.value}, .*again"
        with pytest.raises(HelperKilledError, match=told):
            compiling.result(20)
    trials.check(GOOD + "?")
    trials.close()


@pytest.mark.slow
def test_a_process_that_waits_beyond_all_patience_went_beyond_the_bound_of_time(monkeypatch):
    """It is killed, too, and by the server: its own timer counts the time of the processor."""
    monkeypatch.setattr(helper_processes, "START_S", 1)
    monkeypatch.setattr(grammar_trials, "_PATIENCE", 0.01)
    trials = make(seconds=60, memory_bytes=2**32)
    with pytest.raises(ValueError, match=r"^it must compile within 60 s of a processor; ask"):
        trials.check(ENDLESS)
    trials.close()


def test_the_memory_that_a_grammar_holds_is_told_and_remembered(trials):
    """Whatever was compiled in the process before, whose memory is used again."""
    small, large = (grammar({"type": "integer", "multipleOf": n}) for n in (7, 1200))
    held = [trials.check(text) for text in (large, small, large + "\n", small + "\n")]
    assert 2**18 < held[0] < 2**24
    assert held[2] == pytest.approx(held[0], rel=0.2)
    assert max(held[1], held[3]) < held[0] / 4
    assert trials.check(large) == held[0]


@pytest.mark.parametrize("number", slow.all_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_to_all_processes_of_a_server_leaves_its_grammars_to_it(trials, number):
    """Such as that of a service's manager: the server drains, and needs the process until then."""
    trials.check(GOOD)
    (helper,) = trials._helpers.idle
    helper.process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        helper.process.wait(0.2)
    trials.check(GOOD + "?")
    assert trials._helpers.idle == [helper]


def test_a_program_that_cannot_run_is_no_fault_of_a_grammar(trials, tmp_path, monkeypatch):
    """It looks for libraries where this process does, whatever has been added since its start."""
    (tmp_path / "llguidance.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"ended with status 1; see why .*compile_grammar.py"):
        trials.check(GOOD)
    monkeypatch.undo()
    trials.check(GOOD)


def test_a_process_that_a_bound_ends_leaves_no_memory_on_disk(trials):
    trials.check(GOOD)
    (helper,) = trials._helpers.idle
    limits = pathlib.Path(f"/proc/{helper.process.pid}/limits")
    if not limits.exists():
        pytest.skip("there is no /proc here")
    assert re.search(r"Max core file size +0 +0 ", limits.read_text())


def test_the_process_ends_with_the_one_that_started_it(trials):
    """Its input ends then, whatever ended it."""
    trials.check(GOOD)
    (helper,) = trials._helpers.idle
    helper.connection.close()
    assert helper.process.wait(20) == 0


KILLED = """
import json, sys
from dsv4_jax.serving.requests.grammar_trials import GrammarBounds, GrammarTrials
vocabulary, grammar = json.loads(sys.stdin.readline())
trials = GrammarTrials(*vocabulary, GrammarBounds(seconds=2.0))
trials.prepare()
(helper,) = trials._helpers.idle
print(helper.process.pid, flush=True)
trials.check(grammar)
"""


def seconds_of(pid):
    """Of a processor, that a process has used; None where there is none that runs."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None if fields[0] == "Z" else used


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="there is no /proc here")
@pytest.mark.slow
def test_who_is_killed_while_a_grammar_compiles_leaves_no_process():
    """In the middle of one nothing reads the input that has ended; the bound on time does it."""
    given = json.dumps([[byte_tokenizer().to_str(), VOCAB, [END]], ENDLESS])
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdin.write(given + "\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        started = seconds_of(pid)
        until(lambda: seconds_of(pid) > started + 0.3)
        process.kill()
    until(lambda: seconds_of(pid) is None)


def test_the_program_imports_llguidance_and_numpy_alone(trials):
    """So that it starts in a moment, and takes no memory of a device."""
    trials.check(GOOD)
    (helper,) = trials._helpers.idle
    maps = pathlib.Path(f"/proc/{helper.process.pid}/maps")
    if not maps.exists():
        pytest.skip("there is no /proc here")
    loaded = maps.read_text()
    assert "llguidance" in loaded
    assert "jaxlib" not in loaded
