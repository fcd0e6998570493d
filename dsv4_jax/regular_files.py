"""Files that others name: regular ones alone are opened, and no more is read than a bound allows.

To open a pipe waits for its writer, to open a device may do something, and neither has an end. What
lies at a path is looked at before it is opened, and again once it is open, since it may have been
replaced in between.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import pathlib
import re
import stat
from typing import BinaryIO

_PATH_CHARS = 300
_KERNELS = {"bpf", "cgroup", "cgroup2", "configfs", "debugfs", "proc", "pstore", "securityfs"}
_KERNELS |= {"selinuxfs", "sysfs", "tracefs"}
"""File systems whose files the kernel makes up: they say that they are regular, their sizes say
nothing, and to read some of them waits or never ends."""

_DESCRIPTOR = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/\d{1,9}")


def show_path(path: str | os.PathLike[str]) -> str:
    """A path for a message: what is longer than 300 characters loses its middle."""
    text = os.fspath(path)
    if len(text) <= _PATH_CHARS:
        return text
    return f"{text[: _PATH_CHARS // 3]}...{text[-_PATH_CHARS * 2 // 3 :]}"


def has_regular_file(path: pathlib.Path) -> bool:
    """Whether there is a regular file, to which links may lead; nothing is opened.

    Raises:
      ValueError: something else is there.
      OSError: that cannot be found out.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    _check(path, status)
    return True


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY
) -> io.BufferedReader | io.BufferedRandom:
    """Opens a regular file.

    Args:
      path: of the file, or of a link to it.
      flags: as of `os.open`, for reading, and perhaps for writing too.

    Raises:
      ValueError: it is no regular file.
      OSError: it cannot be opened.
    """
    has_regular_file(path := pathlib.Path(path))
    number = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    try:
        _check(path, os.fstat(number))
        return open(number, "r+b") if flags & os.O_RDWR else open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The contents of a regular file, whose size is looked at before it is read.

    Raises:
      ValueError: it is no regular file, or larger.
      OSError: it cannot be read.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            _refuse_size(path, max_bytes, f"{size:,}")
        return stream.read(size)


def open_given(path: str | os.PathLike[str]) -> io.BufferedReader | io.BufferedRandom:
    """Opens a file that a user names to be read once.

    That is a regular file, or what the process was given open already, by a path such as
    `/dev/stdin`, or `/dev/fd/63` as shells write it for `<(command)`. Any other pipe or device is
    refused.

    Raises:
      ValueError: it is none of these.
      OSError: it cannot be opened.
    """
    if _DESCRIPTOR.fullmatch(os.fspath(path)):
        return open(path, "rb")
    return open_regular(path)


def read_given(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The contents of a file of `open_given`.

    Raises:
      ValueError: it is no such file, or larger.
      OSError: it cannot be read.
    """
    if not _DESCRIPTOR.fullmatch(os.fspath(path)):
        return read_regular(path, max_bytes)
    with open_given(path) as stream:
        return read_stream(stream, max_bytes, path)


def read_stream(stream: BinaryIO, max_bytes: int, name: str | os.PathLike[str]) -> bytes:
    """What is left of a stream; `name` is what the error of a longer one begins with.

    Raises:
      ValueError: it holds more.
      OSError: it cannot be read.
    """
    data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        _refuse_size(name, max_bytes, "more")
    return data


def _refuse_size(name: str | os.PathLike[str], max_bytes: int, got: str) -> None:
    raise ValueError(f"{show_path(name)} must have at most {max_bytes:,} bytes, got {got}")


def _check(path: pathlib.Path, status: os.stat_result) -> None:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    kind = kinds.get(stat.S_IFMT(status.st_mode))
    if kind is None and status.st_dev in _made_up_devices():
        kind = "one that the kernel makes up, as in /proc"
    if kind is not None:
        raise ValueError(f"{show_path(path)} must be a regular file, got {kind}")


@functools.cache
def _made_up_devices() -> frozenset[int]:
    """Device numbers of the file systems that the kernel makes up."""
    try:
        lines = pathlib.Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()  # no Linux, or no /proc to be led to
    devices = set()
    for line in lines:
        mount, _, system = line.partition(" - ")
        if system.split(" ")[0] in _KERNELS:
            major, minor = mount.split(" ")[2].split(":")
            devices.add(os.makedev(int(major), int(minor)))
    return frozenset(devices)
