"""What the package takes of JAX that is not public: names of `jax._src`, each in one function.

No other module imports from `jax._src`. Each function says what nothing public does;
`tests/dsv4_jax/test_compat.py` has a test for each, which fails on a JAX that does it otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax._src import array, cache_key, compilation_cache, core, distributed, xla_bridge
from jax._src.interpreters import mlir
from jax.experimental import serialize_executable
from jaxlib.mlir import ir


class Service(Protocol):
    """The keys and values of JAX's coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a text."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Sets bytes, once."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for bytes; raises when the time is over."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Keys below this one, and their texts."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Forgets a key."""


def has_started() -> bool:
    """Whether JAX has made its backends, after which it reads no flags and no environment."""
    return xla_bridge.backends_are_initialized()


def find_service() -> tuple[Service, int, int] | None:
    """The coordination service, the number of this process, and how many there are.

    None before `jax.distributed.initialize`, which gives back none of it.
    """
    state = distributed.global_state
    if state.client is None:
        return None
    return state.client, state.process_id, state.num_processes


def end_traces() -> None:
    """Forgets a trace that an exception from outside, such as Ctrl-C, has interrupted.

    Without it JAX takes what is called next for part of that trace.
    """
    core.reset_trace_state()


def is_tracing() -> bool:
    """Whether what is called here becomes part of a program, whatever its arguments are."""
    return not core.trace_state_clean()


def uncommitted(value: jax.Array) -> jax.Array:
    """The same array of one device, which any program may take to the devices of its others.

    What has been copied from a kind of memory that was named is committed, and so is what a program
    makes of it, which then is another program for whoever takes that.
    """
    return array.ArrayImpl(value.aval, value.sharding, [value], committed=False)  # type: ignore[arg-type]


class Program(NamedTuple):
    """A compiled program that is launched without a look at its arguments.

    A call of it, or of the jitted function, checks the shape, dtype and place of each array first,
    which takes longer than to launch a program of many arrays.

    Attributes:
      execute: takes the leaves of the arguments that it uses, in order. Donated arrays are gone
        then. `execute(leaves).consume_with_handlers(handlers)` is a list of the results' leaves.
      handlers: what makes arrays of its results.
      used: places of those leaves among all.
    """

    execute: Callable[[Sequence[jax.Array]], Any]
    handlers: Sequence[Any]
    used: tuple[int, ...]


def program_of(compiled: jax.stages.Compiled) -> Program:
    """What launches a compiled program, which has no effects."""
    call = compiled._executable.unsafe_call  # type: ignore[union-attr]
    handlers, used = call.out_handler.handlers, tuple(sorted(call.kept_var_idx))
    return Program(call.xla_executable.execute_sharded, handlers, used)


_read_in_thread, _serializing = threading.local(), threading.Lock()


@contextlib.contextmanager
def read_executables() -> Iterator[list[bytes]]:
    """Within it, the executables that this thread gets out of JAX's compilation cache, as bytes.

    An executable that the cache gave has no machine code to be written again; these bytes have it.
    """
    _watch_cache()
    _read_in_thread.executables = found = []
    try:
        yield found
    finally:
        _read_in_thread.executables = None


@functools.cache
def _watch_cache() -> None:
    extract = compilation_cache.extract_executable_and_time

    def watched(entry: bytes) -> tuple[bytes, int]:
        executable, seconds = extract(entry)
        if (found := getattr(_read_in_thread, "executables", None)) is not None:
            found.append(executable)
        return executable, seconds

    compilation_cache.extract_executable_and_time = watched


def serialize(
    compiled: jax.stages.Compiled, executable: bytes | None = None
) -> tuple[bytes, Any, Any]:
    """`jax.experimental.serialize_executable.serialize`, with these bytes for the executable."""
    pickler = serialize_executable._JaxPjrtPickler

    class Pickler(pickler):  # type: ignore[misc, valid-type]
        def persistent_id(self, obj: Any) -> Any:
            is_executable = type(obj).__name__ in ("LoadedExecutable", "Executable")
            if executable is not None and is_executable:
                return "exec", executable
            return super().persistent_id(obj)

    with _serializing:
        serialize_executable._JaxPjrtPickler = Pickler  # type: ignore[misc]
        try:
            return serialize_executable.serialize(compiled)
        finally:
            serialize_executable._JaxPjrtPickler = pickler  # type: ignore[misc]


type Canonicalize = Callable[..., bytes]
"""(module: ir.Module, *options) -> bytes, the text of a program as it enters its key."""


def replace_canonicalize(change: Callable[[Canonicalize], Canonicalize]) -> None:
    """Puts `change(f)` in the place of f, by which a program enters its compilation cache key."""
    cache_key._canonicalize_ir = change(cache_key._canonicalize_ir)


def canonicalize(module: ir.Module) -> bytes:
    """What of a lowered program enters its key in the compilation cache."""
    return cache_key._canonicalize_ir(module, False)


def dialects() -> Any:
    """The registry of the MLIR dialects in which JAX writes its programs."""
    return mlir.upstream_dialects
