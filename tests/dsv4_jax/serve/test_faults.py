"""Clients that go, lie, stall or attack. After each, nothing is left and the next is answered."""

import concurrent.futures
import contextlib
import json
import socket
import threading

import httpx
import pytest

from dsv4_jax.serve.intake import salt_of
from helpers.raw_http import OPENED, close_all, connect, read_all, request_bytes
from helpers.serve import MODEL, num_slots, running, warm_engine
from helpers.serving import fail_with_prompts_of, until

LONG = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = {"model": MODEL, "prompt": "a", "max_tokens": 3, "temperature": 0}


@pytest.fixture(autouse=True)
def sockets():
    """Those that tests open are closed."""
    yield
    close_all()


@pytest.fixture(scope="module")
def shared_server(engine):
    limits = {"max_body_bytes": 200_000, "body_timeout_s": 0.5, "header_timeout_s": 1.0}
    with running(engine, queue={"max_waiting": 4, "queue_timeout_s": 1.0}, **limits) as server:
        yield server


@pytest.fixture
def server(shared_server, engine):
    """A server whose next request is answered, and of whose last ones nothing is left."""
    yield shared_server
    until(lambda: shared_server.endpoints.engine.num_unfinished == 0)
    until(lambda: not engine.requests)  # the thread that steps forgets them next
    assert (engine.metrics.running, engine.metrics.waiting, engine.metrics.used_blocks) == (0, 0, 0)
    done = post(shared_server, SHORT)
    assert done.status_code == 200
    assert done.json()["usage"]["completion_tokens"] == 3
    until(lambda: not shared_server._uvicorn.server_state.tasks)


def post(server, body, path="/v1/completions", **options):
    return httpx.post(server.url + path, json=body, timeout=60, **options)


def post_raw(server, raw, kind="application/json"):
    return httpx.post(
        f"{server.url}/v1/completions", content=raw, headers={"content-type": kind}, timeout=60
    )


def fill(server, engine):
    """Connections whose requests have all slots."""
    busy = []
    for _ in range(num_slots(engine)):
        busy.append(connect(server, request_bytes(LONG | {"stream": True})))
        assert b"200 OK" in busy[-1].recv(100)
    return busy


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_goes_while_its_answer_is_drawn(server, engine, stream):
    opened = connect(server, request_bytes(LONG | {"stream": stream}))
    if stream:
        assert b"200 OK" in opened.recv(65536)
    else:
        until(lambda: engine.metrics.running)
    assert engine.metrics.running == 1
    opened.close()
    until(lambda: engine.metrics.running == 0, 5)


def test_a_client_goes_while_its_prompt_is_read(server, engine):
    opened = connect(server, request_bytes(LONG | {"prompt": [5] * 1900, "max_tokens": 100}))
    until(lambda: engine.metrics.running)
    opened.close()
    until(lambda: engine.metrics.running == 0, 5)


def test_a_client_goes_while_it_waits(server, engine):
    busy = fill(server, engine)
    waiting = connect(server, request_bytes(LONG))
    until(lambda: engine.metrics.waiting == 1)
    waiting.close()
    until(lambda: engine.metrics.waiting == 0, 5)
    assert engine.metrics.running == num_slots(engine)
    for one in busy:
        one.close()


def test_a_full_queue_and_one_that_waits_for_too_long(server, engine):
    busy = fill(server, engine)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        late = [pool.submit(post, server, LONG) for _ in range(4)]
        until(lambda: server.endpoints.engine.num_waiting == 4)
        refused = post(server, SHORT)
        for answer in [refused, *(one.result() for one in late)]:
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
            assert answer.json()["error"]["type"] == "rate_limit_error"
    assert engine.metrics.running == num_slots(engine)
    for one in busy:
        one.close()


def test_bodies_that_are_no_requests(server):
    for raw in (
        b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
        b"[" * 100_000, b'{"a":' * 30_000, b'{"prompt": NaN}', b'{"temperature": 1e400}',
        b'{"temperature": Infinity}', b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"max_tokens": 1e400}', b'{"unknown": 1}', b'{"prompt": "a", "n": 1.5}',
    ):  # fmt: skip
        answer = post_raw(server, raw)
        assert answer.status_code == 400, raw[:40]
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in answer.text
    assert post_raw(server, b"x" * 200_001).status_code == 413
    assert post_raw(server, b"{}", kind="text/plain").status_code == 415
    chunks = httpx.post(
        f"{server.url}/v1/completions",
        content=(b"x" * 1000 for _ in range(300)),
        headers={"content-type": "application/json"},
    )
    assert chunks.status_code == 413


def test_a_body_that_is_cut_off_or_does_not_come(server):
    connect(server, request_bytes(SHORT, length=1000)).close()
    slow = connect(server, request_bytes(SHORT, length=1000))
    assert b" 408 " in slow.recv(65536)
    slow.close()


def test_headers_of_megabytes_and_heads_that_do_not_end(server):
    line = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    with contextlib.suppress(ConnectionError):
        many = connect(server, line)
        for _ in range(64):
            many.sendall(b"x-%d: " % 3 + b"y" * 65536 + b"\r\n")
    assert b" 200 " not in read_all(many)
    one = connect(server, line + b"x: " + b"y" * 40_000 + b"\r\nz: " + b"y" * 40_000 + b"\r\n\r\n")
    assert b" 431 " in one.recv(65536)  # and it may ask again
    for opened in [connect(server, part) for part in (b"", b"GET /hea", b"\r\n")]:
        assert read_all(opened) == b""
    assert b" 400 " in read_all(connect(server, b"nonsense\r\n\r\n"))


@pytest.mark.slow
def test_200_connections_that_read_nothing(server, engine):
    opened = []
    for number in range(200):
        body = SHORT | {"max_tokens": 2, "stream": True, "prompt": f"{number}"}
        with contextlib.suppress(ConnectionError):
            opened.append(connect(server, request_bytes(body)))
    health = httpx.get(f"{server.url}/health", timeout=10)
    assert health.status_code == 200
    until(lambda: engine.metrics.running + engine.metrics.waiting == 0)
    for one in opened:
        one.close()


def test_who_does_not_read_is_cut_off(other_engine, monkeypatch):
    """Nothing takes its tokens, so that they pile up, and then its blocks are free."""
    with running(other_engine, queue={"max_unread_tokens": 20}, stall_timeout_s=0.3) as server:
        big = LONG | {"max_tokens": 1900}
        opened = socket.socket()
        OPENED.append(opened)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        opened.connect(server.address)
        from dsv4_jax.serve import completions

        monkeypatch.setattr(
            completions, "encode_basestring_ascii", lambda text: '"' + "x" * 200_000 + '"'
        )
        opened.sendall(request_bytes(big | {"stream": True}))
        until(lambda: other_engine.metrics.running)
        until(lambda: other_engine.metrics.running == 0)
        assert other_engine.metrics.finished["cancelled"] >= 1
        until(lambda: not server._uvicorn.server_state.connections, 10)
        opened.close()


def test_a_step_that_raises_ends_one_request(server, engine, monkeypatch, caplog):
    fail_with_prompts_of(13, engine, monkeypatch, message="secret")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        good = [pool.submit(post, server, SHORT | {"prompt": [i, 3]}) for i in (1, 2)]
        bad = post(server, SHORT | {"prompt": [13, 1]})
        assert [one.result().status_code for one in good] == [200, 200]
    assert bad.status_code == 500
    assert "secret" not in bad.text
    assert bad.json()["error"]["type"] == "server_error"
    assert "secret" in caplog.text


def test_an_exception_is_no_answer(server, monkeypatch, caplog):
    monkeypatch.setattr(server.endpoints.engine, "submit_many", lambda *_, **__: 1 / 0)
    answer = post(server, SHORT)
    monkeypatch.undo()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")
    assert "ZeroDivisionError" in caplog.text


def test_keys(other_engine, caplog):
    with running(other_engine, api_keys=("sk-first", "sk-second")) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        for headers in (
            {}, {"authorization": "Bearer sk-firsu"}, {"authorization": "Bearer sk-firs"},
            {"authorization": "sk-first"}, {"x-api-key": "sk-first2"}, {"x-api-key": ""},
            {"authorization": b"Bearer \xff\xfe"},
        ):  # fmt: skip
            for path in ("/v1/completions", "/tokenize", "/nowhere"):
                refused = post(server, SHORT, path, headers=headers)
                assert refused.status_code == 401, headers
                assert refused.headers["www-authenticate"] == "Bearer"
            assert httpx.get(f"{server.url}/metrics", headers=headers).status_code == 401
        claude = post(server, SHORT, "/v1/messages")
        assert claude.json()["error"]["type"] == "authentication_error"
        prompt = {"prompt": [7] * 300}
        hits = []
        for headers in (
            {"authorization": "Bearer sk-first"}, {"x-api-key": "sk-first"},
            {"authorization": "bearer sk-second"},
        ):  # fmt: skip
            done = post(server, SHORT | prompt, headers=headers).json()
            hits.append(done["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert hits[0] == hits[2] == 0  # what another key has sent is not there
        assert hits[1] > 0


@pytest.mark.slow
def test_what_keeps_prefixes_of_keys_apart_is_the_same_in_the_next_process():
    """So that it finds them on a disk; and it is not the key."""
    assert salt_of("sk-first") == (
        "2452ddfd7a7888446ac82ffd22283be4f9216f92fa9bd8777db4285b49121493"
    )
    assert salt_of("sk-first") != salt_of("sk-other")


GOOD, OTHER = "sk-first", "sk-other"


@pytest.mark.parametrize(
    ("headers", "key", "wrong"),
    [
        ([("x-api-key", GOOD), ("authorization", f"Bearer {OTHER}")], 0, ["authorization"]),
        ([("authorization", f"Bearer {OTHER}"), ("x-api-key", GOOD)], 0, ["authorization"]),
        ([("authorization", f"Bearer {GOOD}"), ("x-api-key", OTHER)], 0, ["x-api-key"]),
        ([("x-api-key", OTHER), ("authorization", f"Bearer {GOOD}")], 0, ["x-api-key"]),
        ([("x-api-key", OTHER), ("x-api-key", GOOD)], 0, ["x-api-key"]),
        ([("authorization", "Basic dTpw"), ("authorization", f"BEARER  {GOOD}")], 0, None),
        ([("authorization", "Bearer"), ("x-api-key", GOOD)], 0, None),
        ([("x-api-key", "sk-second"), ("authorization", f"bearer {GOOD}")], 0, None),
        ([("authorization", f"bearer {GOOD}"), ("x-api-key", "sk-second")], 0, None),
        ([("x-api-key", "sk-second"), ("x-api-key", OTHER), ("x-api-key", "x")], 1, ["x-api-key"]),
        ([("x-api-key", OTHER), ("authorization", f"Bearer {OTHER}")], None, None),
        ([("authorization", f"Basic {GOOD}"), ("x-api-key", "")], None, None),
        ([("authorization", f"Bearer {GOOD} {GOOD}")], None, None),
    ],
)
def test_one_key_that_is_right_opens_whatever_stands_beside_it(
    headers, key, wrong, caplog, keyed_server
):
    caplog.set_level("INFO", "dsv4_jax.serve")
    answer = httpx.get(f"{keyed_server.url}/v1/models", headers=headers)
    assert answer.status_code == (401 if key is None else 200)
    until(lambda: len(caplog.records) == 1)
    line = json.loads(caplog.records[0].getMessage())
    assert (line.get("key"), line.get("wrong_key_in")) == (key, wrong)
    assert "sk-" not in caplog.text
    if key is None:
        assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.fixture(scope="module")
def keyed_server(tokenizer_name):
    with running(
        warm_engine(tokenizer_name, number=2), api_keys=("sk-first", "sk-second")
    ) as server:
        yield server


def test_draining_lets_answers_end_and_then_cuts_them_off(other_engine):
    before = threading.active_count()
    for seconds, reason in ((30, "length"), (0.2, "error")):
        with running(other_engine, drain_timeout_s=seconds) as server:
            opened = connect(
                server, request_bytes(LONG | {"max_tokens": 60, "stream": True})
                if reason == "length"
                else request_bytes(LONG | {"max_tokens": 1900, "stream": True})
            )  # fmt: skip
            data = opened.recv(65536)
            server.drain()
            until(lambda server=server: server.endpoints.is_draining)
            if reason == "error":
                until(lambda server=server: not server.endpoints.engine.is_serving)
            data += read_all(opened)
            assert data.count(b"HTTP/1.1 200") == 1
            assert (b"[DONE]" in data) == (reason == "length")
            assert (b'"error"' in data) == (reason == "error")
        with pytest.raises(ConnectionError):
            connect(server)
    assert threading.active_count() == before


def test_a_log_line_a_request(server, caplog):
    caplog.set_level("INFO", "dsv4_jax.serve")
    post(server, SHORT | {"prompt": "a secret prompt"})
    until(lambda: len(caplog.records) == 1)
    line = json.loads(caplog.records[0].getMessage())
    assert (line["status"], line["path"], line["finish"]) == (200, "/v1/completions", ["length"])
    assert (line["drawn_tokens"], line["hit_tokens"], line["client"]) == (3, 0, "127.0.0.1")
    assert line["seconds"] >= line["first_token_seconds"] > 0
    assert "secret" not in caplog.text
