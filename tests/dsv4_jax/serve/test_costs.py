"""Requests that cost: each within bounds, and no other request waits for what one of them takes."""

import asyncio
import concurrent.futures
import dataclasses
import json
import threading
import time
import types

import httpx
import pytest

from dsv4_jax.serve import ServeSettings, body, dialects
from dsv4_jax.serve.body import MAX_COMMAS, MAX_DEPTH, MAX_PARTS, parse_object
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.threads import Threads
from dsv4_jax.serving.requests.grammar_trials import GrammarBounds
from helpers import failing_grammars
from helpers.serve import BYTES_ALONE, MODEL, running
from helpers.serving import until
from tools import health_load

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
PLAIN = {"model": MODEL, "messages": HI, "thinking": {"type": "disabled"}, "temperature": 0}
JOINED = {"allOf": [{"type": "integer", "multipleOf": 60_013}, {"multipleOf": 999}]}
"""Both remainders at once are sixty million."""


def with_schema(schema, **changes):
    format_ = {"name": "a", "schema": {"type": "object", "properties": {"a": schema}}}
    format_["strict"] = True
    form = {"type": "json_schema", "json_schema": format_}
    return PLAIN | {"response_format": form, "max_tokens": 8} | changes


def with_tool(schema):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters, "strict": True}
    return PLAIN | {"tools": [{"type": "function", "function": function}], "max_tokens": 8}


def post(server, body, path=CHAT, timeout=120):
    return httpx.post(server.url + path, json=body, timeout=timeout)


def message_of(response):
    return response.json()["error"]["message"]


@pytest.fixture(scope="module")
def server(engine):
    bounds = GrammarBounds(seconds=0.5, at_once=1)
    with running(engine, grammar_bounds=bounds, max_body_bytes=8 * 2**20) as server:
        yield server


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(with_schema(JOINED), id="form", marks=pytest.mark.slow),
        pytest.param(with_tool(JOINED), id="tool"),
    ],
)
def test_a_form_that_takes_too_long_is_refused_and_says_the_bound(server, body):
    refused = post(server, body)
    assert refused.status_code == 400
    assert "it must compile within 0.5 s of a processor; ask for less" in message_of(refused)
    assert post(server, with_schema({"type": "boolean"})).status_code == 200


def test_a_multiple_with_too_many_remainders_is_refused_by_its_place(server):
    for value in (604_800, 1_000_000, 1e6, 0.100001):
        refused = post(server, with_schema({"type": "integer", "multipleOf": value}))
        assert refused.status_code == 400
        told = "#/properties/a/multipleOf must be above 0 and at most 100000 units of its last"
        assert told in message_of(refused)
    for value in (3600, 0.01, 2.5, 12):
        assert post(server, with_schema({"type": "number", "multipleOf": value})).status_code == 200


@BYTES_ALONE
def test_schemas_that_take_too_long_to_read_are_refused(tokenizer):
    """Of the definition that each refers to, each looks at all."""
    parts = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": i}]} for i in range(60)}
    large = {"anyOf": [{"type": "string", "pattern": f"^{i}[a-z]{{3,9}}$"} for i in range(12)]}
    body = with_tool({})
    body["tools"][0]["function"]["parameters"] |= {"properties": parts, "$defs": {"a": large}}

    def read(seconds):
        settings = ServeSettings(model_name=MODEL, grammar_bounds=GrammarBounds(seconds=seconds))
        Conversations(settings, tokenizer.to_str(), 2**20).read(body, dialects.CHAT)

    with pytest.raises(ApiError, match=r"read within 0.01 s of a processor, all together") as error:
        read(0.01)
    assert error.value.status == 400
    read(60)


def test_an_object_of_a_thousand_optional_properties_is_served(server):
    names = {f"p{i}": {"type": "string"} for i in range(1000)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = PLAIN | {"response_format": form, "max_tokens": 8}
    assert post(server, body).status_code == 200


def test_what_a_client_that_left_has_asked_for_is_not_compiled(server, monkeypatch):
    """One that is being compiled goes on to its bound, and those that wait are never begun."""
    begun, go_on = [], threading.Event()
    trials = server.endpoints._intake._trials

    def stall(text):
        begun.append(text)
        go_on.wait(60)
        return ""

    monkeypatch.setattr(trials, "_try", stall)

    def ask(number):
        schema = {"type": "integer", "maximum": number}
        with pytest.raises(httpx.ReadTimeout):
            post(server, with_schema(schema), timeout=2)

    with concurrent.futures.ThreadPoolExecutor(5) as threads:
        list(threads.map(ask, range(5)))
    until(lambda: server.endpoints._compilers._num_calls == 0)
    go_on.set()
    monkeypatch.undo()
    assert post(server, with_schema({"type": "boolean"})).status_code == 200
    assert len(begun) == 1
    until(lambda: server.endpoints.engine.num_unfinished == 0)


def test_grammars_of_all_requests_hold_so_much_together_and_not_more(server, engine, monkeypatch):
    """Those of requests that wait, too; what they hold is free when they have ended."""
    grammars = engine.limits.grammars
    until(lambda: not grammars.held_bytes)
    large = {"type": "integer", "multipleOf": 1201}
    assert post(server, with_schema(large)).status_code == 200
    until(lambda: not grammars.held_bytes)
    trials = server.endpoints._intake._trials
    (held,) = {trials._known[key] for key in list(trials._known)[-1:]}
    assert held > 2**18
    bounds = dataclasses.replace(trials.bounds, held_bytes=held + held // 2)
    monkeypatch.setattr(trials, "bounds", bounds)
    long = with_schema(large, max_tokens=1500, stream=True)
    headers = {"content-type": "application/json"}
    with httpx.stream("POST", server.url + CHAT, json=long, headers=headers, timeout=60) as stream:
        until(lambda: grammars.held_bytes == held)
        refused = post(server, with_schema(large))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        told = f"the forms of other answers hold {held} bytes, and {bounds.held_bytes} may be held"
        assert told in message_of(refused)
        assert post(server, with_schema({"type": "boolean"})).status_code == 200
        stream.close()
    until(lambda: not grammars.held_bytes)
    monkeypatch.setattr(trials, "bounds", dataclasses.replace(bounds, held_bytes=1))
    assert post(server, with_schema(large)).status_code == 200  # beside nothing, any is taken


@BYTES_ALONE
def test_a_server_that_ends_waits_for_no_grammar(other_engine):
    """Nor leaves who waits for it without an answer."""
    bounds = GrammarBounds(seconds=120, memory_bytes=2**32, at_once=1)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        with running(other_engine, grammar_bounds=bounds, drain_timeout_s=0.1) as server:
            asking = [threads.submit(post, server, with_schema(JOINED)) for _ in range(2)]
            until(lambda: server.endpoints._compilers._num_calls == 2)
            until(lambda: server.endpoints._intake._trials._helpers.living)
            start = time.monotonic()
        assert time.monotonic() - start < 60
        answers = [one.result() for one in asking]
    assert [one.status_code for one in answers] == [503, 503]
    assert "shutting down" in message_of(answers[0])


def test_costly_bodies_are_read_and_compiled_by_threads_of_their_own(server, engine, monkeypatch):
    seen = {}

    def note(owner, name):
        call = getattr(owner, name)

        def noted(*args, **kwargs):
            seen.setdefault(name, set()).add(threading.current_thread().name.partition("_")[0])
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    intake = server.endpoints._intake
    note(intake.reader, "ask")
    note(engine.limits.grammars.compiler, "compile")
    note(intake, "submit")
    assert post(server, with_schema({"type": "boolean"})).status_code == 200
    long = "a " * 4000
    refused = post(server, {"model": MODEL, "prompt": long}, "/v1/completions")
    assert refused.status_code == 400
    assert seen["ask"] == {"dsv4-jax bodies"}
    assert seen["compile"] == {"dsv4-jax forms of answers"}
    assert seen["submit"] == {"dsv4-jax-server"}


def test_threads_do_so_much_at_a_time_and_refuse_what_would_wait_too_long():
    threads, go_on = Threads("sums", 1, max_waiting=1), threading.Event()

    async def run():
        waiting = [asyncio.ensure_future(threads.run(go_on.wait, 60)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 sums are worked on or wait") as error:
            await threads.run(go_on.wait)
        assert (error.value.status, error.value.code) == (429, "queue_full")
        waiting[1].cancel()
        await asyncio.sleep(0.01)
        third = asyncio.ensure_future(threads.run(lambda: 3))
        go_on.set()
        assert [await waiting[0], await third] == [True, 3]

    asyncio.run(run())
    threads.close()


@pytest.mark.parametrize("part", ["[]", "{}"])
def test_a_body_has_so_many_parts_and_not_more(part):
    whole = ",".join([part] * (MAX_PARTS - 2))
    parse_object(b'{"a":[%s]}' % whole.encode())
    parse_object(json.dumps({"a": f'{whole}\\"' * 2}).encode())  # in a text they are none
    with pytest.raises(ApiError, match=f"at most {MAX_PARTS} lists and objects"):
        parse_object(b'{"a":[%s,%s]}' % (whole.encode(), part.encode()))
    with pytest.raises(ApiError, match=f"at most {MAX_PARTS} lists and objects"):
        parse_object(b'{"a\\\\":["\\"[[",%s,%s]}' % (whole.encode(), part.encode()))


def test_brackets_are_counted_without_those_in_texts_and_a_part_of_a_body_at_a_time(monkeypatch):
    """Of a million texts at once other threads would have to wait for half a second."""
    sizes, whole = [], body._UP_TO_BRACKET

    def match(raw, place):
        found = whole.match(raw, place)
        sizes.append(found.end() - place)
        return found

    monkeypatch.setattr(body, "_UP_TO_BRACKET", types.SimpleNamespace(match=match))
    texts = b'"[\\"[",' * 20_000
    inner = b"[" * (MAX_DEPTH - 2) + b"]" * (MAX_DEPTH - 2)
    parse_object(b'{"a":[%s%s]}' % (texts, inner))
    assert sum(sizes) > len(texts)
    assert max(sizes) < len(texts) / 2
    with pytest.raises(ApiError, match=f"nested too deep: at most {MAX_DEPTH} lists"):
        parse_object(b'{"a":[%s[%s]]}' % (texts, inner))


def test_a_body_has_so_many_values_and_not_more():
    whole = ",".join(["1"] * MAX_COMMAS)
    parse_object(b'{"a":[%s,"1,1,1"]}' % whole.encode())
    with pytest.raises(ApiError, match=f"at most {MAX_COMMAS} values"):
        parse_object(b'{"a":[%s,"",1]}' % whole.encode())


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 3])
def test_an_answer_whose_grammar_fails_ends_alone(server, engine, monkeypatch, at):
    """Plain and in a stream, after a prompt of one step or many, beside others that go on."""
    others = [{"model": MODEL, "prompt": text, "temperature": 0, "max_tokens": 12,
               "ignore_eos": True} for text in ("a", "bc", "d" * 150)]  # fmt: skip
    alone = [post(server, body, "/v1/completions").json()["choices"] for body in others]
    failing_grammars.fail(monkeypatch, engine, "raises", at)
    form = with_schema({"type": "string"})
    for text in ("hi", "long " * 60):
        asked = form | {"max_tokens": 40, "messages": [{"role": "user", "content": text}]}
        bodies = [(CHAT, asked), (CHAT, asked | {"stream": True})]
        bodies += [("/v1/completions", body) for body in others]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as threads:
            plain, stream, *beside = threads.map(
                lambda one: post(server, one[1], one[0], timeout=120), bodies
            )
        assert [one.json()["choices"] for one in beside] == alone
        assert plain.status_code == 500, plain.text
        assert message_of(plain) == "the request failed; others were not affected"
        if at or stream.status_code == 200:  # else it failed before its stream began
            events = [line for line in stream.text.splitlines() if line.startswith("data: ")]
            assert "the request failed; others" in json.loads(events[-1][6:])["error"]["message"]
            assert "[DONE]" not in stream.text
        else:
            assert (stream.status_code, message_of(stream)) == (500, message_of(plain))
    until(lambda: server.endpoints.engine.num_unfinished == 0)
    assert not engine.metrics.running
    assert engine.metrics.used_blocks == 0


@pytest.mark.slow
def test_health_is_answered_while_a_form_is_compiled(server):
    """The thread that compiles gives Python's lock back, and so does reading its schema."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        compiling = threads.submit(post, server, with_schema(JOINED | {"maximum": 10**9}))
        answered = 0
        while not compiling.done():
            answered += httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            time.sleep(0.01)
    assert compiling.result().status_code == 400
    assert answered > 5


@pytest.mark.slow
def test_health_is_answered_whatever_the_others_ask_for(server):
    """Within 0.1 s for 99 of 100 that ask, beside what a busy machine takes for nothing at all."""
    found = health_load.run(server.url, MODEL, 20)
    assert found["health"][1] < 0.1 + 3 * found["idle"][1], found
    assert sum(sum(one.values()) for one in found["answers"]) > 8
