"""Lines end at one thing in every file that is read by line, and a mark begins none of them."""

import dataclasses
import io
import json

import pytest

from dsv4_jax import lines
from dsv4_jax.bench.load import read_bodies
from dsv4_jax.config.json_file import read_json_object
from dsv4_jax.research.sweep import SweepFile, SweepPlan
from dsv4_jax.serve.batch_files import BatchAnswers, BatchRequests
from dsv4_jax.serve.body import parse_object
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers.serve import shipped_tokenizer

MARK = b"\xef\xbb\xbf"
INSIDE = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\rj\ufeffk"
"""Every other character at which Python ends lines, and a mark that is not at the beginning."""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\r\nb\n", ["a", "b"]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r", ["a\r"]),
        (f"{INSIDE}\r\n{INSIDE}\n", [INSIDE, INSIDE]),
    ],
)
def test_a_text_has_these_lines(text, wanted):
    assert lines.split_lines(text) == wanted
    file = io.BytesIO(MARK + text.encode())
    whole = [lines.without_line_end(line.decode()) for line in lines.read_lines(file, 100)]
    assert whole == wanted


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("mark", [MARK, b""])
def test_a_line_may_have_so_many_bytes_and_no_more(mark, end):
    for size, fits in ((7, True), (8, True), (9, False), (10, False), (11, False), (99, False)):
        file = io.BytesIO(mark + b"x" * size + (end and end + b"next\n" + b"y" * size + end))
        found = list(lines.read_lines(file, 8))
        line = b"x" * size + end if fits else None
        if not end:
            assert found == [line]
        else:
            assert found == [line, b"next\n", b"y" * size + end if fits else None]


def test_only_the_end_of_a_line_is_cut_off():
    found = [lines.without_line_end(text) for text in ("a", "a\n", "a\r\n", "a\r", "a\n\n", "\n")]
    assert found == ["a", "a", "a", "a\r", "a\n", ""]


def test_requests_of_a_batch(tmp_path):
    path, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": INSIDE}
    line = {"custom_id": INSIDE, "method": "POST", "url": "/v1/completions", "body": body}
    told = json.dumps(line, ensure_ascii=False).encode()
    path.write_bytes(MARK + told + b"\r\n" + told.replace(b'"a', b'"z', 1) + b"\n")
    file = BatchRequests(path, max_bytes=1000)
    first, second = file.lines()
    assert (first.problem, second.problem) == (None, None)
    assert first.custom_id == INSIDE
    assert first.body == body
    assert len(file.check()) == 2  # it reads the file from its beginning
    file.close()
    done = {"id": "batch_req_1", "custom_id": INSIDE, "response": {}, "error": None}
    answers.write_bytes(MARK + json.dumps(done, ensure_ascii=False).encode() + b"\r\n")
    with BatchAnswers(answers) as file:
        assert list(file.done) == [INSIDE]


def test_requests_of_a_load(tmp_path):
    path = tmp_path / "prompts.jsonl"
    told = json.dumps(INSIDE, ensure_ascii=False).encode()
    path.write_bytes(MARK + told + b"\r\n\r\n" + told)
    assert [one["prompt"] for one in read_bodies(path, max_tokens=1)] == [INSIDE, INSIDE]


def test_cells_of_a_sweep(tmp_path):
    path = tmp_path / "cells.jsonl"
    plan = SweepPlan(checkpoint="a", num_rows=1, num_requests=1, repeats=1)
    cell = {"idea": INSIDE, "context": 8, "step_ms": [1.0]} | dataclasses.asdict(plan)
    path.write_bytes(MARK + json.dumps(cell, ensure_ascii=False).encode() + b"\r\n")
    assert SweepFile(path, plan).missing([INSIDE], [8]) == []


def test_bodies_and_files_of_json(tmp_path):
    told = MARK + json.dumps({"prompt": INSIDE}, ensure_ascii=False).encode()
    assert parse_object(told) == {"prompt": INSIDE}
    path = tmp_path / "config.json"
    path.write_bytes(told)
    assert read_json_object(path) == {"prompt": INSIDE}


def test_a_tokenizer(tmp_path):
    made = shipped_tokenizer()
    (tmp_path / "tokenizer.json").write_bytes(MARK + made.to_str().encode())
    found = load_tokenizer(tmp_path)
    assert found.encode("a").ids == made.encode("a").ids
