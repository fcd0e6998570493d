"""How commands end whatever they are given: a status and a line, never a traceback."""

import argparse
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
from hypothesis import HealthCheck, given, settings

import dsv4_jax as ds
from dsv4_jax import cli
from dsv4_jax.cli import (
    batch,
    bench,
    convert,
    evaluate,
    generate,
    main,
    plan,
    serve,
    sweep,
    verify,
)
from dsv4_jax.cli.parser import ELSEWHERE, Parser, UsageError
from dsv4_jax.serving import engine
from dsv4_jax.step.sampling import MAX_TOKENS
from helpers import bad_files

pytestmark = pytest.mark.usefixtures("interrupts_arrive")

SAVED = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny"
SHIPPED = pathlib.Path(ds.SHIPPED_CHECKPOINT)
COMMANDS = {
    ("generate", "shipped", "a prompt"): generate,
    ("plan", "tiny"): plan,
    ("verify",): verify,
    ("convert", "a", "b", "--weights", "released"): convert,
    ("bench", "decode"): bench,
    ("bench", "kernels"): bench,
    ("bench", "prefill"): bench,
    ("bench", "serve", "http://127.0.0.1:1"): bench,
    ("serve",): serve,
    ("batch", "a", "b"): batch,
    ("evaluate",): evaluate,
    ("sweep", "none", "--out", "x.jsonl"): sweep,
}
"""Words of each command that are enough for it."""


def message_of(capsys, *arguments, status=2):
    """The one line that a command says."""
    assert main([*map(str, arguments)]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.fixture
def nothing_loads(monkeypatch):
    """What a command does after its arguments are checked fails."""
    for module, names in ((engine, ("load_checkpoint",)), (bench, ("copy_bandwidth",))):
        for name in names:
            monkeypatch.setattr(module, name, None)


# Options.


@pytest.mark.parametrize("arguments", [("plan", "tiny", "--cont", "4"), ("verify", "--req", "1")])
def test_options_are_not_abbreviated(capsys, arguments):
    line = message_of(capsys, *arguments)
    assert line.startswith(f"dsv4-jax: unrecognized arguments: {arguments[-2]}")


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (["generate", "x", "--max_new_tokens", "3"], ["--max_new_tokens", "--max-new-tokens"]),
        (["generate", "x", "--max-tokens=3"], ["--max-tokens", "--max-new-tokens"]),
        (["serve", "x", "--tp", "2"], ["--tp", "--model-shards"]),
        (["serve", "x", "--max-model-len", "2"], ["--max-model-len", "--max-context-tokens"]),
        (["plan", "x", "--max-model-len", "2"], ["--max-model-len", "--context"]),
        (["plan", "x", "--gpus", "2"], ["--gpus", "--gpu"]),
        (["bench", "serve", "http://x", "--rates", "2"], ["--rates", "--rate"]),
        (["serve", "x", "--zzz"], None),
        (["serve", "x", "--mode", "2"], ["--mode", "--model-name"]),  # `--model` is an old name
        (["serve", "x", "-9"], None),
    ],
)
def test_an_option_that_there_is_not_brings_one_to_mind(capsys, arguments, hints):
    line = message_of(capsys, *arguments)
    assert line.startswith("dsv4-jax: unrecognized arguments: ")
    if hints is None:
        assert "may be meant" not in line
    else:
        assert line.endswith("; {} may be meant for {}".format(*hints))


def test_options_of_other_servers_stand_for_options_that_there_are():
    commands = cli.make_parser()._subparsers._group_actions[0].choices.values()
    known = {name for one in commands for name in one._option_string_actions}
    for foreign, ours in ELSEWHERE.items():
        assert foreign not in known
        assert set(ours) <= known


NOT_FITTING = {
    "generate x --max-new-tokens": [2**40],
    "generate x --top-k": [2**31, "9" * 5000],
    "generate x --seed": [2**64],
    "generate x --temperature": ["nan", "1e39"],
    "generate x --top-p": ["inf"],
    "verify --requests": [10**30],
    "verify --seed": [-1],
    "convert a b --weights released --shard-gib": ["inf", "nan"],
    "plan tiny --context": [-5, 2**31],
    "plan tiny --requests": [-3],
    "plan tiny --gpu-gib": ["nan", -3],
    "plan tiny --weights-gib": [-100],
    "bench decode --batch": ["1,,2", -1],
    "bench decode --contexts": [10**30],
    "bench decode --budget-s": ["nan"],
    "bench kernels --contexts": [0],
    "bench prefill --chunk": [0],
    "bench serve http://127.0.0.1:1 --prompt-tokens": [f"1,{MAX_TOKENS + 1}"],
    "bench prefill --tokens": [-64],
}


@pytest.mark.parametrize(
    ("command", "value"),
    [(command, value) for command, values in NOT_FITTING.items() for value in values],
)
def test_a_number_that_does_not_fit_is_refused_by_its_option(capsys, command, value):
    *_, option = arguments = command.split()
    line = message_of(capsys, *arguments, value)
    assert f"argument {option}: must be " in line
    assert str(value)[:70] in line
    assert len(line) < 300


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "plan tiny --context 128KB",
            "--context: must be a whole number from 1 to 2147483647, such as 131072, 128K or 1M, "
            "got '128KB'",
        ),
        ("plan tiny --gpu-gib 80GB", "such as 80, 80GiB or 81920MiB, got '80GB'"),
        ("plan tiny --host-cache 64GB", "such as 4096, 512MiB or 64GiB, got '64GB'"),
        ("bench decode --contexts 8K,1m", "131072, 128K or 1M, got '1m' in '8K,1m'"),
        ("serve --max-body-bytes 64MB", "131072 or 512MiB, got '64MB'"),
        ("serve --port web", "must be a whole number from 0 to 65535, got 'web'"),
        ("plan tiny --context 0", "must be a whole number from 1 to 2147483647, got '0'"),
    ],
)
def test_a_number_in_a_unit_that_there_is_not_is_told_of_those_that_there_are(capsys, words, told):
    line = message_of(capsys, *words.split())
    assert line.endswith(told), line


def test_plan_refuses_more_blocks_than_a_table_can_number(capsys, tmp_path):
    saved = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny" / "config.json"
    contents = json.loads(saved.read_text()) | {"max_position_embeddings": 2**23}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    line = message_of(capsys, "plan", tmp_path, "--context", 2**23, "--requests", 2**16)
    assert "--requests 65536 of --context 8388608 take" in line
    assert main(["plan", "tiny", "--context", str(2**20), "--requests", "100"]) == 0
    assert not re.search(r"-\d", capsys.readouterr().out)


def test_a_load_of_more_tokens_than_a_machine_holds_is_refused(capsys):
    sizes = ("--requests", 10**6, "--prompt-tokens", "1,16777216", "--model", "x")
    line = message_of(capsys, "bench", "serve", "http://127.0.0.1:1", *sizes)
    assert "--requests 1000000 times the longest of --prompt-tokens 1,16777216 must be" in line


@pytest.mark.parametrize("what", ["decode", "kernels", "prefill"])
def test_a_file_for_figures_needs_its_folder_before_work(capsys, tmp_path, nothing_loads, what):
    small = ("bench", what, "tiny")
    target = tmp_path / "nope" / "x.json"
    line = message_of(capsys, *small, "--json", target)
    assert (
        f"argument --json: must be a file in a folder that is there; make {target.parent}" in line
    )
    assert list(tmp_path.iterdir()) == []
    assert "this is a folder" in message_of(capsys, *small, "--json", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--plot", "{folder}/x.txt"), "argument --plot: must end in .png or .svg"),
        (("decode", "--plot", "{folder}/no/x.svg"), "argument --plot: must be a file in a folder"),
        (("kernels", "--contexts", 2**30), "contexts must be in 1..1048576, got 1073741824"),
        (("prefill", "--tokens", 2**30), "tokens must be in 1..1048576, got 1073741824"),
        (("prefill", "--tokens", "100", "--chunk", "7"), "chunk must divide tokens, got 7 and 100"),
    ],
)
def test_bench_refuses_before_work(capsys, tmp_path, nothing_loads, arguments, message):
    arguments = [str(argument).format(folder=tmp_path) for argument in arguments]
    assert message in message_of(capsys, "bench", *arguments[:1], "tiny", *arguments[1:])


def test_a_benchmark_of_no_model_is_refused(capsys, tmp_path, nothing_loads):
    assert "config must be one of" in message_of(capsys, "bench", "decode", tmp_path / "no")


def test_a_plot_without_matplotlib_is_refused_before_work(
    capsys, tmp_path, nothing_loads, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    small = ("bench", "decode", "tiny", "--plot", tmp_path / "x.svg")
    assert "a plot needs matplotlib" in message_of(capsys, *small)


@pytest.mark.parametrize(
    "command", [("generate", "shipped", "a"), ("verify",), ("bench", "decode", "tiny")]
)
def test_a_mesh_of_more_devices_than_there_are_is_refused_before_work(
    capsys, nothing_loads, command
):
    mesh = ("--data-shards", 2, "--model-shards", 4)
    message = "--data-shards 2 --model-shards 4 is a mesh of 8 devices, and JAX has 1; on CPUs, "
    assert message + "XLA_FLAGS=" in message_of(capsys, *command, *mesh)
    message = "argument --model-shards: must be a whole"
    assert message in message_of(capsys, *command, "--model-shards", 0)


# Prompts.


def test_a_prompt_that_is_no_utf8_is_refused(capsys):
    prompt = os.fsdecode(b"caf\xe9")
    line = message_of(capsys, "generate", "shipped", "good", prompt)
    assert line == r"dsv4-jax generate: argument PROMPT: must be UTF-8, got b'caf\xe9'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x" * 5000], "prompt 1 of 5001 tokens and --max-new-tokens 256"),
        (["x", "y" * 4000], "prompt 2 of 4001 tokens"),
        (["x", "--max-new-tokens", "4096"], "max_position_embeddings=4096 together, got 4098"),
        (["x", "--top-p", "0"], "top_p must be above 0"),
    ],
)
def test_prompts_are_checked_before_weights_are_read(capsys, nothing_loads, arguments, message):
    assert message in message_of(capsys, "generate", "shipped", *arguments)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["shiped", "a b"], "did you mean shipped? As a text: {} shipped shiped 'a b'"),
        (["DeepSeek-V4-Flash"], "did you mean deepseek-ai/DeepSeek-V4-Flash? As a text: "),
        (["flash", "x"], "`bench` alone; its checkpoint is deepseek-ai/DeepSeek-V4-Flash; as a"),
        (["tiny"], "got 'tiny', which is a name for `plan` and `bench` alone; as a text: "),
        (
            ["The if", "shipped"],
            "got 'The if'; the checkpoint comes before the texts: {} shipped 'The if'. As texts: "
            "{} shipped 'The if' shipped",
        ),
        (["The if", "deepseek-ai/DeepSeek-V4-Flash"], "the checkpoint comes before the texts: "),
        (["The if", str(SAVED), "and"], "the texts: {} " + f"{SAVED} 'The if' and. As texts: "),
        (["./nosuch", "hello"], "no config.json at nosuch; name a directory that has one"),
        (["nosuch/", "hello"], "no config.json at nosuch; name a directory that has one"),
        (["/nowhere/at/all", "hello"], "no config.json at /nowhere/at/all; name a directory that"),
    ],
)
def test_a_checkpoint_that_is_misspelt_or_not_first_is_no_prompt(
    capsys, nothing_loads, words, told
):
    line = message_of(capsys, "generate", *words)
    assert told.replace("{}", "dsv4-jax generate") in line


@pytest.mark.parametrize("words", [["x/ y/"], ["ship it"], ["x" * 5000, "y" * 5000, "\0"], ["and"]])
def test_a_text_that_is_no_name_is_a_prompt(words):
    args = cli.make_parser("generate").parse_args(["generate", *words])
    generate._settle_prompts(args)
    assert (args.checkpoint, args.prompt) == (None, words)


def test_a_tokenizer_of_another_model_is_refused_before_weights(capsys, tmp_path, nothing_loads):
    fields = json.loads((SHIPPED / "config.json").read_text()) | {"vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"bos_token_id": 0}))
    shutil.copy(SHIPPED / "tokenizer.json", tmp_path)
    folder = tmp_path
    assert "eos_token_id must be at most 49" in message_of(capsys, "generate", folder, "x")
    (tmp_path / "config.json").write_text(
        json.dumps(fields | {"bos_token_id": 0, "eos_token_id": 1})
    )
    assert "gives prompt 1 the token 256" in message_of(capsys, "generate", folder, "x")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is no tokenizer" in message_of(capsys, "generate", folder, "x")


def test_weights_are_checked_and_links_followed_as_told(capsys, monkeypatch):
    seen = []

    def load(path, **options):
        seen.append((options["check_weights"], options["follow_links"]))
        raise ValueError("enough")

    for module in (engine, verify):
        monkeypatch.setattr(module, "load_checkpoint", load)
    for words in (
        ("generate", "shipped", "x"),
        ("generate", "shipped", "x", "--check-weights"),
        ("generate", "shipped", "x", "--no-check-weights", "--follow-links"),
        ("verify", "--follow-links"),
    ):
        assert main(list(words)) == 2
        assert capsys.readouterr().err.endswith(": enough\n")
    assert seen == [(None, False), (True, False), (False, True), (False, True)]


# Ends.


@pytest.fixture
def ending(monkeypatch):
    """Lets `plan` end by an error."""

    def set_error(error):
        def run(args):
            print("half of it")
            raise error

        monkeypatch.setattr(plan, "run", run)

    return set_error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "dsv4-jax plan: interrupted"),
        (PermissionError(13, "no", "/x"), 2, "dsv4-jax plan: [Errno 13] no: '/x'"),
        (NotImplementedError("not here"), 2, "dsv4-jax plan: not here"),
        (MemoryError(), 1, "dsv4-jax plan: not enough memory"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), 1, "dsv4-jax plan: RESOURCE_EXHAUSTED"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_an_error_is_a_status_and_a_line(capsys, ending, error, status, said):
    ending(error)
    assert main(["plan", "tiny"]) == status
    captured = capsys.readouterr()
    assert captured.out == "half of it\n"
    assert captured.err.strip() == said


def test_ctrl_c_while_options_are_read_is_status_130(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "use_compilation_cache", interrupt)
    assert message_of(capsys, "plan", "tiny", status=130) == "dsv4-jax: interrupted"


@pytest.mark.parametrize("lost", ["stdout", "stdout and stderr"])
def test_a_reader_that_has_gone_ends_a_command_quietly(monkeypatch, lost):
    """As `dsv4-jax plan flash | head -1` does, and `2>&1 | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream, open(os.devnull, "w") as quiet:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream if "stderr" in lost else quiet)
        assert main(["plan", "tiny"]) == 141
        if "stderr" in lost:
            assert main(["plan", "no such thing"]) == 2
        stream.write("what is flushed at the end")  # goes nowhere, and does not raise


def test_a_closed_output_is_refused_before_work(capsys, monkeypatch, nothing_loads, tmp_path):
    """But for commands that write nothing there."""
    with open(os.devnull) as stream:  # for reading, as a closed one is kept
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["generate", "shipped", "x"]) == 2
        monkeypatch.setattr(sys, "stdout", None)
        assert main(["verify"]) == 2
        assert main(["batch", str(tmp_path / "no"), str(tmp_path / "answers")]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    for line, command in ((first, "generate"), (second, "verify")):
        assert line.startswith(f"dsv4-jax {command}: standard output must be open for writing")
    assert "No such file" in third


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"]])
def test_a_help_that_cannot_be_written_is_an_error(capsys, monkeypatch, arguments):
    with pathlib.Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(arguments) == 2
        assert "No space left on device" in capsys.readouterr().err


def test_standard_input_that_is_closed_is_refused(capsys, monkeypatch, nothing_loads):
    monkeypatch.setattr(sys, "stdin", None)
    line = message_of(capsys, "generate", "--file", "-")
    assert "--file - reads standard input, which is closed" in line
    assert "there must be a prompt" in message_of(capsys, "generate")


@pytest.mark.parametrize(
    ("code", "status"),
    [("0", 0), ("__main__.say('a note') or 0", 2), ("__main__.say('a note') or 1", 1)],
)
def test_notes_that_are_lost_are_told_by_the_status(code, status):
    """A command does its work without them; 2 takes the place of 0."""
    code = (
        "import sys, types; from dsv4_jax import __main__; "
        "own = {'import_command': len}; "
        f"sys.modules['dsv4_jax.cli'] = types.SimpleNamespace(main=lambda: {code}, **own); "
        "sys.exit(__main__.main())"
    )
    command = ["bash", "-c", 'exec "$@" 2>/dev/full', "x", sys.executable, "-c", code]
    assert subprocess.run(command).returncode == status


def test_text_that_a_terminal_cannot_show_is_shown_by_its_number(monkeypatch, tmp_path):
    file = tmp_path / "out"
    with file.open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(plan, "run", lambda args: print("é") or 0)
        assert main(["plan", "tiny"]) == 0
    assert file.read_text() == "\\xe9\n"


def start(*arguments, **options):
    command = [sys.executable, "-m", "dsv4_jax", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "delay_s"),
    [
        *(("generate", delay_s) for delay_s in (4.0, 6.0, 9.0, 14.0)),
        ("batch", 9.0),
        ("evaluate", 9.0),
    ],
)
def test_ctrl_c_ends_a_process_with_one_line(tmp_path, command, delay_s):
    """While it imports, loads, compiles or draws; in the first second Python itself may end."""
    body = {"model": "shipped", "prompt": "The", "max_tokens": 3000}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(request))
    rest = {
        "generate": ("The", "--max-new-tokens", "3000"),
        "batch": (str(tmp_path / "in"), str(tmp_path / "out")),
        "evaluate": (),
    }
    nothing_compiled = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with start(
        command, "shipped", *rest[command], stdout=subprocess.DEVNULL, env=nothing_compiled
    ) as process:
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=8)
    assert process.returncode == 130
    assert b"interrupted" in err.splitlines()[-1]
    assert b"KeyboardInterrupt" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "statuses"),
    [(["plan", "flash"], {141}), (["generate", "shipped", "The", "--max-new-tokens", "40"], {141})],
)
def test_a_closed_pipe_ends_a_process_quietly(arguments, statuses):
    with start(*arguments, stdout=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode in statuses
    assert b"BrokenPipe" not in err


@pytest.mark.slow
def test_bytes_that_are_no_utf8_on_the_command_line_of_a_process():
    with start("generate", "shipped", b"caf\xe9", stdout=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, b"")
    assert b"must be UTF-8, got b'caf\\xe9'" in err


STREAMS = {
    ">&-": (2, 2),
    "2>&-": (0, 0),
    "<&-": (0, 0),
    ">/dev/full": (2, 2),
    ">/dev/full 2>/dev/full": (2, 2),
    "<&- >&- 2>&-": (2, 2),
    "a reader that has gone": (141, 141),
}
"""Statuses of `plan` and of `convert`, which say nothing on standard error if they are done."""


@pytest.mark.slow
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("command", ["plan", "convert"])
def test_streams_that_are_closed_or_full_are_told_by_a_line_and_the_status(
    tmp_path, command, streams
):
    """Nothing lands in a file that another descriptor would have had, and nobody is left."""
    arguments = ["plan", "tiny"] if command == "plan" else ["convert", str(SAVED), "out"]
    arguments += ["--weights", "bfloat16"] * (command == "convert")
    redirections = "" if "gone" in streams else streams
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody, open(tmp_path / "said", "wb") as said:
        done = subprocess.run(
            ["bash", "-c", f'exec "$@" {redirections}', "x", sys.executable, "-m", "dsv4_jax",
             *arguments],
            stdout=nobody if "gone" in streams else subprocess.DEVNULL, stderr=said,
            stdin=subprocess.DEVNULL, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
    assert done.returncode == STREAMS[streams][command == "convert"]
    lines = (tmp_path / "said").read_text().splitlines()
    assert len(lines) <= 1
    assert all(f"dsv4-jax {command}: " in line for line in lines)
    made = {path.name for path in tmp_path.iterdir()} - {"said"}
    refused = streams in (">&-", "<&- >&- 2>&-")  # before work
    assert made == ({"out"} if command == "convert" and not refused else set())
    for file in tmp_path.glob("out/*.json"):
        json.loads(file.read_text())


# By the thousand.


def parser_of(words):
    """The parser that takes these words, as `main` makes it."""
    parser = Parser(prog="dsv4-jax")
    commands = parser.add_subparsers(dest="command", required=True)
    COMMANDS[words].add_arguments(commands.add_parser(words[0]))
    return parser


def options_of(parser, words):
    """Every option of a command that takes a value."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = next(word for word in words if word in action.choices)
            yield from options_of(action.choices[chosen], words)
        elif action.option_strings and action.nargs is None:
            yield action


def attempt(parser, words):
    """What the parser gives, and the message by which it refuses."""
    try:
        return parser.parse_args(words), None
    except UsageError as error:
        return None, str(error)


def bytes_of(text):
    """What was on the command line of a process, where Python makes that text of it."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode(errors="replace")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["generate", "shipped", "a prompt", "--file=--"],
            "argument --file: must be a value, got '--'",
        ),
        (["bench", "decode", "--points=1@2,1"], "one or more, got '1@2,1'"),
        (["bench", "decode", "--points=1@2,x@2"], "got 'x', in '1@2,x@2'"),
    ],
)
def test_values_that_are_refused_whole(words, said):
    """`--` ends the options elsewhere: what follows it is a prompt, whatever it looks like."""
    generating = ("generate", "shipped", "a prompt")
    parser = parser_of(generating if words[0] == "generate" else ("bench", "decode"))
    assert said in (attempt(parser, words)[1] or "")
    words = ["generate", "shipped", "--", "--file=--"]
    found, message = attempt(parser_of(generating), words)
    assert message is None
    assert found.prompt == ["--file=--"]


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_values_of_every_option(count):
    """Refused by the option's name with the value, or a number that is finite and in range."""
    parsers = {words: parser_of(words) for words in COMMANDS}
    options = [
        (words, action)
        for words, parser in parsers.items()
        for action in options_of(parser, words)
        if action.type is not pathlib.Path
    ]
    assert len(options) > 40
    tried = itertools.count()

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(bad_files.command_lines(options))
    def run(case):
        next(tried)
        words, action, text = case
        name = action.option_strings[0]
        found, message = attempt(parsers[words], [*words, f"{name}={text}"])
        if message is not None:
            assert f"argument {name}: " in message
            shown = [repr(text)[1:20], repr(bytes_of(text))[2:20]]
            assert any(part.rstrip("'\"") in message for part in shown)
            assert len(message) < 6000
            return
        value = getattr(found, action.dest)
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, int | float):
                assert math.isfinite(one)
                assert abs(one) < 2**63 or isinstance(one, float)
            elif isinstance(one, pathlib.Path):
                assert one.parent.is_dir()
            else:
                assert isinstance(one, str)

    run()
    assert next(tried) >= count
