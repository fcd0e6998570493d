"""`dsv4-jax bench serve`: what is sent and when, what is counted, and what is said of it."""

import asyncio
import contextlib
import json
import re
import threading

import numpy as np
import pytest

from dsv4_jax.bench import load
from dsv4_jax.bench.load_figures import report_lines, summarise
from dsv4_jax.cli import main
from helpers.serve import running, warm_engine

pytestmark = pytest.mark.compiles_for_others


@pytest.fixture(scope="module")
def engine():
    return warm_engine()


@pytest.fixture(scope="module")
def other_engine():
    return warm_engine(number=1)


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as server:
        yield server


def answering(*parts):
    """A server that sends these bytes to everyone, and then closes; its address."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    return listening(answer)


@contextlib.contextmanager
def listening(answer):
    """A server that answers each connection so; its address."""
    ready, address = threading.Event(), []

    async def serve():
        over = asyncio.Event()
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address.extend((server.sockets[0].getsockname(), asyncio.get_running_loop(), over))
        ready.set()
        async with server:
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    (host, port), loop, over = address
    try:
        yield f"http://{host}:{port}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


def ask(url, bodies, arrivals=None, timeout_s=60, concurrency=None):
    if concurrency is None:
        arrivals = arrivals or [0.0] * len(bodies)
    return asyncio.run(
        load.run_load(
            url, bodies, arrivals, headers={}, timeout_s=timeout_s, concurrency=concurrency
        )
    )


def test_arrivals_are_a_poisson_process():
    gaps = np.diff(load.draw_arrivals(20_000, 8.0, seed=3))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    assert (gaps >= 0).all()
    assert load.draw_arrivals(5, 8.0, seed=3) == load.draw_arrivals(5, 8.0, seed=3)
    assert load.draw_arrivals(1, 8.0, seed=3) == [0.0]


def test_prompts_have_the_lengths_that_were_asked_for_and_share_heads():
    sizes = {"seed": 1, "prompt_tokens": (16, 64), "vocab_size": 200, "max_tokens": 5}
    prompts = [one["prompt"] for one in load.draw_bodies(400, shared=0.5, **sizes)]
    lengths = [len(prompt) for prompt in prompts]
    assert (min(lengths), max(lengths)) == (16, 64)
    assert all(0 <= token < 200 for prompt in prompts for token in prompt)
    shorter = sum(length < 32 for length in lengths) / 400  # half of them, by their logarithms
    assert 0.4 < shorter < 0.6
    heads = [tuple(prompt[:8]) for prompt in prompts]
    assert 150 < max(map(heads.count, set(heads))) < 250
    assert len({tuple(one["prompt"][:8]) for one in load.draw_bodies(50, shared=0, **sizes)}) == 50
    (one,) = load.draw_bodies(1, shared=0, **sizes | {"prompt_tokens": (7, 7)})
    assert len(one["prompt"]) == 7


def test_a_server_is_timed_and_every_token_counted(server, engine, tmp_path, capsys):
    path, before = tmp_path / "out.json", engine.metrics.generated_tokens
    sizes = ["--prompt-tokens", "200,600", "--max-tokens", "9", "--shared", "1"]
    done = main(
        ["bench", "serve", f"{server.url}/v1/", "--rate", "50", "--requests", "20", *sizes,
         "--json", str(path)]
    )  # fmt: skip
    assert done == 0
    found = json.loads(path.read_text())
    assert found["by_status"] == {"200": 20}
    assert (found["requests"], found["served"], found["model"]) == (20, 20, "small")
    assert found["drawn_tokens"] == 20 * 9 == engine.metrics.generated_tokens - before
    assert found["drawn_tokens_per_s"] == pytest.approx(180 / found["seconds"])
    assert 0 < found["hit_rate"] < 1
    assert 4000 < found["prompt_tokens"] < 12_000
    for name in ("first_token_s", "per_token_s", "whole_s"):
        spread = found[name]
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["most"]
    assert found["first_token_s"]["most"] <= found["whole_s"]["most"] < found["seconds"]
    shown = capsys.readouterr()
    assert "status    200: 20\n" in shown.out
    assert "180 drawn" in shown.out
    assert "first token" in shown.out
    assert shown.err == ""  # no terminal, and quickly done


def test_requests_of_a_file_are_sent_as_they_are(server, tmp_path, capsys):
    """Texts, objects and conversations; a smaller file is sent again."""
    path = tmp_path / "prompts.jsonl"
    message = {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
    lines = ["a text", {"prompt": "b", "max_tokens": 3, "ignore_eos": True}, message]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    out = tmp_path / "out.json"
    arguments = ["--prompts", str(path), "--max-tokens", "4", "--rate", "200", "--requests", "6"]
    assert main(["bench", "serve", server.url, *arguments, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["by_status"] == {"200": 6}
    assert 2 * 3 + 4 <= found["drawn_tokens"] <= 2 * (4 + 3 + 4)


@contextlib.contextmanager
def counting(seconds):
    """A server that answers after so long; its address, and how many it had at a time."""
    at_a_time, now = [], [0]
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    whole += b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        now[0] += 1
        at_a_time.append(now[0])
        await asyncio.sleep(seconds)
        now[0] -= 1
        writer.write(whole)
        writer.close()

    with listening(answer) as url:
        yield url, at_a_time


def test_a_closed_loop_asks_again_when_an_answer_has_ended():
    """So many at a time, never more; what a request waits for a place is not in its times."""
    with counting(0.3) as (url, at_a_time):
        outcomes, seconds = ask(url, [{"model": "m", "prompt": "a"}] * 7, concurrency=3)
    assert {one.status for one in outcomes} == {"200"}
    assert len(at_a_time) == 7
    assert max(at_a_time) == 3
    assert seconds >= 3 * 0.3  # 7 requests, 3 at a time
    for one in outcomes:
        assert 0.3 <= one.first_s <= one.whole_s
        assert one.whole_s < 0.75 * seconds  # one that counted its wait would have all of it


def test_an_open_loop_waits_for_nobody():
    with counting(0.5) as (url, at_a_time):
        outcomes, _ = ask(url, [{"model": "m", "prompt": "a"}] * 7)
    assert max(at_a_time) == 7
    assert {one.status for one in outcomes} == {"200"}


@pytest.mark.parametrize(
    ("arrivals", "concurrency", "told"), [([0.0], 1, "got both"), (None, None, "got neither")]
)
def test_a_loop_is_open_or_closed(arrivals, concurrency, told):
    with pytest.raises(ValueError, match=told):
        asyncio.run(
            load.run_load(
                "http://127.0.0.1:9", [{}], arrivals, headers={}, timeout_s=1,
                concurrency=concurrency,
            )
        )  # fmt: skip


def test_the_command_tells_its_loop_and_its_temperature(tmp_path, capsys, monkeypatch):
    """The file of figures says how requests came; every body has the temperature."""
    bodies, run_load = [], load.run_load

    def note(url, given, *rest, **options):
        bodies.extend(given)
        return run_load(url, given, *rest, **options)

    monkeypatch.setattr(load, "run_load", note)
    path = tmp_path / "out.json"
    with counting(0.01) as (url, at_a_time):
        arguments = ["--concurrency", "2", "--requests", "5", "--temperature", "0", "--model", "m"]
        assert main(["bench", "serve", url, *arguments, "--json", str(path)]) == 0
        assert main(["bench", "serve", url, "--rate", "5", "--concurrency", "2"]) == 2
    assert "not allowed with argument --rate" in capsys.readouterr().err
    found = json.loads(path.read_text())
    assert (found["concurrency"], found["rate"], found["temperature"]) == (2, None, 0)
    assert (found["prompt_token_bounds"], found["prompt_tokens"]) == ([64, 768], 0)
    assert [body["temperature"] for body in bodies] == [0] * 5
    assert max(at_a_time) <= 2


@pytest.mark.slow
def test_times_count_from_the_arrival_and_later_requests_wait_for_no_earlier_ones(server):
    """A request that the server has no slot for for a while is slow, not late."""
    body = {"model": "small", "prompt": "a", "max_tokens": 60, "ignore_eos": True}
    outcomes, seconds = ask(server.url, [body] * 30, [0.002 * i for i in range(30)])
    assert {one.status for one in outcomes} == {"200"}
    assert max(one.late_s for one in outcomes) < min(one.whole_s for one in outcomes)
    waits = [one.first_s for one in outcomes]
    assert max(waits) > 2 * min(waits)  # 30 requests in 8 slots
    assert seconds >= max(one.whole_s + 0.002 * i for i, one in enumerate(outcomes)) - 1e-3
    for one in outcomes:
        assert one.drawn_tokens == 60
        assert len(one.gaps_s) <= 59
        assert one.first_s + sum(one.gaps_s) <= one.whole_s
        assert one.per_token_s == pytest.approx(sum(one.gaps_s) / 59)


def test_errors_are_counted_by_status(other_engine, capsys):
    """Too many for the queue, a field of the wrong kind, and no model of that name."""
    with running(other_engine, queue={"max_waiting": 1}) as server:
        body = {"model": "small", "prompt": "a", "max_tokens": 80, "ignore_eos": True}
        bodies = [body] * 30 + [body | {"max_tokens": "x"}, body | {"model": "other"}]
        outcomes, seconds = ask(server.url, bodies)
        figures = summarise(outcomes, seconds)
        assert set(figures["by_status"]) == {"200", "400", "404", "429"}
        assert sum(figures["by_status"].values()) == 32
        assert figures["by_status"]["400"] == figures["by_status"]["404"] == 1
        assert figures["drawn_tokens"] == 80 * figures["served"]
        assert main(["bench", "serve", server.url, "--requests", "2", "--model", "other"]) == 1
        shown = capsys.readouterr().out
        assert "status    404: 2\n" in shown
        assert re.search(r"^  404: .*other", shown, re.MULTILINE)  # the server's own words
        assert "; 4 per s came; 0.00 per s served\n" in shown


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.mark.parametrize(
    ("parts", "status", "has_first"),
    [
        ([HEAD, TEXT, TEXT], "cut off", True),
        ([HEAD, TEXT[:9], TEXT[9:] + b"data: [DONE]\n", b"\n"], "200", True),
        ([HEAD, TEXT, b'data: {"error": {"message": "x"}}\n\n'], "error in the stream", True),
        ([HEAD, b"data: nonsense\n\ndata: 3\n\ndata: [DONE]\n\n"], "200", False),
        ([b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"], "500", False),
        ([b"nonsense\r\n\r\n"], "RemoteProtocolError", False),
        ([], "RemoteProtocolError", False),
    ],
)
def test_answers_that_are_none(parts, status, has_first):
    with answering(*parts) as url:
        (outcome,), _ = ask(url, [{"prompt": "a"}])
    assert outcome.status == status
    assert (outcome.first_s is not None) == has_first
    figures = summarise([outcome], 1.0)
    assert figures["served"] == int(status == "200")
    assert report_lines(figures, "all at once")


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 30}}, "30% of them from the cache"),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, "0% of them from the cache"),
        ({"prompt_cache_hit_tokens": 30}, "30% of them from the cache"),
        ({"prompt_tokens_details": None}, "the server does not say how many were in its cache"),
        ({}, "the server does not say how many were in its cache"),
    ],
)
def test_a_server_that_says_nothing_of_its_cache_is_not_taken_to_have_missed(usage, told):
    usage = {"prompt_tokens": 100, "completion_tokens": 1} | usage
    event = f'data: {{"choices": [], "usage": {json.dumps(usage)}}}\n\ndata: [DONE]\n\n'
    with answering(HEAD, TEXT, event.encode()) as url:
        outcomes, seconds = ask(url, [{"prompt": "a"}] * 2)
    figures = summarise(outcomes, seconds)
    assert figures["hit_rate"] == (None if "%" not in told else int(told.split("%")[0]) / 100)
    (line,) = (one for one in report_lines(figures, "2 at a time") if one.startswith("tokens"))
    assert line.endswith(told)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": {"message": "too\\nlong", "code": 400}}', "too long"),
        (b'{"message": "as vLLM says it"}', "as vLLM says it"),
        (b'{"error": "a text"}', "a text"),
        (b"<html>gone</html>", "<html>gone</html>"),
        (b"[1]", "[1]"),
        (b"\xff" + b"x" * 1000, "\ufffd" + "x" * 299),
        (b'{"error": {"message": "a\\u001b[2Jb"}}', "a [2Jb"),
        (b"y" * 2**20, "y" * 300),
    ],
)
def test_a_refusal_is_told_in_the_server_s_words(body, told):
    """One line, of at most 300 characters, once for each status."""
    head = f"HTTP/1.1 400 No\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with answering(head + body) as url:
        outcomes, seconds = ask(url, [{"prompt": "a"}] * 2)
    assert [one.problem for one in outcomes] == [told] * 2
    lines = report_lines(summarise(outcomes, seconds), "2 at a time")
    assert lines.count(f"  400: {told}") == 1


def test_a_refusal_that_is_cut_off_stays_a_refusal():
    with answering(b"HTTP/1.1 429 No\r\ncontent-length: 100\r\n\r\ntoo many") as url:
        (outcome,), _ = ask(url, [{"prompt": "a"}])
    assert (outcome.status, outcome.problem) == ("429", "too many")


def test_a_server_that_never_answers_is_given_up():
    with answering(HEAD, *[TEXT] * 100) as url:
        (outcome,), seconds = ask(url, [{"prompt": "a"}], timeout_s=0.1)
    assert outcome.status == "timeout"
    assert seconds < 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ftp://127.0.0.1"], "such as http://127.0.0.1:8000"),
        (["127.0.0.1:8000"], "such as http://127.0.0.1:8000"),
        (["http://127.0.0.1:x"], "such as http://127.0.0.1:8000"),
        (["http://127.0.0.1:9/v1/completions"], "such as http://127.0.0.1:8000"),
        (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["{url}", "--rate", "0"], "--rate"),
        (["{url}", "--prompt-tokens", "5"], "--prompt-tokens must be LEAST,MOST"),
        (["{url}", "--prompt-tokens", "9,5"], "--prompt-tokens must be LEAST,MOST"),
        (["{url}", "--prompts", "/nowhere"], "/nowhere"),
        (["{url}", "--prompts", "{folder}/bad"], "line 2 must be a JSON text"),
        (["{url}", "--prompts", "{folder}/empty"], "must have a line"),
        (["{url}", "--api-key", "ä"], "--api-key"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(server, tmp_path, capsys, arguments, told):
    (tmp_path / "bad").write_text('"a"\n{"prompt": "a", "messages": []}\n')
    (tmp_path / "empty").write_text("\n")
    given = [one.format(url=server.url, folder=tmp_path) for one in arguments]
    assert main(["bench", "serve", *given]) == 2
    assert told in capsys.readouterr().err


def test_a_key_is_sent_and_one_that_is_missing_is_asked_for(other_engine, capsys, monkeypatch):
    with running(other_engine, api_keys=("sk-me",)) as server:
        few = ["bench", "serve", server.url, "--requests", "1", "--max-tokens", "2"]
        assert main(few) == 2
        assert "status 401; pass --api-key" in capsys.readouterr().err
        assert main([*few, "--api-key", "sk-me"]) == 0
        monkeypatch.setenv("DSV4_JAX_API_KEY", "sk-me")
        assert main(few) == 0
