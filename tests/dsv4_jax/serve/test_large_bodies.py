"""Large bodies are read in another process, within bounds, and answered as small ones are."""

import contextlib
import json
import logging
import pickle
import re
import socket
import threading

import httpx
import pytest

from dsv4_jax.serve import ServeSettings, bodies
from dsv4_jax.serve.body import parse_object
from dsv4_jax.serve.errors import ApiError, ContextLengthError
from dsv4_jax.serve.read_apart import ReadersApart
from dsv4_jax.serve.reading import COMPLETIONS, BodyReader, ReaderPlan
from dsv4_jax.serve.room import FREE_BYTES, Room
from dsv4_jax.serving.requests.request import Completion, Token
from helpers import agent_requests
from helpers.serve import BYTES_ALONE, EOS, MODEL, model, running, v4_tokenizer
from helpers.serving import until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
NUMBER = {"type": "object", "properties": {"a": {"enum": [1.10, 10**30]}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": NUMBER}
BODIES = [
    (CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HI, "n": 3, "stream": True, "stop": ["never"], "logprobs": True}),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": "So ", "prefix": True}]}),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required", "thinking": {"type": "disabled"}}),
    (CHAT, {"messages": [{"role": "user", "content": "JSON"}],
            "response_format": {"type": "json_object"}}),
    (RESPONSES, {"input": "hi", "instructions": "Be brief.", "stream": True,
                 "tools": [{"type": "function", **FUNCTION}], "reasoning": {"effort": "low"},
                 "include": ["reasoning.encrypted_content"], "temperature": 0.5}),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": "So"}], "stream": True,
                "system": "s", "stop_sequences": ["never"]}),
    (MESSAGES, {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [97, 98], "logprobs": 2, "stream": True}),
]  # fmt: skip
BODIES += [one[:2] for one in agent_requests.REQUESTS.values() if "count" not in one[0]]


def make_plan(tokenizer=None, **settings):
    tokenizer = tokenizer or v4_tokenizer()
    made = ServeSettings(**({"model_name": MODEL} | settings))
    return ReaderPlan(made, model(tokenizer)[0], tokenizer.to_str(), 8192)


@pytest.fixture(scope="module")
def plan():
    return make_plan()


@pytest.fixture(scope="module")
def reader(plan):
    return BodyReader(plan)


@pytest.fixture(scope="module")
def apart(plan):
    made = ReadersApart(plan)
    yield made
    made.helpers.close()


def with_least(path, body):
    body = {"model": MODEL, "seed": 1} | body
    return body | {"max_tokens": 900} if path == MESSAGES else body


TEXTS = (
    "Reasoning, then.</think>A text, 1.10.",
    "R.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter "
    'name="a" string="false">1.10</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
)  # fmt: skip


def answers_to(reader, asked):
    """What a client gets where the model says one of the texts, without ids and times."""
    for text in TEXTS:
        renderer = reader.renderer_of(asked)
        ids = [*v4_tokenizer().encode(text, add_special_tokens=False).ids, EOS]
        raw = renderer.start(0)
        count = len(asked.prompts) * asked.n
        for number in range(count):
            for token in ids if asked.told.sampling.logprobs is None else ():
                reason = "stop" if token == EOS else None
                raw += renderer.tokens(number, [Token(0, token, reason, text=chr(token % 128))])
        done = Completion(ids, text, "stop", prompt_tokens=len(asked.prompts[0][0]))
        raw += renderer.end([done] * count)
        yield re.sub(
            r"(chatcmpl-|resp_|msg_|cmpl-|call_|rs_|fc_|toolu_)\w+|\d{10}", "", raw.decode()
        )


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_an_answer_is_the_same_whoever_has_read_the_body(number, reader):
    path, body = BODIES[number]
    asked = reader.ask(path, with_least(path, body))
    packed = pickle.loads(pickle.dumps(asked.pack()))
    assert [ids.tolist() for ids, _ in packed.prompts] == [ids.tolist() for ids, _ in asked.prompts]
    assert [one for _, one in packed.prompts] == [one for _, one in asked.prompts]
    assert (packed.n, packed.form_field) == (asked.n, asked.form_field)
    assert list(answers_to(reader, packed)) == list(answers_to(reader, asked))


def test_who_is_refused_is_told_the_same(reader, apart):
    bodies = [
        (CHAT, b'{"model": "small", "messages": [{"role": "user", "content": 3}]}'),
        (CHAT, b'{"model": "other", "messages": []}'),
        (MESSAGES, b'{"model": "small", "max_tokens": 1, "messages": [], "x": 1}'),
        (COMPLETIONS, json.dumps({"model": MODEL, "prompt": "a" * 9000}).encode()),
        (COMPLETIONS, b'{"prompt": [1, "a"'),
        ("/tokenize", b'{"prompt": 3}'),
        ("/detokenize", b'{"tokens": [-1]}'),
    ]
    for path, raw in bodies:
        told = apart.read(path, raw, is_logged=False)
        assert told.found is None
        with pytest.raises(ApiError) as error:
            reader.read(path, parse_object(raw), [])
        assert vars(told.refused) == vars(error.value)
        assert told.refused.for_path(path, "id") == error.value.for_path(path, "id")
    assert len(apart.helpers.living) == 1


def test_answers_that_are_in_the_body_alone_are_the_same(reader, apart):
    counted = {"model": MODEL, "messages": HI, "tools": [{"name": "f", "input_schema": NUMBER}]}
    bodies = [
        ("/tokenize", {"prompt": "Grüße, \u732b"}),
        ("/detokenize", {"tokens": [97, 200, 98]}),
        ("/v1/messages/count_tokens", counted | {"metadata": {"user_id": "u"}}),
    ]
    for path, body in bodies:
        raw = json.dumps(body).encode()
        told = apart.read(path, raw, is_logged=True)
        assert told.found == reader.read(path, body, [])
        assert json.loads(told.logged) == body


@pytest.fixture
def make_apart(plan):
    with contextlib.ExitStack() as stack:

        def make(**bounds):
            made = ReadersApart(plan, **bounds)
            stack.callback(made.helpers.close)
            return made

        yield make


LONG = json.dumps({"model": MODEL, "prompt": "a b" * 400_000}).encode()
SHORT = b'{"model": "small", "prompt": "a"}'


@pytest.mark.slow
def test_reading_has_a_bound_of_time(make_apart):
    apart = make_apart(seconds=0.1)
    with pytest.raises(ApiError, match=r"^the body must be read within 0.1 s of a processor$"):
        apart.read(COMPLETIONS, LONG, is_logged=False)
    assert apart.read(COMPLETIONS, SHORT, is_logged=False).found is not None


@pytest.fixture
def many_processors(monkeypatch):
    """Rust's libraries start as many threads as a machine of a thousand processors has."""
    monkeypatch.setenv("RAYON_NUM_THREADS", "1000")
    monkeypatch.setenv("RUST_BACKTRACE", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("many_processors")
def test_reading_has_a_bound_of_memory(make_apart):
    """And takes the same on a machine of many processors."""
    apart = make_apart(most_bytes=40 * 2**20)
    two = json.dumps({"model": MODEL, "prompt": ["a", "b"]}).encode()
    assert apart.read(COMPLETIONS, two, is_logged=False).found is not None
    apart = make_apart(most_bytes=20 * 2**20)
    with pytest.raises(ApiError, match=r"^the body must be read within 20 MiB of memory$"):
        apart.read(COMPLETIONS, LONG, is_logged=False)


@pytest.mark.slow
def test_the_largest_body_of_any_kind_is_read_within_the_memory_that_there_is(make_apart):
    """Values that cost most for their length; what is refused is so for what it asks for."""
    apart, size = make_apart(), 4 * 2**20 - 100
    parts = ["[],", '{"a":1},', '"",', "1,", "1.5,", "1e5,", "99999999999999999999,"]
    raws = [f'{{"prompt":[{part * (size // len(part))}1]}}' for part in parts]
    raws += [f'{{"model":"small","prompt":"{text * (size // len(text))}"}}'
             for text in ("\\n\\\"", "a", "猫", "\\u732b")]  # fmt: skip
    for raw in raws:
        told = apart.read(COMPLETIONS, raw.encode(), is_logged=False)
        assert told.refused.status == 400
        rule = "at most|too long|model: must be|prompt: must be a text, token ids"
        assert re.search(rule, told.refused.message)


def test_its_memory_is_given_back(apart):
    apart.read(COMPLETIONS, SHORT, is_logged=False)
    (helper,) = apart.helpers.idle
    before = resident_bytes(helper.process.pid)
    apart.read(COMPLETIONS, LONG * 3, is_logged=False)
    raw = json.dumps({"model": MODEL, "prompt": [[1]] * 100_000, "stop": ["a" * 2**21]}).encode()
    apart.read(COMPLETIONS, raw, is_logged=True)
    apart.read("/tokenize", SHORT, is_logged=False)
    assert apart.helpers.idle == [helper]
    assert resident_bytes(helper.process.pid) < before + 24 * 2**20


def resident_bytes(pid):
    try:
        with open(f"/proc/{pid}/status") as status:
            (line,) = (line for line in status if line.startswith("VmRSS"))
    except OSError:
        pytest.skip("there is no /proc here")
    return 1024 * int(line.split()[1])


@pytest.fixture(scope="module")
def server(engine):
    with running(engine, log_prompts=True, api_keys=("k", "l")) as server:
        yield server


def post(server, path, body, **options):
    headers = {"authorization": "Bearer k", "content-type": "application/json"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60, **options)


def large(prompt, size=2 * bodies._LARGE_BYTES, **changes):
    """A body of which only the beginning is of interest."""
    nothing = {"metadata": {"x": "a" * size}}
    return (
        {"model": MODEL, "messages": prompt, "max_tokens": 4, "temperature": 0} | nothing | changes
    )


@BYTES_ALONE
def test_a_server_reads_a_large_body_in_another_process(server, monkeypatch, caplog):
    """And says of it what it says of others, in its log too."""
    small, sizes, parse = large(HI, 0), [], bodies.parse_object
    small_one = post(server, CHAT, small).json()["choices"]
    monkeypatch.setattr(bodies, "parse_object", lambda raw: sizes.append(len(raw)) or parse(raw))
    with caplog.at_level(logging.INFO, "dsv4_jax.serve"):
        answer = post(server, CHAT, large(HI, user="é"))
        refused = post(server, CHAT, large(HI, nobody_knows=1))
        missing = post(server, CHAT, large(3))
    assert answer.json()["choices"] == small_one
    assert refused.status_code == missing.status_code == 400
    assert refused.json()["error"]["param"] == "nobody_knows"
    assert missing.json()["error"]["param"] == "messages"
    assert not sizes
    until(lambda: len(caplog.records) == 3)
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [line["body"] for line in lines] == [
        large(HI, user="é"), large(HI, nobody_knows=1), large(3)
    ]  # fmt: skip
    assert "messages: must be a" in lines[2]["error"]


@pytest.mark.slow
@BYTES_ALONE
def test_who_is_read_by_a_process_that_others_end_may_try_again(server, monkeypatch):
    assert post(server, CHAT, large(HI)).status_code == 200
    (helper,) = server.endpoints._bodies._apart.helpers.idle
    ask = type(helper).ask

    def kill_and_ask(helper, job, patience_s):
        helper.process.kill()
        return ask(helper, job, patience_s)

    monkeypatch.setattr(type(helper), "ask", kill_and_ask)
    refused = post(server, CHAT, large(HI))
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert "that reads bodies of requests was ended from outside, with signal 9" in refused.text
    monkeypatch.undo()
    assert post(server, CHAT, large(HI)).status_code == 200


def send_head(server, length):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)  # else kernels keep answers
    connection.connect(server.address)
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n{length}"
    connection.sendall(f"{head}\r\ncontent-type: application/json\r\n\r\n".encode())
    return connection


@BYTES_ALONE
@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_have_room_together_and_others_are_refused(server, chunked, monkeypatch):
    """Bodies that come slowly count what has come; small ones are served meanwhile."""
    room = server.endpoints._room
    monkeypatch.setattr(room, "most_bytes", 2**21)
    assert not room.held_bytes
    size = 2**20 + 2**19 + FREE_BYTES
    length = "transfer-encoding: chunked" if chunked else f"content-length: {size + 1}"
    with send_head(server, length) as slow:
        slow.sendall((b"%x\r\n" % size if chunked else b"") + b" " * size)
        until(lambda: room.held_bytes == 2**20 + 2**19)
        refused = post(server, "/tokenize", {"prompt": "a" * 2**20})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert f"{2**20 + 2**19} bytes of requests are held, and {2**21} may be" in refused.text
        assert refused.headers["retry-after"]
        assert post(server, "/tokenize", {"prompt": "a" * 2**15}).status_code == 200
        assert post(server, "/tokenize", {"prompt": "a" * 2**16}).status_code == 200
    until(lambda: not room.held_bytes)
    assert post(server, "/tokenize", {"prompt": "a" * 2**18}).status_code == 200
    until(lambda: not room.held_bytes)


@pytest.mark.slow
@BYTES_ALONE
def test_a_large_answer_is_held_until_it_is_read(server, monkeypatch):
    """As JSON the ids of a text are some times as long as the text."""
    room = server.endpoints._room
    body = json.dumps({"prompt": "a" * 2**21}).encode()  # kernels keep megabytes of the answer
    whole = len(post(server, "/tokenize", body).content)
    until(lambda: not room.held_bytes)
    monkeypatch.setattr(room, "most_bytes", whole)
    with send_head(server, f"content-length: {len(body)}") as reader:
        reader.sendall(body)
        until(lambda: room.held_bytes == whole - FREE_BYTES)
        assert post(server, "/tokenize", {"prompt": "a" * 2**20}).status_code == 429
        while room.held_bytes:
            assert reader.recv(2**20)
    with send_head(server, f"content-length: {len(body)}") as reader:
        reader.sendall(body)
        until(lambda: room.held_bytes == whole - FREE_BYTES)
    until(lambda: not room.held_bytes)
    monkeypatch.setattr(room, "most_bytes", whole - FREE_BYTES - 1)
    assert post(server, "/tokenize", body).status_code == 429
    assert not room.held_bytes


@BYTES_ALONE
def test_what_was_read_for_who_left_is_given_back_and_nothing_is_begun_for_it(server, monkeypatch):
    begun, go_on = [], threading.Event()

    def stall(path, raw, *, is_logged):
        begun.append(len(raw))
        go_on.wait(60)
        raise ValueError

    monkeypatch.setattr(server.endpoints._bodies._apart, "read", stall)
    body = json.dumps({"prompt": "a" * 2**17}).encode()
    with contextlib.ExitStack() as stack:
        for number in range(4):
            connection = stack.enter_context(send_head(server, f"content-length: {len(body)}"))
            connection.sendall(body)
            until(lambda number=number: server.endpoints._bodies._large._num_calls == number + 1)
    until(lambda: server.endpoints._bodies._large._num_calls == 0)
    assert not server.endpoints._room.held_bytes
    go_on.set()
    until(lambda: server.endpoints._bodies._large._pool._work_queue.empty())
    assert len(begun) == 2


def test_a_share_counts_what_is_beyond_what_is_free():
    room = Room(100)
    with room.share() as one, room.share() as other:
        one.add(FREE_BYTES - 1)
        other.add(FREE_BYTES + 90)
        assert room.held_bytes == 90
        one.add(5)
        other.check(6)
        with pytest.raises(ApiError, match="94 bytes of requests are held, and 100 may be"):
            other.check(7)
        with pytest.raises(ApiError, match="94 bytes"):
            one.add(7)
        other.clear()
        assert room.held_bytes == 4
        one.add(90)
    assert room.held_bytes == 0


@pytest.mark.parametrize("refused", [
    ApiError(404, "no", param="model", code="c", error_code="e"), ContextLengthError(9, 5, "prompt")
])  # fmt: skip
def test_an_error_is_the_same_in_another_process(refused):
    assert vars(pickle.loads(pickle.dumps(refused))) == vars(refused)
