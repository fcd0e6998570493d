"""The README's example runs, and the commands of the documents are ones that the programs take."""

import argparse
import importlib
import json
import pathlib
import re
import shlex

import pytest

import dsv4_jax as ds
from dsv4_jax import cli
from helpers.checkpoints import save_first_layer

pytestmark = pytest.mark.unoptimised

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
SERVING = ROOT / "docs/serving.md"
DOCUMENTS = [
    README,
    *(ROOT / name for name in ("CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
SUBCOMMANDS = {
    "generate",
    "plan",
    "verify",
    "evaluate",
    "sweep",
    "bench",
    "decode",
    "experts",
    "kernels",
    "prefill",
    "serve",
    "batch",
}


def text_of(path):
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


@pytest.fixture(params=["one layer", pytest.param("shipped", marks=pytest.mark.slow)])
def checkpoint(request, tmp_path, monkeypatch):
    """The shipped checkpoint, or random weights of its first layer in its place; says which."""
    if request.param == "one layer":
        save_first_layer(tmp_path)
        monkeypatch.setattr(ds, "SHIPPED_CHECKPOINT", tmp_path)
    return request.param


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint")
def test_the_example_of_an_asynchronous_engine_runs(capsys):
    (example,) = re.findall(
        r"^```python\n(import asyncio.*?)^```", SERVING.read_text(), re.DOTALL | re.MULTILINE
    )
    exec(compile(example, "serving.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:80]} == {"0", "1"}


@pytest.mark.slow
def test_the_example_of_the_readme_runs(checkpoint, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.count(" length\n") == 2
    blocks = "[]" if checkpoint == "one layer" else "[0]"  # the first layer has a window alone
    assert printed.endswith(f"[3 2] (2, 258) {blocks}\n")


def commands_of(text):
    """Shell commands of fences, one a line or joined by &&, and those of code spans."""
    fences = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [part for fence in fences for line in fence.splitlines() for part in line.split("&&")]
    spans = re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
    lines = [line.strip().removesuffix("&") for line in lines]
    return [words for line in [*lines, *spans] if (words := shlex_words(line))]


def shlex_words(line):
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a span that is no command
        return []


def our_commands():
    """(program, arguments, document) of every command of ours in the documents."""
    found = {}
    for path in DOCUMENTS:
        for words in commands_of(text_of(path)):
            program, arguments = pathlib.Path(words[0]).name, words[1:]
            if program == "bench":  # `bench decode`, as the text calls it
                program, arguments = "dsv4-jax", words
            elif program == "python" and arguments[:1] == ["-m"]:
                program, arguments = arguments[1], arguments[2:]
            elif program != "dsv4-jax":
                continue
            found[program, *arguments] = path
    return [
        pytest.param(program, arguments, id=" ".join([path.name, program, *arguments]))
        for (program, *arguments), path in found.items()
    ]


class Parsed(Exception):
    """The command line was understood; nothing runs."""


@pytest.fixture
def stop_after_parsing(monkeypatch):
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        parse_args(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)


@pytest.mark.parametrize(("program", "arguments"), our_commands())
def test_a_documented_command_is_understood(program, arguments, monkeypatch, stop_after_parsing):
    if program == "dsv4-jax":
        arguments = arguments or ["--help"]
        if arguments[-1] in SUBCOMMANDS:  # named without arguments, some of which it may need
            arguments = [*arguments, "--help"]
        run, arguments = cli.main, [arguments]
    else:
        module = importlib.import_module(program)
        if "argparse" not in vars(module):
            assert callable(module.main)
            return
        monkeypatch.setattr("sys.argv", [program, *arguments])
        run, arguments = module.main, []
    with pytest.raises((Parsed, SystemExit)) as stopped:
        run(*arguments)
    assert isinstance(stopped.value, Parsed) or stopped.value.code == 0


def test_the_documents_name_commands_of_every_kind():
    """Else a change of their form would leave nothing to look at."""
    programs = [param.values[0] for param in our_commands()]
    assert programs.count("dsv4-jax") > 10
    assert sum(program.startswith("benchmarks.") for program in programs) > 8
