"""Compiles a program and reports its launches and its memory."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax

_OURS = ("mosaic_gpu", "__gpu$xla.gpu.triton", "__gpu$xla.gpu.ptx", "triton_kernel_call")
_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "opt-barrier",
    "after-all",
    "partition-id",
    "replica-id",
    "add-dependency",
    "async-done",
    "async-update",
    "copy-done",
}
"""Instructions that launch nothing."""
_CALLS = ("while", "call", "conditional", "async-start")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$")


@dataclasses.dataclass(frozen=True)
class Launches:
    """Number of launches in one run of a program; the body of a loop counts once per iteration.

    Attributes:
      ours: kernels of `pallas_kernels`.
      products: matrix products by a library or a fusion.
      others: all other kernels and copies, made by XLA.
    """

    ours: int = 0
    products: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """The sum of all three."""
        return self.ours + self.products + self.others

    def __add__(self, other: Launches) -> Launches:
        """Launches of two programs, one after the other."""
        return Launches(
            self.ours + other.ours, self.products + other.products, self.others + other.others
        )

    def times(self, count: int) -> Launches:
        """Launches of `count` runs."""
        return Launches(self.ours * count, self.products * count, self.others * count)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function.

    Attributes:
      run: the function.
      trace_s: seconds to trace and lower it.
      compile_s: seconds to compile it, or to read it from the persistent compilation cache.
      from_cache: whether the persistent compilation cache had it.
      launches: launches of one run.
      temp_bytes: memory that it takes beside its arguments and results.
      alias_bytes: bytes of arguments whose memory the results reuse.
    """

    run: Any
    trace_s: float
    compile_s: float
    from_cache: bool
    launches: Launches
    temp_bytes: int
    alias_bytes: int

    def row(self, prefix: str = "") -> dict[str, Any]:
        """What a benchmark reports of it; every name begins with the prefix."""
        fields = {
            "trace_s": self.trace_s,
            "compile_s": self.compile_s,
            "from_cache": self.from_cache,
            "launches": dataclasses.asdict(self.launches) | {"total": self.launches.total},
            "temp_bytes": self.temp_bytes,
        }
        return {prefix + name: value for name, value in fields.items()}


def compile_program(
    function: Any, *arguments: Any, options: Mapping[str, str] | None = None, **named: Any
) -> Program:
    """Compiles a jitted function for these arguments, or shapes, without running it.

    Args:
      function: what `jax.jit` gave.
      *arguments: its arguments.
      options: of the compiler.
      **named: arguments with a name.
    """
    hits, own_thread = [], threading.get_ident()  # others may compile at the same time

    def listen(event: str, **_: Any) -> None:
        if event.endswith("cache_hits") and threading.get_ident() == own_thread:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        start = time.perf_counter()
        lowered = function.lower(*arguments, **named)
        traced = time.perf_counter()
        compiled = lowered.compile(None if options is None else dict(options))
        end = time.perf_counter()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    memory = compiled.memory_analysis()
    return Program(
        run=compiled,
        trace_s=traced - start,
        compile_s=end - traced,
        from_cache=bool(hits),
        launches=count_launches(compiled.as_text()),
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
    )


def count_launches(hlo: str) -> Launches:
    """Counts launches in optimised HLO text; the body of a loop of unknown length counts once."""
    bodies, entry = _computations(hlo)
    counted: dict[str, Launches] = {}

    def count(name: str) -> Launches:
        if name not in counted:
            counted[name] = Launches()  # a computation never calls itself
            total = Launches()
            for line in bodies.get(name, ()):
                total = total + _count_instruction(line, count)
            counted[name] = total
        return counted[name]

    return count(entry)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Instruction lines of each computation, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    current, entry = "", ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = match[1]
            bodies[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif current and _INSTRUCTION.match(line):
            bodies[current].append(_without_code(line))
    return bodies, entry


def _without_code(line: str) -> str:
    """The line without the backend config of a custom call, which holds the kernel's code."""
    return line[:10_000] if " custom-call(" in line[:10_000] else line


def _count_instruction(line: str, count: Any) -> Launches:
    head = line.split("metadata=", 1)[0]
    match = _OPCODE.search(head.split(" = ", 1)[1])
    opcode = match[1] if match else "parameter"
    if opcode in _CALLS:
        rounds = 1
        if opcode == "while" and (trips := re.search(r'"known_trip_count":\{"n":"(\d+)"', line)):
            rounds = int(trips[1])
        called = re.findall(
            r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)",
            line,
        )
        total = Launches()
        for name in called:
            total = total + count(name).times(rounds)
        return total
    if opcode in _FREE:
        return Launches()
    if opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]+)"', line)
        name = target[1] if target else ""
        if any(ours in name for ours in _OURS):
            return Launches(ours=1)
        return Launches(products=1) if "cublas" in name or "cudnn" in name else Launches(others=1)
    if opcode == "fusion" and re.search(
        r'^\s+(ROOT )?%?gemm_fusion|"kind":"__\w*(gemm|cublas)', line
    ):
        return Launches(products=1)
    return Launches(products=1) if opcode == "dot" else Launches(others=1)
