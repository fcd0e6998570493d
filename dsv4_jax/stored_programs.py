"""StoredPrograms: compiled programs on disk, which the next process loads without tracing them.

jax's compilation cache finds a program by its text, so a process traces and lowers it first, which
takes longer than loading it. Here a program is found by what it is made from: the source code of
this package and its kernels, the versions of what compiles them, the devices, jax's settings, and
the shapes and static values of the arguments.

A function that somebody replaces in a running process is in none of these. So only the command line
asks for this, where nobody has imported the package before it did.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import math
import os
import pathlib
import pickle
import platform
import stat
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from dsv4_jax import compat
from dsv4_jax.sources import imports_others, read_sources, sources_at_start
from pallas_kernels.common.backend import has_fallen_back

_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "ml_dtypes"),
    *("jax-triton", "triton"),
)
_MOST_DEVICES = {"cpu": math.inf, "gpu": 1}
"""Where loaded programs were seen to give what compiled ones give: platforms, and on how many."""

_VARIABLES = "XLA_", "DSV4", "PALLAS_", "TRITON_", "MOSAIC_", "CUDA_", "NVIDIA_", "NPROC"
"""Beginnings of variables of the environment that may change what is compiled."""
_OTHER_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"),
    "DSV4_JAX_API_KEY",
)
"""Beginnings of those among them that do not: which devices there are, their memory, and keys."""

_WITHOUT_EFFECT = {
    "jax_compilation_cache_check_contents",
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_dump_ir_to",
    "jax_explain_cache_misses",
    "jax_log_compiles",
    "jax_logging_level",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_raise_persistent_cache_errors",
    "jax_traceback_filtering",
}
"""Settings of jax that change no program."""

_OF_A_PROCESSOR = "model name", "flags", "Features", "CPU "
"""Beginnings of lines of /proc/cpuinfo that say which one it is."""

_MACHINE_CODE = b"\x7fELF"
"""Begins what a processor runs. XLA writes none for a program that jax's compilation cache gave."""

_SUFFIX, _UNFINISHED = ".program", ".partial"
_ABANDONED_S = 3600.0
"""Age of a file that nobody will finish any more."""

_MOST_BYTES = 32 * 2**30
"""Of all programs in a folder; those that were used longest ago go first."""


class StoredProgramWarning(UserWarning):
    """A program on disk could not be read or written; it is compiled as if there were none."""


class StoredPrograms:
    """A folder of compiled programs, which several processes may use.

    A program is a file with a checksum, written beside and renamed. Loading one runs what it holds,
    so that the folder has to be its user's own.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Of a folder, which is made if it is not there."""
        self._folder = folder
        self._sources = sources_at_start()

    def key_of(
        self, program: Any, arguments: Sequence[Any], static: Mapping[str, Any]
    ) -> str | None:
        """What finds a program; None for one that is not to be stored.

        Args:
          program: a jitted function.
          arguments: its arrays, in trees.
          static: its other arguments, by name.
        """
        leaves, structure = jax.tree.flatten(arguments)
        if not all(isinstance(leaf, jax.Array) for leaf in leaves):
            return None
        devices = _devices_of(leaves)
        if devices is None or len(devices) > _MOST_DEVICES.get(devices[0].platform, 0):
            return None
        function = program.__wrapped__
        name = getattr(function, "__qualname__", "<")
        if "<" in name or self._sources.digest is None or imports_others(self._sources.files):
            return None  # it depends on what no name or file says
        said = [
            f"{function.__module__}.{name}",
            repr(sorted(static.items())),
            str(structure),
            *(f"{leaf.aval!r} {leaf.sharding!r} {leaf.committed}" for leaf in leaves),
        ]
        if any(" at 0x" in part for part in said):  # a function or an object, known by its place
            return None
        surroundings = _machine(devices[0].platform), _settings()
        if None in surroundings:
            return None
        whole = "\n".join(map(str, [self._sources.digest, *surroundings, *map(_about, devices)]))
        whole = "\n".join([whole, *said])
        return hashlib.sha256(whole.encode()).hexdigest()

    def has(self, key: str) -> bool:
        """Whether there is a file for a program, whatever it holds."""
        with contextlib.suppress(OSError):  # of a folder of another user
            return self._file(key).exists()
        return False

    def find(self, key: str, arguments: Sequence[Any]) -> jax.stages.Compiled | None:
        """The program of a key, loaded on the devices of the arguments; None if there is none."""
        file = self._file(key)
        try:
            data = _read_own(file)
            if data is None:
                return None
            with contextlib.suppress(OSError):
                os.utime(file)  # it was used
            digest, body = data[:32], data[32:]
            if hashlib.sha256(body).digest() != digest:
                raise ValueError("its checksum is another one")
            stored = _Stored(*pickle.loads(body))
            devices = _devices_of(jax.tree.leaves(arguments))
            return serialize_executable.deserialize_and_load(
                stored.executable, _structure(arguments), stored.out_tree, execution_devices=devices
            )
        except Exception as error:  # whatever a file of another make may raise
            if not _is_passing(error):
                with contextlib.suppress(OSError):
                    file.unlink()
            self._warn(f"a program is compiled anew, since {file} cannot be loaded: {error}")
            return None

    def keep(
        self,
        key: str,
        compiled: jax.stages.Compiled,
        arguments: Sequence[Any],
        read: Sequence[bytes] = (),
    ) -> None:
        """Writes a program, if another process could run it.

        One of a process in which an op has fallen back is not written: every process has to say so.

        Args:
          key: of the program.
          compiled: the program.
          arguments: its arrays, in trees.
          read: what jax's compilation cache gave for it (`compat.read_executables`); one that the
            cache gave has no machine code of its own.
        """
        if has_fallen_back() or self._sources.digest != read_sources().digest:
            return
        try:
            cached = read[0] if len(read) == 1 else None
            executable, in_tree, out_tree = compat.serialize(compiled, cached)
            if in_tree != _structure(arguments):
                return
            stored = _Stored(executable, out_tree)
            body = pickle.dumps(tuple(stored))
        except Exception:  # as of one that calls Python, which no other process could
            return
        if _MACHINE_CODE not in stored.executable:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _leave_room(self._folder, len(body), _MOST_BYTES)
            data = hashlib.sha256(body).digest() + body
            try:
                _write(self._file(key), data)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                _leave_room(self._folder, len(data), _bytes_in(self._folder))
                _write(self._file(key), data)
        except OSError as error:
            self._warn(f"compiled programs cannot be kept in {self._folder}: {error}")

    def _file(self, key: str) -> pathlib.Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _warn(self, text: str) -> None:
        warnings.warn(StoredProgramWarning(text), stacklevel=4)


class _Stored(NamedTuple):
    """What is written: the executable, and the structure of its results.

    That of its arguments is the caller's: it may hold what is no array, such as whole tables.
    """

    executable: bytes
    out_tree: Any


_used: list[StoredPrograms] = []


def use_stored_programs(folder: pathlib.Path) -> None:
    """Makes the engines of this process load their programs from a folder, and keep them there."""
    _used[:] = [StoredPrograms(folder)]


def stored_programs() -> StoredPrograms | None:
    """Those that engines use; None before `use_stored_programs`."""
    return _used[0] if _used else None


def _devices_of(leaves: Sequence[jax.Array]) -> tuple[Any, ...] | None:
    """The devices of a program, in its order; None where a process does not have them all."""
    most = max((leaf.sharding for leaf in leaves), key=lambda one: len(one.device_set))
    if jax.process_count() > 1:
        return None
    if isinstance(most, jax.sharding.NamedSharding):
        return tuple(most.mesh.devices.flat)  # pyright: ignore[reportOptionalMemberAccess]
    return tuple(most.device_set) if len(most.device_set) == 1 else None


def _about(device: Any) -> str:
    return f"{device.platform} {device.device_kind} {device.id}"


def _structure(arguments: Sequence[Any]) -> Any:
    """Of the arguments of a program, none of which has a name."""
    return jax.tree.structure((tuple(arguments), {}))


def _is_passing(error: Exception) -> bool:
    """Whether a file may be sound all the same: memory is short, or others have a say here."""
    return isinstance(error, OSError | MemoryError) or "RESOURCE_EXHAUSTED" in f"{error}"


@functools.cache
def _machine(kind: str) -> str | None:
    """What compiles, and for which processor; None of one that nobody describes."""
    said = [
        platform.python_version(),
        platform.machine(),
        jax.devices(kind)[0].client.platform_version,
    ]
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            said.append(f"{package} {importlib.metadata.version(package)}")
    if kind == "cpu":  # its code is for this very processor, and so many of them
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        about = [line for line in lines if line.startswith(_OF_A_PROCESSOR)]
        if not about:
            return None
        said += [*about, f"{len(os.sched_getaffinity(0))} processors"]
    return "\n".join(said)


def _settings() -> str:
    """Variables of the environment and settings of jax, as they are now."""
    said = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.startswith(_OTHER_VARIABLES)
    ]
    said += [
        f"{name}={value!r}"
        for name, value in jax.config.values.items()
        if name not in _WITHOUT_EFFECT
    ]
    return "\n".join(sorted(said))


def _read_own(file: pathlib.Path) -> bytes | None:
    """The bytes of a file that nobody but this user can have written; None if there is none.

    Raises:
      PermissionError: others may write the file or its folder.
      ValueError: it is no file.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is no file")
        for one in (about, file.parent.stat()):
            if one.st_uid != os.getuid() or one.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(
                    "others may have written it, and a program can do anything; remove the folder, "
                    "or let its user alone write there"
                )
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def _write(file: pathlib.Path, data: bytes) -> None:
    """A whole file or none, for this user alone."""
    number, partial = tempfile.mkstemp(_UNFINISHED, f"{file.stem}.", file.parent)
    try:
        with os.fdopen(number, "wb") as new:
            new.write(data)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _bytes_in(folder: pathlib.Path) -> int:
    """Of the programs there."""
    total = 0
    for file in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _leave_room(folder: pathlib.Path, size: int, most_bytes: int) -> None:
    """Removes programs that were used longest ago, and what a killed process has left."""
    files = []
    for file in [*folder.glob(f"*{_SUFFIX}"), *folder.glob(f"*{_UNFINISHED}")]:
        with contextlib.suppress(OSError):  # another process has removed it
            about = file.stat()
            if file.suffix == _UNFINISHED:
                if about.st_mtime < time.time() - _ABANDONED_S:
                    file.unlink()
                continue
            files.append((about.st_mtime, about.st_size, file))
    left = size + sum(one for _, one, _ in files)
    for _, one, file in sorted(files):
        if left <= most_bytes:
            return
        with contextlib.suppress(OSError):
            file.unlink()
        left -= one
