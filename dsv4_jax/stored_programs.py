"""StoredPrograms: compiled programs on disk, which the next process loads without tracing them.

jax's compilation cache finds a program by its text, so a process traces and lowers it first, which
takes longer than loading it. Here a program is found by what it is made from: the source code of
this package and its kernels, the versions of what compiles them, the devices, jax's settings, and
the shapes and static values of the arguments.

A function that somebody replaces in a running process is in none of these. So only the command line
asks for this.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import pickle
import platform
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

_ROOTS = "dsv4_jax", "pallas_kernels"
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "ml_dtypes"),
    *("jax-triton", "triton"),
)
_PLATFORMS = ("cpu",)
"""Where loaded programs were seen to give what compiled ones give."""

_VARIABLES = "XLA_", "DSV4", "PALLAS_", "TRITON_", "MOSAIC_", "CUDA_", "NVIDIA_"
"""Beginnings of variables of the environment that may change what is compiled."""

_WITHOUT_EFFECT = "cache", "log", "dump", "traceback", "distributed", "mtls", "pprint"
"""What is in the names of jax's settings that change no program."""

_MACHINE_CODE = b"\x7fELF"
"""Begins what a processor runs. XLA has none for a program that jax's compilation cache gave."""

_SUFFIX = ".program"
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
        self._sources = _hash_of_sources()
        self._has_warned = False

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
        function = program.__wrapped__
        said = [
            f"{function.__module__}.{function.__qualname__}",
            repr(sorted(static.items())),
            str(structure),
            *(f"{leaf.aval!r} {leaf.sharding!r} {leaf.committed}" for leaf in leaves),
        ]
        if any(" at 0x" in part for part in said):  # a function or an object, known by its place
            return None
        devices = _devices_of(leaves)
        if devices is None or devices[0].platform not in _PLATFORMS:
            return None
        surroundings = _surroundings(devices[0].platform)
        whole = "\n".join([self._sources, surroundings, *map(_about, devices), *said])
        return hashlib.sha256(whole.encode()).hexdigest()

    def has(self, key: str) -> bool:
        """Whether there is a file for a program, whatever it holds."""
        return self._file(key).exists()

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
                stored.executable, stored.in_tree, stored.out_tree, execution_devices=devices
            )
        except Exception as error:  # whatever a file of another make may raise
            self._warn(f"{file} cannot be loaded, so that its program is compiled anew: {error}")
            with contextlib.suppress(OSError):
                file.unlink()
            return None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it a program is traced; after a warning of ours none is stored any more.

        A stored program is not traced again, so that its warning would not be heard.
        """
        with warnings.catch_warnings(record=True) as found:
            yield
        for one in found:
            self._has_warned |= one.category.__module__.partition(".")[0] in _ROOTS
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    def keep(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Writes a program, if another process could run it.

        One that jax's compilation cache gave is not written: it would load, and not run.
        """
        if self._has_warned or self._sources != _hash_of_sources():
            return
        try:
            stored = _Stored(*serialize_executable.serialize(compiled))
            body = pickle.dumps(tuple(stored))
        except Exception:  # as of one that calls Python, which no other process could
            return
        if _MACHINE_CODE not in stored.executable:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(file.name, self._file(key))
            _leave_room(self._folder)
        except OSError as error:
            self._warn(f"compiled programs cannot be kept: {error}")

    def _file(self, key: str) -> pathlib.Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _warn(self, text: str) -> None:
        warnings.warn(StoredProgramWarning(text), stacklevel=4)


class _Stored(NamedTuple):
    """What is written: the executable, and the structures of its arguments and results."""

    executable: bytes
    in_tree: Any
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


@functools.cache
def _surroundings(kind: str) -> str:
    """What compiles: versions, settings and, for a CPU, which one it is."""
    said = [
        platform.python_version(),
        platform.machine(),
        jax.devices(kind)[0].client.platform_version,
    ]
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            said.append(f"{package} {importlib.metadata.version(package)}")
    said += sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES)
    )
    said += sorted(
        f"{name}={value!r}"
        for name, value in jax.config.values.items()
        if not any(part in name for part in _WITHOUT_EFFECT)
    )
    if kind == "cpu":  # its code is for this very processor
        with contextlib.suppress(OSError):
            lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
            said += [line for line in lines if line.startswith(("model name", "flags"))]
    return "\n".join(said)


def _hash_of_sources() -> str:
    """Of every file of both packages, by name and content."""
    home, found = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for root in _ROOTS:
        for file in sorted((home / root).rglob("*.py")):
            content = file.read_bytes()
            found.update(f"{file.relative_to(home)} {len(content)}\n".encode())
            found.update(content)
    return found.hexdigest()


def _read_own(file: pathlib.Path) -> bytes | None:
    """The bytes of a file that nobody but this user can have written; None if there is none.

    Raises:
      PermissionError: others may write the file or its folder.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        for about in (os.fstat(descriptor), file.parent.stat()):
            if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError("others may have written it, and a program can do anything")
        return opened.read()


def _leave_room(folder: pathlib.Path) -> None:
    """Removes programs that were used longest ago, if all together are too large."""
    files = []
    for file in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process has removed it
            about = file.stat()
            files.append((about.st_mtime, about.st_size, file))
    left = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if left <= _MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            file.unlink()
        left -= size
