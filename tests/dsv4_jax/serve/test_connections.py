"""Requests that offer another protocol, and clients that close one side of a connection."""

import itertools
import json
import pathlib
import shutil
import socket
import subprocess
import time

import pytest

from dsv4_jax.serve import half_closed
from helpers import slow
from helpers.raw_http import close_all, connect, read_all, request_bytes
from helpers.serve import BYTES_ALONE, MODEL, num_slots, running
from helpers.serving import until

pytestmark = BYTES_ALONE

SHORT = {"model": MODEL, "prompt": "a", "max_tokens": 3, "temperature": 0}
LONG = SHORT | {"max_tokens": 1900, "ignore_eos": True}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CURL, JAVA = shutil.which("curl"), shutil.which("java")
JAVA_CLIENT = pathlib.Path(__file__).parents[2] / "data" / "AskTwice.java"

OFFERS = {
    "curl": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "tls": "Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
    "websocket": "Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "several": "upgrade: h2c, TLS/1.2\r\nconnection: UPGRADE\r\nupgrade: websocket\r\n",
    "without connection": "Upgrade: h2c\r\n",
    "none": "",
}


@pytest.fixture(autouse=True)
def sockets():
    yield
    close_all()


def chunked(request):
    """The same request, its body in chunks and with a trailer."""
    head, _, body = request.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    parts = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
    head = b"\r\n".join([*lines, b"transfer-encoding: chunked"])
    return head + b"\r\n\r\n" + b"".join(chunks) + b"0\r\nx-sum: 1\r\n\r\n"


def read_answer(stream):
    """Status and body of the next answer."""
    status = int(stream.readline().split()[1])
    length = 0
    while (line := stream.readline().strip().lower()) != b"":
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return status, stream.read(length)


def pieces(data, size):
    return [data[at : at + size] for at in range(0, len(data), size)]


# Offers.


@pytest.mark.parametrize(
    ("form", "offer"),
    slow.all_but(
        [*itertools.product(["length"], OFFERS), ("chunked", "several")],
        list(itertools.product(["length", "chunked"], OFFERS)),
    ),
)
def test_a_body_beside_an_offer_is_read_and_the_connection_goes_on(server, offer, form):
    request = request_bytes(SHORT, headers=OFFERS[offer])
    if form == "chunked":
        request = chunked(request)
    for size in (len(request), 1, 50):
        opened = connect(server)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with opened.makefile("rb") as answers:
            for _ in range(2):
                for piece in pieces(request, size):
                    opened.sendall(piece)
                status, body = read_answer(answers)
                assert status == 200, body
                assert json.loads(body)["usage"]["completion_tokens"] == 3
            opened.sendall(HEALTH)
            assert read_answer(answers)[0] == 200


def test_offers_without_a_body_and_to_paths_that_are_not_there(server):
    for offer in OFFERS.values():
        opened = connect(server)
        for method, path, expected in (
            ("GET", "/health", 200), ("GET", "/v1/models", 200), ("GET", "/v1/realtime", 404),
            ("GET", "/v1/completions", 405), ("POST", "/v1/completions", 415),
        ):  # fmt: skip
            head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{offer}\r\n"
            opened.sendall(head.encode())
            with opened.makefile("rb") as answers:
                assert read_answer(answers)[0] == expected


def test_many_offers_at_once_are_answered_in_order(server):
    offer = OFFERS["curl"]
    get = f"GET /health HTTP/1.1\r\nhost: localhost\r\n{offer}\r\n".encode()
    wrong = request_bytes(b"{", headers=OFFERS["tls"])
    right = request_bytes(SHORT, headers=offer)
    opened = connect(server, (get + wrong + get + right) * 3 + get * 2000)
    with opened.makefile("rb") as stream:
        found = [read_answer(stream)[0] for _ in range(2012)]
    assert found == [200, 400, 200, 200] * 3 + [200] * 2000


def test_limits_hold_beside_an_offer(other_engine):
    """Of bodies, heads and times; and `Expect` is obeyed."""
    with running(
        other_engine, max_body_bytes=1000, body_timeout_s=0.3, header_timeout_s=0.5
    ) as server:
        offer = OFFERS["curl"]
        large = request_bytes(SHORT | {"prompt": "a" * 2000}, headers=offer)
        for request in (large, chunked(large)):
            assert b" 413 " in connect(server, request).recv(65536)
        assert b" 408 " in connect(server, request_bytes(SHORT, headers=offer)[:-3]).recv(65536)
        assert read_all(connect(server, request_bytes(SHORT, headers=offer)[:60])) == b""
        long = f"{offer}x: {'y' * 50_000}\r\nz: {'y' * 50_000}\r\n"
        assert b" 431 " in connect(server, request_bytes(SHORT, headers=long)).recv(65536)
        head, end, body = request_bytes(
            SHORT, headers=f"{offer}expect: 100-continue\r\n"
        ).partition(b"\r\n\r\n")
        waits = connect(server, head + end)
        assert waits.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        waits.sendall(body)
        with waits.makefile("rb") as answers:
            assert read_answer(answers)[0] == 200


def test_connect_is_refused_and_what_follows_it_is_no_request(server):
    for target in ("localhost:1", "/health", "http://localhost/health"):
        tunnel = f"CONNECT {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        opened = connect(server, tunnel + request_bytes(SHORT))
        opened.shutdown(socket.SHUT_WR)
        answer = read_all(opened)
        assert answer.count(b"HTTP/1.1 ") <= 1
        assert b" 200 " not in answer


@pytest.mark.skipif(CURL is None, reason="no curl here")
@pytest.mark.parametrize("form", slow.all_but(["chunked"], ["length", "chunked", "large"]))
def test_curl_offers_http_2(server, form):
    """`curl --http2`; with a large body it waits for 100 Continue."""
    body = SHORT if form != "large" else SHORT | {"user": "x" * 2**20}
    json_type = ["-H", "content-type: application/json"]
    more = ["-H", "transfer-encoding: chunked"] if form == "chunked" else []
    url = f"{server.url}/v1/completions"
    command = [CURL, "--silent", "--http2", "-w", "%{http_code} %{http_version}\\n", "-d", "@-"]
    done = subprocess.run(
        [*command, *json_type, *more, url],
        input=json.dumps(body), text=True, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    answer, _, status = done.stdout.rpartition("}")
    assert status == "200 1.1\n", done.stdout
    assert '"completion_tokens":3' in answer.replace(" ", "")


@pytest.mark.slow
@pytest.mark.skipif(JAVA is None, reason="no java here")
def test_javas_client_offers_http_2(server):
    url = f"{server.url}/v1/completions"
    done = subprocess.run(
        [JAVA, JAVA_CLIENT, url, json.dumps(SHORT)], text=True, capture_output=True, timeout=120
    )
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["200", "HTTP_1_1"]] * 2, (
        done.stderr
    )


# One side closed.


def closed_side(server, *parts):
    opened = connect(server, *parts)
    opened.shutdown(socket.SHUT_WR)
    return opened


@pytest.mark.parametrize("stream", slow.all_but([True], [True, False]))
@pytest.mark.parametrize("form", slow.all_but(["offer"], ["length", "chunked", "offer"]))
def test_who_sends_no_more_gets_the_whole_answer(server, stream, form):
    body = SHORT | {"max_tokens": 60, "ignore_eos": True, "stream": stream}
    request = request_bytes(body, headers=OFFERS["curl"] if form == "offer" else "")
    if form == "chunked":
        request = chunked(request)
    whole = read_all(connect(server, request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)))
    assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
    answer = read_all(closed_side(server, request))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert texts_of(answer, stream) == texts_of(whole, stream)
    assert len(texts_of(whole, stream)) > 20


def texts_of(answer, stream):
    _, _, body = answer.partition(b"\r\n\r\n")
    if not stream:
        return json.loads(body)["choices"][0]["text"]
    assert body.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
    events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


@pytest.mark.slow
def test_an_answer_that_begins_byte_by_byte_is_the_same(other_engine, monkeypatch):
    """One that takes longer than all of the first bytes, of whatever status."""
    monkeypatch.setattr(half_closed, "_FIRST_WAIT_S", 0.0005)  # 0.13 s for all
    with running(other_engine, body_timeout_s=1, queue={"queue_timeout_s": 0.5}) as server:
        answer = read_all(closed_side(server, request_bytes(LONG | {"max_tokens": 100})))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 100
        busy = [connect(server, request_bytes(LONG | {"stream": True})) for _ in range(8)]
        assert all(b" 200 OK" in one.recv(100) for one in busy)
        late = read_all(closed_side(server, request_bytes(SHORT)))
        assert late.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        close_all()


def test_requests_that_were_sent_whole_are_answered_before_the_end(server):
    get, post, cut = HEALTH, request_bytes(SHORT), request_bytes(SHORT, length=1000)
    for sent, expected in (
        (post + get, 2), (get + post + post, 3), (post + b"GET /hea", 1), (post + cut, 1),
        (post + post + cut, 2), (get, 1), (cut, 0), (b"GET /hea", 0), (b"", 0),
    ):  # fmt: skip
        answer = read_all(closed_side(server, sent))
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b"HTTP/1.1") == expected, sent
    until(lambda: not server._uvicorn.server_state.connections, 5)
    until(lambda: not server._uvicorn.server_state.tasks, 5)


@pytest.mark.parametrize("stream", [True, False])
def test_who_sends_no_more_and_then_goes_is_noticed(server, engine, stream):
    for wait_s in (0, 0.5):
        opened = closed_side(server, request_bytes(LONG | {"stream": stream}))
        until(lambda: engine.metrics.running)
        time.sleep(wait_s)
        before = engine.metrics.generated_tokens
        assert engine.metrics.running == 1
        opened.close()
        until(lambda: engine.metrics.running == 0, 5)
        assert engine.metrics.generated_tokens - before < 1500
    until(lambda: not server._uvicorn.server_state.connections, 5)


def test_who_goes_from_a_stream_that_waits_is_forgotten(other_engine):
    """Its head was sent with a sign of life; the next two come after three seconds more."""
    count = num_slots(other_engine)
    with running(other_engine, pulse_s=1.5) as server:
        asked = request_bytes(LONG | {"stream": True})
        ahead = [connect(server, asked) for _ in range(count)]
        until(lambda: other_engine.metrics.running == count)
        waits = connect(server, asked)
        waits.settimeout(10)
        assert waits.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert other_engine.metrics.waiting == 1
        waits.close()
        until(lambda: not other_engine.metrics.waiting, 1.2)
        for one in ahead:
            one.close()
        until(lambda: not other_engine.num_unfinished, 20)


def test_a_server_that_drains_answers_who_sends_no_more(other_engine):
    with running(other_engine) as server:
        opened = closed_side(server, request_bytes(LONG | {"max_tokens": 60}))
        until(lambda: other_engine.metrics.running)
        server.drain()
        answer = read_all(opened)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 60
