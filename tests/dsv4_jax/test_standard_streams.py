"""Streams that are closed or full, in processes of their own, and what lands where."""

import os
import subprocess
import sys

import pytest

from dsv4_jax import standard_streams

REPORT = """
import faulthandler, os, sys
from dsv4_jax.standard_streams import open_standard_streams, say, takes_answers
notes = open_standard_streams()
with open(sys.argv[1], "w") as file:
    file.write(f"{takes_answers()} ")
    file.flush()
    if sys.argv[2:]:
        faulthandler.dump_traceback(2)  # as native code writes
    say("a note")
    file.write(f"{notes.have_lost} {file.fileno() > 2} {sys.stdin is None}")
print("an answer: \\xe9 \\u4e16 \\udc80", flush=True)
"""


def run(tmp_path, redirections, *native, **environment):
    """(status, stdout, stderr, what the file holds that the process opens)."""
    kept = tmp_path / "file"
    command = f'exec "$@" {redirections}'
    done = subprocess.run(
        ["bash", "-c", command, "x", sys.executable, "-c", REPORT, kept, *native],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )
    return done.returncode, done.stdout, done.stderr.decode(), kept.read_text()


ANSWER = "an answer: é 世 \\udc80\n".encode()


@pytest.mark.parametrize(
    ("redirections", "out", "err", "held"),
    [
        ("", ANSWER, "a note\n", "True False True False"),
        ("2>&-", ANSWER, "", "True True True False"),
        ("<&- 2>&-", ANSWER, "", "True True True True"),
        ("2>/dev/full", ANSWER, "", "True True True False"),
        ("<&-", ANSWER, "a note\n", "True False True True"),
    ],
)
def test_notes_that_cannot_be_written_are_lost_and_counted(tmp_path, redirections, out, err, held):
    """With descriptor 2 closed the next file would get it, and all notes with it."""
    assert run(tmp_path, redirections) == (0, out, err, held)


def test_what_native_code_writes_to_a_closed_descriptor_lands_in_no_file(tmp_path):
    assert run(tmp_path, "2>&-", "native") == (0, ANSWER, "", "True True True False")
    assert "Current thread" in run(tmp_path, "", "native")[2]


@pytest.mark.parametrize(
    ("redirections", "takes", "reason"),
    [
        (">&-", False, "Bad file descriptor"),
        ("<&- >&- 3>&-", False, "Bad file descriptor"),
        (">/dev/null 1</dev/null", False, "Bad file descriptor"),
        (">/dev/full", True, "No space left on device"),
    ],
)
def test_answers_that_cannot_be_written_are_an_error_that_says_so(
    tmp_path, redirections, takes, reason
):
    status, _, err, held = run(tmp_path, redirections)
    assert status != 0
    assert held.startswith(f"{takes} False True")
    assert f"{reason}: 'standard output'" in err


def test_both_closed_is_silent(tmp_path):
    status, out, err, held = run(tmp_path, ">&- 2>&-")
    assert (status != 0, out, err) == (True, b"", "")
    assert held.startswith("False True True")


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii:strict"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONUNBUFFERED": "1", "LC_ALL": "C"},
    ],
)
def test_answers_are_utf8_in_every_locale(tmp_path, environment):
    assert run(tmp_path, "", **environment)[1] == ANSWER


def test_a_library_without_standard_error_says_nothing(monkeypatch, capsys):
    """`print` would take standard output, where it is given None."""
    monkeypatch.setattr(sys, "stderr", None)
    standard_streams.say("a note")
    assert capsys.readouterr().out == ""
