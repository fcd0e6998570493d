"""What a newcomer types first: what is too large is refused, and help says all there is to say."""

import argparse
import gc
import io
import os
import pathlib
import re
import subprocess
import sys
import time
import types

import jax
import pytest

import dsv4_jax as ds
from dsv4_jax import __main__, cli, runtime
from dsv4_jax.cli import bench, main, memory
from dsv4_jax.runtime import Memory
from dsv4_jax.serving import engine

GIB = 2**30
ROOT = pathlib.Path(__file__).parents[3]


# Memory.


def have(monkeypatch, gib):
    """A machine with so much free memory."""
    found = Memory("this machine", int(gib * GIB), 64 * GIB)
    monkeypatch.setattr(memory, "find_memory", lambda: found)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["bench", "decode", "flash_slim"], "weights 29."),
        (["bench", "decode", "flash"], "weights 529."),
        (["bench", "prefill", "flash_slim"], "weights 29."),
        (["bench", "kernels", "flash", "--contexts", "1048576"], "cache 3.44 GiB"),
        (["bench", "decode", "pro", "--parts", "cache"], "cache 8.1 MiB"),
        (
            ["generate", "shipped", "x"],
            "weights 4.8 MiB",
        ),  # without the draft block, which nobody asked for
        (["generate", "shipped", "x", "--draft-tokens", "1"], "weights 7.1 MiB"),
        (["verify"], "weights 7.1 MiB"),
        (["evaluate"], "weights 9.1 MiB"),
        (["sweep", "none", "--contexts", "256", "--out", "{folder}/x.jsonl"], "weights 9.1 MiB"),
        (
            ["convert", str(ds.SHIPPED_CHECKPOINT), "{folder}/x", "--weights", "released"],
            "a tensor",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_made(
    monkeypatch, capsys, tmp_path, arguments, needed
):
    have(monkeypatch, 0.9)
    for name in ("copy_bandwidth", "random_params"):
        monkeypatch.setattr(bench, name, None)
    for module in (engine, cli.verify, cli.evaluate, cli.sweep):
        monkeypatch.setattr(module, "load_checkpoint", None)
    assert main([argument.format(folder=tmp_path) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert re.search(
        r": needs [\d.]+ GiB \(.*\), and this machine has 921\.6 MiB of 64\.00 GiB free", line
    )
    assert needed in line
    assert "; take " in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (7_300_000, "7.0 MiB"),
     (GIB - 1, "1,024.0 MiB"), (GIB, "1.00 GiB"), (1234 * GIB, "1,234.00 GiB")],
)  # fmt: skip
def test_bytes_are_told_in_a_unit_that_fits_them(count, told):
    assert runtime.shown_bytes(count) == told


class Stopped(Exception):
    pass


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")
@pytest.mark.parametrize("what", ["decode", "kernels", "prefill"])
def test_without_a_gpu_a_benchmark_takes_the_tiny_model(monkeypatch, capsys, what):
    have(monkeypatch, 2)
    seen = []

    def stop(*arguments, **options):
        seen.append(arguments[0])
        raise Stopped

    for module in (bench, bench.bench_decode):
        monkeypatch.setattr(module, "copy_bandwidth", lambda: 1e9)
        monkeypatch.setattr(module, "random_params", stop)
    monkeypatch.setattr(bench.kernels, "bench_kernels", stop)
    with pytest.raises(Stopped):
        main(["bench", what])
    assert seen[0].hidden_size == ds.DSV4Config.tiny().hidden_size
    assert re.fullmatch(
        r"\[needs 1\.0\d GiB \(.*XLA 1\.00 GiB\); this machine .*", capsys.readouterr().err[:-1]
    )


def test_the_least_of_what_limits_a_process_counts(monkeypatch):
    fields = {
        "/proc/meminfo": {"MemAvailable": 8 * 2**20, "MemTotal": 16 * 2**20},
        "/proc/self/status": {"VmSize": 2**20},
        "/sys/fs/cgroup/memory.stat": {"inactive_file": GIB},
    }
    numbers = {"/sys/fs/cgroup/memory.max": 6 * GIB, "/sys/fs/cgroup/memory.current": 4 * GIB}
    limit = [-1]
    monkeypatch.setattr(runtime, "_read_fields", lambda path: fields.get(path, {}))
    monkeypatch.setattr(runtime, "_read_number", numbers.get)
    monkeypatch.setattr(runtime.resource, "getrlimit", lambda _: (limit[0], -1))
    assert runtime.host_memory() == Memory("this control group", 3 * GIB, 6 * GIB)
    limit[0] = 4 * GIB
    assert runtime.host_memory() == Memory("this process (ulimit -v)", int(2.75 * GIB), 4 * GIB)
    limit[0] = -1
    numbers.clear()
    assert runtime.host_memory() == Memory("this machine", 8 * GIB, 16 * GIB)
    fields.clear()
    assert runtime.host_memory() is None


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")
def test_a_process_of_little_memory_is_refused_or_serves(tmp_path):
    """`ulimit -v`: 1.5 GiB are too few for JAX to start, 4 GB enough for a first command.

    On two processors: libraries start threads for each, and stacks are part of what is limited.
    """
    processors = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))

    def run(kib, *arguments):
        shell = f'ulimit -v {kib}; exec taskset --cpu-list {processors} "$@"'
        command = ["bash", "-c", shell, "x", sys.executable, "-m"]
        return subprocess.run(
            [*command, "dsv4_jax", *arguments], capture_output=True, text=True, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    done = run(2**20 * 3 // 2, "generate", "shipped", "The import", "--max-new-tokens", "4")
    assert done.returncode == 1
    assert "this process (ulimit -v) has" in done.stderr
    done = run(4_000_000, "generate", "shipped", "The import", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    done = run(4_000_000, "bench", "decode", "flash_slim")
    assert done.returncode == 1
    assert "take config tiny" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="of a machine without a GPU")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            "from dsv4_jax import runtime; runtime.look_for_no_gpu()", marks=pytest.mark.slow
        ),
        pytest.param("import dsv4_jax as ds; ds.DSV4Config.tiny()", marks=pytest.mark.slow),
        "from dsv4_jax import serving",
    ],
)
def test_without_a_gpu_nothing_is_said_about_one(code):
    """The plugin that compiles for GPUs looks for cuDNN when JAX starts, unless it is left out."""
    code += "; import jax; print(jax.devices()[0].platform)"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("cpu\n", "")


@pytest.mark.slow
def test_a_plan_says_nothing_of_cudnn():
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_jax", "plan", "tiny", "--context", "1K"],
        capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# Help.


def parsers(parser):
    """This parser and those of its commands, by the words that lead there."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


PARSERS = {parser.prog: parser for parser in parsers(cli.make_parser())}


@pytest.mark.parametrize("command", PARSERS)
def test_help_describes_every_option_and_shows_its_default(command):
    formatter = PARSERS[command]._get_formatter()
    for action in PARSERS[command]._actions:
        if isinstance(action, argparse._SubParsersAction):
            assert all(choice.help for choice in action._choices_actions)
            continue
        if action.help == argparse.SUPPRESS:  # a former name
            continue
        assert action.help, f"{command} {action.dest} has no help"
        if not action.option_strings or action.nargs == 0 or action.required:
            continue
        shown = formatter._expand_help(action)
        assert "(default: " in shown or "if not given" in shown, f"{command} {action.dest}: {shown}"
        told = shown.count("(default") + ("if not given" in shown)
        assert told == 1, f"{command} {action.dest} tells its default {told} times: {shown}"
        assert "None" not in shown
        assert "PosixPath" not in shown


@pytest.mark.parametrize("words", [["--version"], ["--help"], [], ["--nonsense"], ["nonsense"]])
def test_what_computes_nothing_comes_without_jax(words):
    """Its import takes a second or more."""
    code = (
        "import sys; from dsv4_jax import __main__\n"
        f"sys.argv[1:] = {words}\n"
        "try: __main__.main()\n"
        "except SystemExit: pass\n"
        "print('imported', 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "imported False", done.stderr


class Stream(io.StringIO):
    is_terminal = True

    def isatty(self):
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_told_of_imports_that_take_long(monkeypatch, is_terminal):
    stream, waited = Stream(), []
    stream.is_terminal = is_terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(__main__, "_FIRST_LINE_S", 0.01)
    monkeypatch.setattr(cli, "import_command", lambda words: waited.append(time.sleep(0.3)))
    monkeypatch.setattr(cli, "main", lambda: 0)
    notes = types.SimpleNamespace(have_lost=False)
    monkeypatch.setattr(__main__, "open_standard_streams", lambda: notes)
    assert __main__.main() == 0
    gc.unfreeze()  # what a process of its own would keep
    assert waited
    told = "[importing jax, which takes some seconds]\n" if is_terminal else ""
    assert stream.getvalue() == told


@pytest.mark.slow
def test_a_command_imports_no_other():
    """Help comes at once, and a command does not wait for what it does not run."""
    code = (
        "import sys; from dsv4_jax import cli\n"
        "for words in [], ['plan', '--help'], ['verify', '--x']:\n"
        "    try: cli.main(words)\n"
        "    except SystemExit: pass\n"
        "    found = {m.split('.')[2] for m in sys.modules if m.startswith('dsv4_jax.cli.')}\n"
        "    print('imported', *sorted(found))\n"
        "assert 'huggingface_hub.hf_api' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    lines = [one.split()[1:] for one in done.stdout.splitlines() if one.startswith("imported")]
    found = [set(line) & cli._COMMANDS.keys() for line in lines]
    assert found == [set(), {"plan"}, {"plan", "verify"}]
    assert done.returncode == 0, done.stderr


def test_commands_have_summaries_without_docstrings(monkeypatch):
    """`python -OO` drops docstrings."""
    for module in (cli, cli.bench, cli.convert, cli.generate, cli.plan, cli.verify):
        monkeypatch.setattr(module, "__doc__", None)
    shown = " ".join(cli.make_parser().format_help().split())
    for words in ("Completes prompts", "what fits one GPU", "Times decode", "Checks a", "Converts"):
        assert words in shown


def test_the_version_is_said(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"dsv4-jax {ds.__version__} (jax {jax.__version__}, P"
    )
