"""Environments that a command is started in: refused in one line, or taken as what they say."""

import os
import subprocess
import sys

import jax
import pytest

from dsv4_jax import runtime
from dsv4_jax.cli import environment, main, values

LEFT_OUT = ("JAX_COMPILATION_CACHE_DIR", "JAX_PLATFORMS", "JAX_PLATFORM_NAME", "XLA_FLAGS")
PLATFORMS = {
    "cuda": "x: JAX_PLATFORMS=cuda asks for a GPU, and NVIDIA's driver (libcuda.so.1) is not found",
    "nonsense": "x: JAX cannot start: Unable to initialize backend 'nonsense': ",
    "cpu,rocm": "the environment has JAX_PLATFORMS=cpu,rocm, which may be left out",
    "cuda,cpu": None,
    "cpu,cuda": None,
    "": None,
}
"""What is said of them on a machine without a GPU; None is that JAX takes its CPU."""

FORKED = """
import os, sys, jax
from dsv4_jax import runtime
from dsv4_jax.cli.ending import run_to_status
def start():
    runtime.look_for_no_gpu()
    return len(jax.devices()) - 1
for platforms in sys.argv[1:]:
    if not os.fork():
        os.environ["JAX_PLATFORMS"] = platforms
        jax.config.update("jax_platforms", platforms)
        os._exit(run_to_status("x", start))
    print("status", os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""
"""Starts JAX on each of the platforms, in a fork of a process that has imported it."""


def run(code, *arguments, **given):
    """(status, stdout, stderr) of a process whose environment has that much of JAX alone."""
    own = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        env=own | given,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.slow
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="of a machine without a GPU")
def test_platforms_without_a_device_are_one_line():
    status, out, err = run(FORKED, *PLATFORMS)
    assert (status, out) == (0, ""), err
    lines = iter(err.splitlines())
    for platforms, said in PLATFORMS.items():
        if said is not None:
            assert said in next(lines), platforms
        assert next(lines) == f"status {0 if said is None else 2}", platforms


def test_an_assertion_of_jax_that_it_has_no_device_is_told(monkeypatch):
    """jax 0.12 fails one where the only platform is CUDA and no GPU can be seen."""

    def fail():
        raise AssertionError

    assert runtime.find_start_problem(AssertionError()) is None
    assert runtime.find_start_problem(RuntimeError("another\nof two lines")) is None
    monkeypatch.setattr(runtime.compat, "has_started", lambda: False)
    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert runtime.find_start_problem(AssertionError()) == (
        "JAX cannot start: it finds no device; the environment has JAX_PLATFORMS=cuda, which may "
        "be left out"
    )


def test_what_jax_refuses_as_it_is_imported_is_one_line():
    status, out, err = run(
        "import sys; from dsv4_jax.__main__ import main; sys.argv[1:] = ['plan']; sys.exit(main())",
        JAX_ENABLE_X64="maybe",
    )
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("dsv4-jax: the environment must be one that jax takes: ")
    assert "JAX_ENABLE_X64" in line


@pytest.fixture
def before_jax(monkeypatch):
    """As if JAX had not started; what is changed of its configuration is changed back."""
    monkeypatch.setattr(runtime.compat, "has_started", lambda: False)
    monkeypatch.setattr(environment, "look_for_no_gpu", lambda: None)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    kept = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", kept)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--no_flag_of_xlas=1", "Unknown flag in XLA_FLAGS: --no_flag_of_xlas=1"),
        ("--xla_force_host_platform_device_count=x", "Couldn't interpret value x for flag"),
    ],
)
def test_flags_that_would_end_the_process_are_refused(before_jax, monkeypatch, flags, said):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")  # hides XLA's reason from the process itself
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(ValueError, match=f"XLA_FLAGS must be flags that XLA knows: {said}"):
        environment.prepare_jax()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    environment.prepare_jax()


def test_numbers_of_64_bits_are_refused(before_jax):
    with jax.enable_x64(True), pytest.raises(ValueError, match="JAX_ENABLE_X64 must be off"):
        environment.prepare_jax()


def test_a_cache_that_cannot_be_written_is_done_without(before_jax, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file" / "xla"))
    environment.prepare_jax()
    assert jax.config.jax_compilation_cache_dir is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[compiled programs are not kept: [Errno 20] Not a directory")
    environment.prepare_jax()
    assert "set JAX_COMPILATION_CACHE_DIR]" in capsys.readouterr().err
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/folder")
    environment.prepare_jax()
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/folder"
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "new" / "xla"))
    environment.prepare_jax()
    assert capsys.readouterr().err == ""
    assert list((tmp_path / "new" / "xla").iterdir()) == []


@pytest.mark.parametrize("command", [["plan", "tiny"], ["bench", "serve", "--model-x"]])
def test_what_computes_nothing_asks_nothing_of_jax(monkeypatch, capsys, command):
    monkeypatch.setattr("dsv4_jax.cli.prepare_jax", None)
    assert main(command) == (0 if command[0] == "plan" else 2)


@pytest.mark.slow
def test_a_text_beyond_ascii_is_utf8_in_the_c_locale():
    """Python takes UTF-8 there by itself, unless PYTHONUTF8 keeps it from that."""
    texts = ["café", "世界", "\N{GRINNING FACE}"]
    code = "import sys; from dsv4_jax.cli.values import utf8_text; "
    code += "print(sys.getfilesystemencoding(), *map(ascii, map(utf8_text, sys.argv[1:])))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    status, out, err = run(code, *map(str.encode, texts), **locale)
    assert out.split() == ["ascii", *map(ascii, texts)], err
    assert status == 0


@pytest.mark.parametrize("text", ["caf\udce9", "\ud800"])
def test_what_is_no_utf8_is_refused(text):
    with pytest.raises(values.argparse.ArgumentTypeError, match="must be UTF-8, got "):
        values.utf8_text(text)
