"""Processes that watch each other: in one, and with four CPU devices in several."""

import argparse
import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest

from dsv4_jax import hosts
from dsv4_jax.cache.slot_changes import SlotChanges
from dsv4_jax.serving.device import engine_arrays, host_calls
from helpers import gpu_processes, serving
from tools.meshes import engine, engine_of_processes, models

TIMEOUT_S = 0.4


class Service:
    """Keys and values that threads share, in place of those of JAX's coordination service."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    key_value_set_bytes = key_value_set

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        del timeout_in_ms
        if key not in self.values:
            time.sleep(0.01)
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: not yet")
        return self.values[key]

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in list(self.values.items()) if key in name]

    def key_value_delete(self, key):
        del self.values[key]


@pytest.fixture
def pair(monkeypatch):
    """Two processes in one; what they say when they end."""
    said = []
    monkeypatch.setattr(hosts.Hosts, "end", lambda self, text: (said.append(text), self.leave()))
    monkeypatch.setattr(hosts.atexit, "register", lambda _: None)
    service = Service()
    both = [hosts.Hosts(service, number, 2, TIMEOUT_S) for number in range(2)]
    yield *both, said
    for one in both:
        one.leave()


def wait_for(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_what_is_told_is_heard_in_order(pair):
    first, second, said = pair
    heard = []
    listener = threading.Thread(target=lambda: heard.extend(second.listen() for _ in range(100)))
    listener.start()
    for number in range(100):
        first.tell(b"%d" % number)
        wait_for(lambda number=number: len(heard) > number)
    listener.join()
    assert heard == [b"%d" % number for number in range(100)]
    time.sleep(2 * TIMEOUT_S)
    assert said == []  # and nobody was silent


def test_processes_agree_on_what_the_first_has(pair, monkeypatch):
    assert hosts.agree(7) == 7  # alone
    found = []
    for one, values in zip(pair, ((3, True), (9, False)), strict=False):
        monkeypatch.setattr(hosts, "joined", lambda one=one: one)
        found.append([hosts.agree(value) for value in values])
    assert found == [[3, True]] * 2
    assert [type(value) for value in found[1]] == [int, bool]


def test_who_comes_first_waits_for_the_others(pair, monkeypatch):
    hosts.meet()  # alone
    first, second, said = pair
    came = []
    for number in range(2):  # more than once
        monkeypatch.setattr(hosts, "joined", lambda: first)
        waiting = threading.Thread(target=lambda: (hosts.meet(), came.append(len(came))))
        waiting.start()
        time.sleep(1.5 * TIMEOUT_S)  # its beat goes on meanwhile
        assert waiting.is_alive()
        second.meet()
        waiting.join(10)
        assert came == list(range(number + 1))
    assert said == []


def test_what_another_process_answers_is_heard_in_order(pair):
    first, second, said = pair
    for number in range(3):
        second.answer(b"%d" % number)
    heard = [first.hear_answer(1) for _ in range(3)]
    assert heard == [b"0", b"1", b"2"]
    assert not [key for key in first._service.values if "answer" in key]  # nothing is left
    threading.Timer(0.05, lambda: second.answer(b"3")).start()
    assert first.hear_answer(1) == b"3"
    threading.Timer(0.05, first.leave).start()
    assert first.hear_answer(1) is None
    assert said == []


def test_all_know_what_each_of_them_gives(pair):
    both = pair[:2]
    for value in (3, 9):  # more than once
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            given = [value, value + 1]
            found = list(threads.map(hosts.Hosts.share, both, given))
        assert found == [given, given]


def test_who_waits_for_what_a_process_that_has_left_would_give_ends(pair, monkeypatch):
    first, second, _ = pair

    def end(self, message):
        raise SystemExit(message)

    monkeypatch.setattr(hosts.Hosts, "end", end)
    second.leave()
    with pytest.raises(SystemExit, match="process 1 has left, and does not come here"):
        first.share(1)


def test_a_process_that_is_silent_is_named(pair):
    _, second, said = pair
    second._left.set()  # without a word
    wait_for(lambda: said)
    assert said == [f"process 1 is silent for {TIMEOUT_S:g} s"]


def test_a_process_that_leaves_is_not_missed(pair):
    _, second, said = pair
    second.leave()
    time.sleep(3 * TIMEOUT_S)
    assert said == []


def test_a_process_that_does_not_finish_a_call_is_named(pair):
    first, second, said = pair
    with second.call(is_new=True):
        pass
    with first.call(is_new=True):
        time.sleep(3 * TIMEOUT_S)  # compiling takes its time
    assert said == []
    with first.call(is_new=False):
        wait_for(lambda: said)
    assert said[0].endswith("process 1 is behind the others")


def test_one_that_compiles_is_waited_for(pair):
    """Another, which had the program, is in the next call already."""
    first, second, said = pair
    with second.call(is_new=True), first.call(is_new=False):
        time.sleep(4 * TIMEOUT_S)
    assert said == []


def test_of_those_that_wait_the_one_that_has_not_come_so_far_is_named(monkeypatch):
    monkeypatch.setattr(hosts.Hosts, "end", lambda self, _: self._left.set())
    monkeypatch.setattr(hosts.atexit, "register", lambda _: None)
    service = Service()
    three = [hosts.Hosts(service, number, 3, TIMEOUT_S) for number in range(3)]
    with contextlib.ExitStack() as stack:
        for one in three:
            stack.callback(one.leave)
            stack.enter_context(one.call(is_new=False))
        for number in (0, 2):
            three[number].waits()
        wait_for(lambda: all(one._behind(1) == [1] for one in three))


def test_an_error_in_a_call_ends_the_process(pair):
    first, _, said = pair
    with first.call(is_new=False):
        raise ValueError("no more memory")
    assert said[-1] == "ValueError: no more memory"


def test_a_process_ends_by_sigterm():
    code = "from dsv4_jax.hosts import join_hosts; import sys, time; "
    code += "join_hosts('127.0.0.1:' + sys.argv[1], 1, 0); print('joined', flush=True); "
    command = [sys.executable, "-c", code + "time.sleep(60)", str(gpu_processes.free_port())]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "joined\n"
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1", 2, None), "give coordinator, num_processes and process_id, or none of them"),
        (("a", 2, 0), "coordinator must be an address and a port"),
        (("a:1", 0, 0), "num_processes must be at least 1"),
        (("a:1", 2, 2), "process_id must be at most 1|process_id must be .*0.*1"),
    ],
)
def test_what_names_no_processes_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        hosts.join_hosts(*given)
    assert hosts.joined() is None


def test_a_call_goes_through_bytes_unchanged():
    width = 3
    changes = SlotChanges(**{
        name: np.arange(4, dtype=np.int32) for name in
        ("slots", "length_tokens", "copy_from", "copy_to", "block_from", "block_to", "load_slots",
         "load_places", "load_ends")
    }, block_table=np.ones((4, width), np.int32))  # fmt: skip
    name, (found, moves), options = host_calls.unpack(
        host_calls.pack(engine_arrays.EngineArrays.change.__name__, changes, True)
    )
    assert (name, moves, options) == ("change", True, {})
    assert isinstance(found, SlotChanges)
    assert found.freed_slots is None
    assert jax.tree.all(jax.tree.map(np.array_equal, found, changes))


def test_plain_values_keep_their_order():
    values, options = [None, True, "fp8", *range(10)], {"back": 1, "activations": "fp8"}
    told = host_calls.pack("read", *values, **options)
    assert host_calls.unpack(told) == ("read", values, options)


def test_a_call_that_is_no_call_of_all_processes_cannot_be_told():
    assert {"launch", "read", "change", "rebuild"} < host_calls.CALLS.keys()
    assert not host_calls.CALLS.keys() & {"follow", "stop", "__init__"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "mesh", "split"),
    [(1, "2x2", False), (2, "2x2", False), (4, "2x2", False), (2, "4x1", False), (2, "1x4", True)],
)
def test_tokens_do_not_depend_on_where_devices_lie(count, mesh, split):
    found = [engine_of_processes.run(number, mesh, split=split) for number in (count, 1)]
    for those in found:
        assert [one["status"] for one in those] == [0] * len(those), those
    several, alone = [engine_of_processes.result(those) for those in found]
    assert several == alone
    assert alone["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(1, "2x2"), (2, "2x2"), (1, "1x4")])
def test_calls_of_several_steps_give_the_tokens_of_single_steps(count, mesh):
    found = [
        engine_of_processes.result(engine_of_processes.run(number, mesh, steps=steps))
        for number, steps in ((count, 4), (1, 1))
    ]
    assert found[0] == found[1]
    assert found[0]["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "how", "said"),
    [
        (1, "kill", "process 0 ends: process 1 is silent for 10 s"),
        (1, "stop", "process 0 ends: process 1 is silent for 10 s"),
        (1, "hang", "a step has not ended for 20 s; process 1 is behind the others"),
        (0, "stop", "process 1 ends: process 0 is silent for 10 s"),
        (0, "kill", "the leader task was preempted/died"),  # in JAX's own words
    ],
)
def test_one_that_is_lost_ends_the_others(lost, how, said):
    found = engine_of_processes.run(2, "2x2", lost, how)
    other = found[1 - lost]
    assert said in other["err"]
    assert other["status"] != 0
    assert other["seconds"] < 4 * engine_of_processes.TIMEOUT_S
    assert "tokens" not in other["out"]  # nothing is half-answered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "process 2 is silent for 10 s"),
        ("hang", "a step has not ended for 20 s; process 2 is behind the others"),
    ],
)
def test_one_of_four_that_is_lost_ends_all_others(how, said):
    found = engine_of_processes.run(4, "2x2", 2, how)
    others = [one for number, one in enumerate(found) if number != 2]
    assert any(said in other["err"] for other in others), others
    for other in others:
        assert other["status"] != 0
        assert other["seconds"] < 5 * engine_of_processes.TIMEOUT_S
        assert "tokens" not in other["out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "weights"), [({"data": 2}, "released"), ({"model": 2}, "bfloat16")]
)
def test_a_benchmark_of_two_processes_reports_once(tmp_path, mesh, weights):
    """Each makes its own part of the weights, and as many calls as the first."""
    address = f"127.0.0.1:{gpu_processes.free_port()}"
    [(axis, size)] = mesh.items()
    command = [
        *(sys.executable, "-m", "dsv4_jax", "bench", "decode", "tiny"),
        *(
            "--points",
            "2@256",
            "--parts",
            "step,loop",
            f"--{axis}",
            str(size),
            "--part-limit-s",
            "2",
        ),
        *("--weights", weights, "--coordinator", address, "--num-processes", "2"),
    ]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [*command, "--process-id", str(number), "--json", str(tmp_path / f"{number}.json")],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [one.communicate(timeout=300)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [0, 0]
    assert "ms/step" in said[0]
    assert "ms/step" not in said[1]
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    [row] = json.loads((tmp_path / "0.json").read_text())["rows"]
    assert row["finite"]
    assert 0 < row["loop_ms_least"] <= row["loop_ms"] <= row["loop_ms_most"]
    assert {name: row[name] for name in mesh} == mesh


def test_an_engine_of_processes_on_gpus_has_released_shapes(monkeypatch):
    """Up to where it would be made."""
    made = mock.create_autospec(models.model, return_value=("config", "params"))
    make_engine = mock.Mock(side_effect=InterruptedError)
    for owner, name, value in (
        (models, "model", made),
        (serving, "CONFIG", None),
        (serving, "params", None),
        (engine, "OPTIONS", {}),
        (engine, "engine_on", make_engine),
        (engine_of_processes, "mesh_of", str),
    ):
        monkeypatch.setattr(owner, name, value)
    asked = {"process": (0, 1, 0), "gpus": True, "split": False, "steps": 0, "mesh": "1x4"}
    with pytest.raises(InterruptedError):
        engine_of_processes.be_one(argparse.Namespace(lost=-1, how="kill", **asked))
    assert (serving.CONFIG, serving.params()) == ("config", "params")
    made.assert_called_once_with("v4", tiny=False)
    make_engine.assert_called_once_with("1x4")
