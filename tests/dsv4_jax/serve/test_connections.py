"""Requests that offer another protocol."""

import json
import pathlib
import shutil
import socket
import subprocess

import pytest

from helpers.raw_http import close_all, connect, read_all, request_bytes
from helpers.serve import BYTES_ALONE, MODEL, running

pytestmark = BYTES_ALONE

SHORT = {"model": MODEL, "prompt": "a", "max_tokens": 3, "temperature": 0}
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


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("form", ["length", "chunked"])
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


def test_limits_hold_beside_an_offer(engine):
    """Of bodies, heads and times; and `Expect` is obeyed."""
    with running(engine, max_body_bytes=1000, body_timeout_s=0.3, header_timeout_s=0.5) as server:
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
@pytest.mark.parametrize("form", ["length", "chunked", "large"])
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
