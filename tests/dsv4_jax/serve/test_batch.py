"""`dsv4-jax batch`: answers are the server's, and what is interrupted goes on."""

import errno
import fcntl
import json
import os
import random
import resource
import subprocess
import sys
import time

import httpx
import pytest

import dsv4_jax as ds
from dsv4_jax.cli import main
from dsv4_jax.serve import ServeSettings
from dsv4_jax.serve.batch import Batch
from dsv4_jax.serve.repeatable import settle
from helpers.serve import MODEL, TOKENIZERS, num_slots, running, small_engine

SETTINGS = ServeSettings(model_name=MODEL, max_body_bytes=5000)
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
BODIES = {
    "/v1/completions": {"prompt": "one", "max_tokens": 4, "seed": 1, "n": 2, "logprobs": 2},
    "/v1/chat/completions": HI | {"thinking": {"type": "disabled"}},
    "/v1/responses": {"input": "hi", "max_output_tokens": 5, "temperature": 0},
    "/v1/messages": HI,
}


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def line(name, body=None, url="/v1/completions", **changes):
    body = {"model": MODEL} | (BODIES[url] if body is None else body)
    return {"custom_id": name, "method": "POST", "url": url, "body": body} | changes


def write(path, lines):
    raw = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")


def completions(count, **fields):
    fields = {"temperature": 0} | fields
    return [
        line(str(i), {"prompt": f"p{i}", "max_tokens": 3 + i % 5, "seed": i} | fields)
        for i in range(count)
    ]


def run(files, engine, **settings):
    """Answers by custom_id, and how many were served and were not."""
    served = []
    with Batch(*files, settings=SETTINGS) as batch:
        assert batch.num_left + batch.num_done == len(names_of(files[0]))
        left = batch.num_left
        batch.run(engine, served.append)
    assert len(served) == left
    assert not engine.requests
    assert engine.metrics.used_blocks == 0
    return read(files[1]), (sum(served), len(served) - sum(served))


def names_of(path):
    return [one for one in path.read_bytes().split(b"\n") if one.strip()]


def read(path):
    raw = path.read_bytes()
    assert raw == b"" or raw.endswith(b"\n")
    answers = [json.loads(one) for one in raw.splitlines()]
    assert all(one.keys() == {"id", "custom_id", "response", "error"} for one in answers)
    assert len({one["id"] for one in answers}) == len(answers)
    return {one["custom_id"] or one["error"]["line"]: one for one in answers}


def without_ids(body):
    """An answer without what is new each time."""
    if isinstance(body, list):
        return [without_ids(one) for one in body]
    if not isinstance(body, dict):
        return body
    varying = {"id", "created", "created_at", "completed_at", "encrypted_content",
               "signature"}  # fmt: skip
    return {name: without_ids(one) for name, one in body.items() if name not in varying}


def test_answers_of_every_protocol_are_those_of_the_server(files, engine):
    write(files[0], [line(url, url=url) for url in BODIES])
    found, counts = run(files, engine)
    assert counts == (4, 0)
    with running(engine) as server:
        for url, body in BODIES.items():
            expected = httpx.post(server.url + url, json={"model": MODEL} | body).json()
            response = found[url]["response"]
            assert response["status_code"] == 200
            assert response["request_id"].startswith("req_")
            assert found[url]["error"] is None
            answer = response["body"]
            for usage in (answer["usage"], expected["usage"]):  # the server's came from the cache
                usage.pop("prompt_tokens_details", None), usage.pop("input_tokens_details", None)
                usage.pop("prompt_cache_hit_tokens", None)
                usage.pop("prompt_cache_miss_tokens", None)
            assert without_ids(answer) == without_ids(expected)


@pytest.mark.slow
def test_many_are_answered_at_once_as_generate_answers_each(files, engine):
    lines = completions(60, temperature=0.9)
    write(files[0], lines)
    steps = engine.metrics.steps
    found, counts = run(files, engine)
    assert counts == (60, 0)
    drawn = sum(one["body"]["max_tokens"] for one in lines)
    assert engine.metrics.steps - steps < drawn / (num_slots(engine) / 2)
    asked = [
        ds.SamplingParams(max_new_tokens=one["max_tokens"], seed=one["seed"], temperature=0.9)
        for one in (line["body"] for line in lines)
    ]
    expected = engine.generate([one["body"]["prompt"] for one in lines], sampling=asked)
    for one, done in zip(lines, expected, strict=True):
        (choice,) = found[one["custom_id"]]["response"]["body"]["choices"]
        assert (choice["text"], choice["finish_reason"]) == (done.text, done.finish_reason)


WEATHER = {"type": "object", "properties": {"id": {"type": "string", "maxLength": 3}},
           "required": ["id"], "additionalProperties": False}  # fmt: skip
VARIED = [
    {"prompt": "one", "max_tokens": 9, "n": 3, "logprobs": 2},
    {"prompt": "one and a half", "max_tokens": 30, "temperature": 1.3},
    {"prompt": ["two", "three"], "max_tokens": 3, "seed": 7},
    {"prompt": "long " * 90, "max_tokens": 5},
]
CONVERSATIONS = [
    ("/v1/chat/completions", HI | {"temperature": 1, "max_tokens": 8, "tools": [
        {"type": "function", "function": {"name": "f", "parameters": WEATHER, "strict": True}}],
        "tool_choice": "required", "thinking": {"type": "disabled"}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 9, "metadata": {"id": "mine"}}),
    ("/v1/messages", HI | {"temperature": 1}),
]  # fmt: skip


def varied_lines():
    """Without seeds but for one, of all protocols, refused ones and one that is no request."""
    lines = [line(f"c{i}", VARIED[i % 4] | {"user": str(i)}) for i in range(12)]
    lines += [line(url, body, url) for url, body in CONVERSATIONS]
    return [*lines, line("refused", {"prompt": "x", "max_tokens": -1}), b"nonsense"]


def run_repeatable(files, engine):
    with Batch(*files, settings=SETTINGS, repeatable=True) as batch:
        batch.run(engine)
    return files[1].read_bytes()


@pytest.mark.slow
def test_repeatable_answers_depend_on_their_requests_alone(files, tokenizer_name, tmp_path):
    """Bit for bit: of a whole file, of files of one line each, and of one torn at any place.

    As many iterations as in the releases. With a single one XLA's code for AVX-512 rounds the last
    rows of a step otherwise than the others.
    """
    engine = small_engine(TOKENIZERS[tokenizer_name](), sinkhorn_iters=20)
    lines = varied_lines()
    write(files[0], lines)
    whole = run_repeatable(files, engine)
    rows = whole.splitlines(keepends=True)
    names = [json.loads(row)["custom_id"] for row in rows]
    assert names == [one["custom_id"] for one in lines[:-1]] + [None]
    served = [row for row in map(json.loads, rows) if row["error"] is None]
    assert {row["response"]["status_code"] for row in served} == {200, 400}
    assert len({row["id"] for row in served}) == len(served)
    for number, one in enumerate(lines[:-1]):
        alone = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.out"
        write(alone[0], [one])
        assert run_repeatable(alone, engine) == rows[number], names[number]
    for place in (0, 1, len(rows[0]), len(whole) // 3, len(whole) // 2, len(whole) - 1):
        files[1].write_bytes(whole[:place])
        assert run_repeatable(files, engine) == whole


def test_ids_of_the_model_and_of_the_caller_are_their_own():
    """Those of an answer are made anew, alike where they were alike."""
    answer = {"id": "batch_req_x", "response": {"body": {
        "id": "resp_1", "created_at": 17.5, "metadata": {"id": "mine"}, "output": [
            {"id": "fc_2", "call_id": "call_3", "arguments": '{"id": "model"}'},
            {"id": "toolu_4", "input": {"id": "model"}, "other": "call_3"},
            {"id": "call_3", "created": None}]}}}  # fmt: skip
    settle(answer, "a")
    body = answer["response"]["body"]
    first, second, third = body["output"]
    assert answer["id"].startswith("batch_req_")
    assert (body["metadata"], second["input"]) == ({"id": "mine"}, {"id": "model"})
    assert first["call_id"] == third["id"] != "call_3"
    assert first["id"].startswith("fc_")
    assert (body["created_at"], third["created"]) == (0, None)
    assert len({body["id"], first["id"], first["call_id"], second["id"], answer["id"]}) == 5
    again = {"id": "batch_req_y"}
    settle(again, "a")
    assert again["id"] == answer["id"]
    settle(again, 1)
    assert again["id"] != answer["id"]


@pytest.mark.parametrize(
    "options",
    [
        ["--steps-per-call", "8"],
        ["--draft-tokens", "1"],
        ["--prefill-tokens", "64,128"],
        ["--decode-batch-sizes", "2"],
        ["--prefill-activations", "bfloat16", "--activations", "fp8"],
    ],
)
def test_options_that_make_steps_of_several_shapes_are_refused(files, options, capsys):
    write(files[0], completions(1))
    arguments = ["batch", *map(str, files), "--repeatable", *options, "--model-name", MODEL]
    assert main(arguments) == 2
    assert f"one shape, and {options[0]}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_repeatable_batch_that_is_killed_again_and_again_ends_alike(files, tmp_path):
    """SIGKILL at random moments while it answers."""
    lines = [
        line(str(i), {"model": "shipped", "prompt": f"p{i}", "max_tokens": 5 + 7 * (i % 9)})
        for i in range(120)
    ]
    write(files[0], lines)
    command = [sys.executable, "-m", "dsv4_jax", "batch", "--repeatable", "--max-requests", "8",
               "--max-context-tokens", "256", str(files[0])]  # fmt: skip

    def start(answers):
        """A process that has compiled, and begins to answer."""
        process = subprocess.Popen([*command, str(answers)], stderr=subprocess.PIPE)
        while b"compiled in" not in process.stderr.readline():
            assert process.poll() is None
        return process

    with start(tmp_path / "whole") as process:
        started = time.monotonic()
        process.communicate()
        whole_s, pick = time.monotonic() - started, random.Random(0)
    assert process.returncode == 0
    counts = []
    for _ in range(5):
        with start(files[1]) as process:
            time.sleep(whole_s * pick.uniform(0.05, 0.4))
            process.kill()
        counts.append(files[1].read_bytes().count(b"\n"))
        if counts[-1] == len(lines):
            break
    assert 0 < counts[0] < len(lines)
    subprocess.run([*command, str(files[1])], check=True)
    assert files[1].read_bytes() == (tmp_path / "whole").read_bytes()


def test_what_is_there_is_not_done_again_and_a_torn_line_is_mended(files, engine):
    lines = [*completions(12), b"nonsense"]
    write(files[0], lines)
    first, counts = run(files, engine)
    assert counts == (12, 1)
    rows = files[1].read_bytes().splitlines(keepends=True)
    for torn in (b"", rows[7][:1], rows[7][:40], rows[7][:-1]):
        files[1].write_bytes(b"".join(rows[:7]) + torn)
        before = engine.metrics.submitted
        again, counts = run(files, engine)
        kept = [json.loads(row) for row in rows[:7]]
        assert sum(counts) == 6
        assert engine.metrics.submitted - before == counts[0]
        assert files[1].read_bytes().startswith(b"".join(rows[:7]))
        for one in kept:
            assert again[one["custom_id"] or 13] == one
        for name, one in first.items():
            ours, theirs = (
                again[name]["response"] and again[name]["response"]["body"]["choices"],
                one["response"] and one["response"]["body"]["choices"],
            )
            assert ours == theirs
    before = files[1].read_bytes()
    assert run(files, engine)[1] == (0, 0)
    assert files[1].read_bytes() == before
    write(files[0], [*lines[:-1], *completions(14)[12:]])
    assert run(files, engine)[1] == (2, 0)


BAD = {
    "no json": (b'{"custom_id": "a"', "must be JSON"),
    "no object": (b"[1]", "must be a JSON object"),
    "no utf-8": (b'"\xff"', "must be UTF-8"),
    "deep": (b"[" * 2000, "nested too deep"),
    "long": (b'"' + b"x" * 20_000 + b'"', "at most 5000 bytes"),
    "not a number": (b'{"custom_id": NaN}', "NaN"),
    "no id": (json.dumps(line(None)).encode(), "custom_id must be a text"),
    "empty id": (json.dumps(line("")).encode(), "custom_id must be a text"),
    "method": (line("a", method="GET"), "method must be POST"),
    "url": (line("a") | {"url": "/v1/embeddings"}, "url must be one of /v1/completions"),
    "url list": (line("a") | {"url": []}, "url must be one of /v1/completions"),
    "body": (line("a") | {"body": 3}, "body must be an object"),
    "field": (line("a", more=1), '"more" is no field'),
}


def test_bad_lines_become_errors_and_others_are_answered(files, engine):
    bad = list(BAD.values())
    lines = [one if isinstance(one, bytes) else one | {"custom_id": f"b{i}"}
             for i, (one, _) in enumerate(bad)]  # fmt: skip
    lines = [b"", *lines, b"  \t", line("good")]
    write(files[0], lines)
    found, counts = run(files, engine)
    assert counts == (1, len(bad))
    assert found["good"]["response"]["status_code"] == 200
    errors = {one["error"]["line"]: one for one in found.values() if one["error"]}
    for number, (one, told) in enumerate(bad, 2):
        answer = errors[number]
        assert told in answer["error"]["message"]
        assert answer["error"]["message"].startswith(f"line {number} is no request: ")
        assert answer["error"]["code"] == "invalid_line"
        assert answer["response"] is None
        assert answer["custom_id"] == (None if isinstance(one, bytes) else f"b{number - 2}")
    assert run(files, engine)[1] == (0, 0)


def test_what_the_server_refuses_is_refused_here(files, engine):
    bodies = [
        {"prompt": 3}, {"prompt": "a", "suffix": "b"}, {"prompt": "a", "model": "other"},
        {"prompt": "1 " * 1200}, {"prompt": "a", "stream": True}, {"prompt": "a", "nothing": 1},
    ]  # fmt: skip
    lines = [line(str(i), one) for i, one in enumerate(bodies)]
    lines.append(line("claude", {"messages": 1}, "/v1/messages"))
    write(files[0], lines)
    found, counts = run(files, engine)
    assert counts == (0, 7)
    statuses = [found[str(i)]["response"]["status_code"] for i in range(6)]
    assert statuses == [400, 400, 404, 400, 400, 400]
    with running(engine) as server:
        for number in (0, 1, 2, 3, 5):
            refused = httpx.post(f"{server.url}/v1/completions", json=lines[number]["body"])
            assert found[str(number)]["response"]["body"] == refused.json()
    assert found["4"]["response"]["body"]["error"]["param"] == "stream"
    assert found["claude"]["response"]["body"]["type"] == "error"


def test_a_request_that_makes_steps_fail_fails_alone(files, engine, monkeypatch):
    def fail(plan, running, *rest, plain=engine.loop.runner.run):
        if any(request.sampling.seed == 666 for request in running.values()):
            raise RuntimeError("no such luck")
        return plain(plan, running, *rest)

    monkeypatch.setattr(engine.loop.runner, "run", fail)
    lines = completions(6)
    lines[2]["body"]["seed"] = 666
    write(files[0], lines)
    found, counts = run(files, engine)
    assert counts == (5, 1)
    assert found["2"]["response"]["status_code"] == 500


def test_two_requests_of_one_name_are_refused_before_anything_runs(files):
    write(files[0], [*completions(4), b"", line("2")])
    with pytest.raises(ValueError, match=r'lines 3 and 6 both have the custom_id "2"'):
        Batch(*files, settings=SETTINGS)
    assert not files[1].exists()


@pytest.mark.parametrize(
    "contents", [b"x\n", b"{}\n", b"[]\n", b'{"custom_id": "a"}\n', b"a note without an end"]
)
def test_a_file_of_something_else_is_left_alone(files, contents):
    write(files[0], completions(1))
    files[1].write_bytes(contents)
    with pytest.raises(ValueError, match="line 1 is no answer of a batch"):
        Batch(*files, settings=SETTINGS)
    assert files[1].read_bytes() == contents


def test_files_that_cannot_be_used_are_named(files, tmp_path):
    write(files[0], completions(1))
    with pytest.raises(ValueError, match="need a file of their own"):
        Batch(files[0], files[0], settings=SETTINGS)
    with pytest.raises(FileNotFoundError):
        Batch(tmp_path / "nowhere", files[1], settings=SETTINGS)
    assert not files[1].exists()
    with pytest.raises(ValueError, match="/dev/full must be a regular file"):
        Batch(files[0], type(files[0])("/dev/full"), settings=SETTINGS)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo must be a regular file"):
        Batch(tmp_path / "fifo", files[1], settings=SETTINGS)
    with open(files[1], "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process writes"):
            Batch(*files, settings=SETTINGS)


def test_a_full_disk_ends_it_with_whole_lines_and_a_rerun_goes_on(files, engine, monkeypatch):
    """The fifth line fits by half alone."""
    write(files[0], completions(40))
    room, write_some = [5000], os.write

    def fill(number, data):
        part = bytes(data)[: room[0]]
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(part)
        return write_some(number, part)

    monkeypatch.setattr("dsv4_jax.serve.batch_files.os.write", fill)
    with pytest.raises(OSError, match=r"out\.jsonl cannot be written: No space left on device; .*"):
        run(files, engine)
    some = read(files[1])
    assert 3 <= len(some) < 40
    assert not engine.requests
    monkeypatch.undo()
    whole, counts = run(files, engine)
    assert counts == (40 - len(some), 0)
    assert len(whole) == 40
    assert all(whole[name] == one for name, one in some.items())


def test_an_engine_that_fails_for_good_leaves_the_rest_for_later(files, engine, monkeypatch):
    write(files[0], completions(20))

    def fail(*_):
        raise SystemError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(type(engine), "step", fail)
        with pytest.raises(ValueError, match="the engine has failed: the device is gone"):
            run(files, engine)
    assert read(files[1]) == {}
    assert run(files, engine)[1] == (20, 0)


# The command.


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{folder}/nowhere", "{folder}/out"], "No such file"),
        (["{folder}/in", "/nowhere/out"], "argument answers: must be a file in a folder"),
        (["{folder}/in", "{folder}/in"], "need a file of their own"),
        (["/nowhere", "{folder}/in", "{folder}/out"], "/nowhere"),
        (["{folder}/text", "{folder}/out"], "none of its 2 lines has a custom_id"),
    ],
)
def test_bad_arguments_are_named(tmp_path, capsys, arguments, told):
    write(tmp_path / "in", [line("a")])
    (tmp_path / "text").write_text("# A page\n\nof text\n")
    assert main(["batch", *(one.format(folder=tmp_path) for one in arguments)]) == 2
    assert told in capsys.readouterr().err


def test_nothing_is_loaded_where_nothing_is_left(tmp_path, capsys, engine):
    write(tmp_path / "in", [line("a")])
    run((tmp_path / "in", tmp_path / "out"), engine)
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "[0 answered, 0 refused or failed, 1 were there already; " in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_answers_with_the_shipped_checkpoint_and_goes_on_after_a_full_disk(files):
    """A limit on the size of files takes the disk's place: writing ends in the middle of a line."""
    write(files[0], [one | {"body": one["body"] | {"model": "shipped"}} for one in completions(99)])
    command = [sys.executable, "-m", "dsv4_jax", "batch", *map(str, files), "--max-requests", "4"]
    command += ["--max-context-tokens", "512", "--prefill-tokens", "48"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("[compiled"):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (12_345, 12_345))
    assert process.returncode == 2
    assert "out.jsonl cannot be written: File too large; the answers before" in said[-1]
    assert "Traceback" not in "".join(said)
    some = read(files[1])
    assert 3 <= len(some) < 99
    assert files[1].stat().st_size <= 12_345
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"[{99 - len(some)} answered, 0 refused or failed, {len(some)} were" in done.stderr
    assert done.stdout == ""
    found = read(files[1])
    assert len(found) == 99
    for one in completions(99):
        body = found[one["custom_id"]]["response"]["body"]
        assert body["usage"]["completion_tokens"] <= one["body"]["max_tokens"]
        assert body["model"] == "shipped"
    assert all(found[name] == one for name, one in some.items())
