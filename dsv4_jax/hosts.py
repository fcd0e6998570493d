"""Several processes on one mesh: what process 0 tells the others, and what ends them all.

JAX's coordination service, which runs in process 0, carries all of it: messages, and a beat of each
process. A process whose beat stops, or that does not finish a call that the others have finished,
ends the others: each says on stderr who is missing, and exits with status 1. If process 0 itself
dies, JAX ends the others at once, with an error of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from dsv4_jax import checks, compat
from dsv4_jax.standard_streams import say

DEFAULT_TIMEOUT_S = 60.0
_BEATS_PER_TIMEOUT = 5
_LEFT = "left"
_POLL_MS = 1000
_TOLD_KEPT = 1024
"""Messages. Between two of them that all have surely heard, since process 0 waits for what they do
or answer, there are far fewer."""


class Hosts:
    """This process among the others; `join_hosts` makes it.

    Attributes:
      number: of this process; process 0 tells the others what to do.
      count: processes.
      timeout_s: how long a process may be silent before the others end; twice that, how long it
        may be behind in a call.
      is_taken: an engine tells and listens, and no other one may.
    """

    def __init__(self, service: compat.Service, number: int, count: int, timeout_s: float) -> None:
        """Begins to watch, in two threads."""
        self.number, self.count, self.timeout_s = number, count, timeout_s
        self.is_taken = False
        self._service = service
        self._told = self._met = self._shared = 0
        self._numbers = itertools.count()
        self._answered, self._answering = 0, threading.Lock()
        self._answers_heard = dict.fromkeys(range(count), 0)
        self._calls = 0
        self._left = threading.Event()
        self._heard = {other: time.monotonic() for other in range(count)}
        self._done = dict.fromkeys(range(count), 0)
        self._started = dict.fromkeys(range(count), 0)
        self._waiting: tuple[float, int] | None = None
        self._compiling = dict.fromkeys(range(count), 0)
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.leave)

    def tell(self, message: bytes) -> None:
        """Process 0 to all others: the next message that they `listen` for."""
        self._service.key_value_set_bytes(f"dsv4/told/{self._told}", message)
        self._told += 1
        if self._told > _TOLD_KEPT:
            self._service.key_value_delete(f"dsv4/told/{self._told - _TOLD_KEPT - 1}")

    def listen(self) -> bytes:
        """The next message of process 0, however long that takes."""
        message = self._wait_for(f"dsv4/told/{self._told}")
        self._told += 1
        return message

    def next_number(self) -> int:
        """A number that process 0 has not given before, for what the others answer about."""
        return next(self._numbers)

    def answer(self, message: bytes) -> None:
        """Another process to process 0, from any thread; nothing waits for it."""
        with self._answering, contextlib.suppress(jax.errors.JaxRuntimeError):
            key = f"dsv4/answer/{self.number}/{self._answered}"
            self._service.key_value_set_bytes(key, message)
            self._answered += 1

    def hear_answer(self, other: int) -> bytes | None:
        """The next answer of another process, in one thread of process 0; None if that leaves.

        It waits however long that takes: who dies ends this process.
        """
        key = f"dsv4/answer/{other}/{self._answers_heard[other]}"
        while not self._left.is_set():
            try:
                message = self._service.blocking_key_value_get_bytes(key, _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error) and not self._left.is_set():
                    self.fail(error)
                continue
            self._answers_heard[other] += 1
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._service.key_value_delete(key)
            return message
        return None

    def share(self, value: int) -> list[int]:
        """What every process gives, in their order; all call this, in the same order."""
        self._shared += 1
        key = f"dsv4/shared/{self._shared}"
        self._service.key_value_set_bytes(f"{key}/{self.number}", b"%d" % value)
        return [int(self._wait_for(f"{key}/{other}", other)) for other in range(self.count)]

    def meet(self) -> None:
        """Waits until every process has come here, however long that takes."""
        self._met += 1
        self._service.key_value_set_bytes(f"dsv4/met/{self._met}/{self.number}", b"here")
        for other in range(self.count):
            self._wait_for(f"dsv4/met/{self._met}/{other}")

    def _wait_for(self, key: str, other: int | None = None) -> bytes:
        while True:
            try:
                return self._service.blocking_key_value_get_bytes(key, _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    self.fail(error)
            if other is not None and self._heard[other] == float("inf"):
                self.end(f"process {other} has left, and does not come here")

    @contextlib.contextmanager
    def call(self, *, is_new: bool) -> Iterator[None]:
        """A call of the devices that every process makes; what it raises ends all of them.

        Args:
          is_new: it may have to be compiled, which takes each process its own time: only silence
            is watched then, by those too that wait for it in a later call.
        """
        self._waiting = None if is_new else (time.monotonic(), self._calls + 1)
        self._compiling[self.number] = int(is_new)
        try:
            yield
        except BaseException as error:
            self.fail(error)
        self._calls += 1
        self._waiting = None
        self._compiling[self.number] = 0

    def waits(self) -> None:
        """Within a call: from here on this process may wait for what others do in it.

        Of processes that do not finish a call, those are named that have not come so far.
        """
        self._started[self.number] = self._calls + 1

    def fail(self, error: BaseException) -> NoReturn:
        """Ends this process for an error, and so the others; names who is missing, if it is that.

        A process that dies shows first as an error in what was sent to it.
        """
        if isinstance(error, Exception):
            time.sleep(1.5 * self.timeout_s)  # who is silent is found meanwhile, which ends this
        self.end(f"{type(error).__name__}: {error}")

    def end(self, message: str) -> NoReturn:
        """Says why, and ends this process at once; its other threads may be stuck for ever."""
        try:
            say(f"dsv4-jax: process {self.number} ends: {message}")
        finally:
            os._exit(1)

    def leave(self) -> None:
        """Others no longer wait for this process."""
        if not self._left.is_set():
            self._left.set()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._service.key_value_set(f"dsv4/beat/{self.number}", _LEFT, True)

    def _beat(self) -> None:
        beats, interval = 0, self.timeout_s / _BEATS_PER_TIMEOUT
        last_heard: dict[int, str] = {}
        while not self._left.wait(interval):
            beats += 1
            try:
                own = self._started[self.number], self._compiling[self.number]
                mine = f"{beats} {self._calls} {own[0]} {own[1]}"
                self._service.key_value_set(f"dsv4/beat/{self.number}", mine, True)
                beats_of_all = self._service.key_value_dir_get("dsv4/beat/")
            except jax.errors.JaxRuntimeError:
                continue  # the service is silent, and so is process 0
            now = time.monotonic()
            for key, value in beats_of_all:
                other = int(key.rsplit("/", 1)[1])
                if value == _LEFT:
                    self._heard[other], self._compiling[other] = float("inf"), 0
                elif last_heard.get(other) != value:
                    last_heard[other], self._heard[other] = value, now
                    if other != self.number:
                        numbers = map(int, value.split()[1:])
                        self._done[other], self._started[other], self._compiling[other] = numbers

    def _watch(self) -> None:
        compiled = time.monotonic()  # when a process was last known to
        while not self._left.wait(self.timeout_s / _BEATS_PER_TIMEOUT):
            now = time.monotonic()
            heard = {o: at for o, at in self._heard.items() if o != self.number}
            # Without process 0 nothing is heard of anybody.
            silent = [other for other, at in heard.items() if now - at > self.timeout_s]
            if silent:
                lost = [0] if 0 in silent else silent
                self.end(f"{_processes(lost)} silent for {self.timeout_s:g} s")
            waiting = self._waiting
            compiled = now if any(self._compiling.values()) else compiled
            if waiting is not None and now - max(waiting[0], compiled) > 2 * self.timeout_s:
                self.end(
                    f"a step has not ended for {2 * self.timeout_s:g} s; "
                    f"{_processes(self._behind(waiting[1]))} behind the others"
                )

    def _behind(self, call: int) -> list[int]:
        """Processes that hold up a call: those that have come least far, or all that are in it."""
        done = self._done | {self.number: self._calls}
        here = [process for process, at in self._heard.items() if at != float("inf")]
        come = {process: max(done[process], self._started[process]) for process in here}
        last = [process for process in here if come[process] == min(come.values())]
        if len(last) < len(here):
            return last
        behind = [process for process in here if process != self.number and done[process] < call]
        return behind or [self.number]


_joined: list[Hosts] = []


def join_hosts(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Hosts:
    """Makes this process one of several on one mesh; call it before JAX is used, once.

    Args:
      coordinator: "address:port" of process 0, where it listens. Whoever reaches that port is
        trusted. None is what JAX finds out from SLURM, MPI or Kubernetes, as of the next two.
      num_processes: processes in all.
      process_id: number of this one, from 0.
      timeout_s: seconds, at least 1, that a process may be silent before the others end.

    Returns:
      This process among the others; `jax.devices()` are then those of all of them.

    Raises:
      ValueError: an argument is out of range, or nothing says what the processes are.
      RuntimeError: the process has joined already, or JAX is in use.
    """
    timeout_s = checks.number("timeout_s", timeout_s, 1)
    given = (coordinator, num_processes, process_id)
    if any(one is None for one in given) and any(one is not None for one in given):
        raise ValueError(
            "give coordinator, num_processes and process_id, or none of them, got "
            f"{coordinator=}, {num_processes=}, {process_id=}"
        )
    options: dict[str, Any] = {}
    if coordinator is not None:
        address = checks.text("coordinator", coordinator, max_chars=1000)
        if not address.rpartition(":")[2].isdigit():
            checks.refuse("coordinator", "an address and a port, such as 10.0.0.1:1234", address)
        count = checks.integer("num_processes", num_processes, 1)
        options = {
            "coordinator_address": address,
            "num_processes": count,
            "process_id": checks.integer("process_id", process_id, 0, count - 1),
        }
    if _joined:
        raise RuntimeError("this process has joined the others already")
    # What is watched here ends processes sooner than JAX does by itself.
    options["heartbeat_timeout_seconds"] = int(10 * timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would swallow SIGTERM, for training that saves first.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**options)
    service = compat.find_service()
    assert service is not None
    _joined.append(Hosts(*service, timeout_s))
    return _joined[0]


def joined() -> Hosts | None:
    """What `join_hosts` gave in this process."""
    return _joined[0] if _joined else None


def agree[Value: (bool, int)](value: Value) -> Value:
    """What process 0 has, in each process; all that joined call this, in the same order."""
    hosts = joined()
    if hosts is None:
        return value
    if hosts.number == 0:
        hosts.tell(str(int(value)).encode())
        return value
    return type(value)(int(hosts.listen()))


def meet() -> None:
    """Waits for all processes that joined; each calls this as often as the others.

    Before the first collectives of programs that each compiled for itself: Gloo, which CPUs use,
    gives up where another process comes 30 s later.
    """
    if (hosts := joined()) is not None:
        hosts.meet()


def hosts_of(mesh: Mesh | None) -> Hosts | None:
    """The processes that a mesh spans; None is this one alone.

    Raises:
      ValueError: there are several, and nothing watches them, or this one holds no device.
    """
    if mesh is None or len({device.process_index for device in mesh.devices.flat}) == 1:
        return None
    hosts = joined()
    if hosts is None or {d.process_index for d in mesh.devices.flat} != set(range(hosts.count)):
        raise ValueError(
            "mesh must hold devices of every process, and each must have called "
            "dsv4_jax.hosts.join_hosts before JAX was used"
        )
    return hosts


def _processes(numbers: list[int]) -> str:
    names = ", ".join(map(str, numbers))
    return f"process {names} is" if len(numbers) == 1 else f"processes {names} are"
