"""Only regular files are opened, and no more is read of them than a bound allows."""

import os
import pathlib
import socket

import pytest

from dsv4_jax import regular_files
from dsv4_jax.cli import main
from dsv4_jax.regular_files import (
    has_regular_file,
    open_regular,
    read_given,
    read_regular,
    show_path,
)

KINDS = {
    "pipe": "a pipe",
    "socket": "a socket",
    "directory": "a directory",
    "/dev/zero": "a device",
    "/dev/full": "a device",
    "/proc/kmsg": "one that the kernel makes up",
    "/proc/self/maps": "one that the kernel makes up",
    "/sys/kernel/mm/transparent_hugepage/enabled": "one that the kernel makes up",
}


def make(kind, path):
    """Puts what is no regular file at a path; devices and files of the kernel by a link."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        there = os.getcwd()
        os.chdir(path.parent)  # the path of a socket has 107 bytes at most
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
        finally:
            os.chdir(there)
    elif os.path.exists(kind):
        path.symlink_to(kind)
    else:
        pytest.skip(f"no {kind} here")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_called_what_it_is(tmp_path, kind, monkeypatch):
    make(kind, tmp_path / "x")
    opened = []
    monkeypatch.setattr(os, "open", lambda *given, **_: opened.append(given))
    for use in (has_regular_file, open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(ValueError, match=f"x must be a regular file, got {KINDS[kind]}"):
            use(tmp_path / "x")
    assert not opened, "to open a device may do something"


def test_what_is_not_there_is_not_there(tmp_path):
    (tmp_path / "to nothing").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_bytes(b"")
    for name in ("nowhere", "to nothing", "circle", "file/below"):
        assert not has_regular_file(tmp_path / name)
        with pytest.raises(OSError, match=name.split("/")[0]):
            open_regular(tmp_path / name)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_what_is_put_there_after_the_look_is_not_waited_for(tmp_path, kind, monkeypatch):
    """A pipe without a writer would block `open` for ever."""
    path = tmp_path / "x"
    path.write_bytes(b"regular")
    look = regular_files.has_regular_file

    def look_and_replace(path):
        found = look(path)
        path.unlink()
        make(kind, path)
        return found

    monkeypatch.setattr(regular_files, "has_regular_file", look_and_replace)
    with pytest.raises(ValueError, match="must be a regular file"):
        open_regular(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "x").open("wb") as stream:
        stream.truncate(3 * 2**30)  # a hole
    with pytest.raises(ValueError, match="x must have at most 1,000 bytes, got 3,221,225,472"):
        read_regular(tmp_path / "x", 1000)
    (tmp_path / "y").write_bytes(b"1234")
    assert read_regular(tmp_path / "y", 4) == b"1234"
    with pytest.raises(ValueError, match="y must have at most 3 bytes, got 4"):
        read_regular(tmp_path / "y", 3)


def write_all(number, size):
    with open(number, "wb") as stream:
        stream.write(bytes(size))


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
@pytest.mark.parametrize("size", [60_000, 60_001])
def test_what_was_open_already_is_read_by_its_descriptor(folder, size):
    """As a shell gives `<(command)`."""
    out, into = os.pipe()
    write_all(into, size)  # the pipe holds it
    try:
        if size == 60_000:
            assert read_given(f"{folder}/{out}", 60_000) == bytes(size)
        else:
            with pytest.raises(ValueError, match=r"must have at most 60,000 bytes, got more"):
                read_given(f"{folder}/{out}", 60_000)
    finally:
        os.close(out)


def test_a_pipe_of_a_folder_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="must be a regular file, got a pipe"):
        read_given(tmp_path / "pipe", 10)


def test_a_path_for_a_message_has_an_end():
    assert show_path(pathlib.Path("a/b")) == "a/b"
    shown = show_path("/" + "a" * 5000 + "/config.json")
    assert len(shown) < 310
    assert shown.startswith("/aaa")
    assert shown.endswith("aaa/config.json")


@pytest.mark.parametrize("options", [["--file"], ["--lines", "--file"]])
def test_a_pipe_of_a_folder_is_no_file_of_prompts(tmp_path, options, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["generate", *options, str(tmp_path / "pipe")]) == 2
    assert "pipe must be a regular file, got a pipe" in capsys.readouterr().err
