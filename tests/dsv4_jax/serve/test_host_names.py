"""Which hosts and which sites' pages a server answers: with a key, without, and at every path."""

import json

import httpx
import pytest

from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.host_names import HostNames, read_pattern
from dsv4_jax.serve.server import bind
from dsv4_jax.serve.web_page import PAGE_PATHS, STATE_PATH
from helpers.raw_http import close_all, connect, read_all, request_bytes
from helpers.serve import BYTES_ALONE, MODEL, running

SHORT = {"model": MODEL, "prompt": "a", "max_tokens": 1}
GETS = (*PAGE_PATHS, STATE_PATH, "/health", "/metrics", "/v1/models", f"/v1/models/{MODEL}")
POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
         "/v1/messages/count_tokens", "/tokenize", "/detokenize")  # fmt: skip


@pytest.fixture(autouse=True)
def sockets():
    yield
    close_all()


def status(names, host, *, origin=None, method="POST", server=("127.0.0.1", 8000), **more):
    """That of a refusal, or 200."""
    named = {"host": host, "origin": origin} | {key.replace("_", "-"): more[key] for key in more}
    headers = [(key.encode(), value.encode()) for key, value in named.items() if value is not None]
    scope = {"headers": headers, "server": server, "method": method, "http_version": "1.1"}
    try:
        names.check_host(scope)
        names.check_origin(scope)
    except ApiError as error:
        return error.status
    return 200


# Hosts.


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:1", "localhost.", "localhost:", "127.0.0.1", "127.0.0.1:80",
     "127.9.8.7:8000", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]:8000"],
)  # fmt: skip
def test_names_of_loopback_are_known(host):
    assert status(HostNames(()), host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
     "evil-localhost", "127.0.0.1.nip.io:8000", "a.localhost", "192.168.1.5", "[fd00::1]:8000",
     "0.0.0.0:8000", "[::]", "testserver", "xn--lclhost-n0a"],
)  # fmt: skip
def test_other_names_are_refused(host):
    assert status(HostNames(()), host) == 403


@pytest.mark.parametrize(
    "host",
    [None, "", ":8000", "localhost@evil.example", "evil.example@localhost", "localhost:80:80",
     "localhost/evil", "localhost,evil.example", "localhost evil", "[localhost]", "[::1", "::1",
     "[::1]evil", "[1.2.3.4]x", "localhost:x", "localhost:999999", "http://localhost", "*", ".",
     "l\u00f6calhost", "[:::]", "[fe80::1%25lo]"],
)  # fmt: skip
def test_what_names_no_host_is_refused(host):
    assert status(HostNames(("*",)), host) == 400


def test_the_name_it_listens_at_and_the_address_of_the_connection_are_known():
    everywhere = HostNames((), "0.0.0.0")
    for address in ("192.168.1.5", "::ffff:192.168.1.5"):
        assert status(everywhere, "192.168.1.5:8000", server=(address, 8000)) == 200
        assert status(everywhere, "192.168.1.6:8000", server=(address, 8000)) == 403
    assert status(everywhere, "[fe80::1]:8000", server=("fe80::1%eth0", 8000)) == 200
    assert status(everywhere, "0.0.0.0:8000") == 200
    assert status(everywhere, "gpu-box:8000", server=("192.168.1.5", 8000)) == 403
    assert status(HostNames((), "GPU-box"), "gpu-box:8000", server=("192.168.1.5", 8000)) == 200
    for nothing in (None, (None, None), ("", 0)):
        assert status(everywhere, "evil.example", server=nothing) == 403
    assert status(HostNames(()), "app.sock", server=("app.sock", None)) == 200


def test_names_that_are_allowed():
    names = HostNames(("llm.example.com", "*.lan", "FD00:0::1", "10.0.0.1", "my_box"))
    for host in ("LLM.example.com:443", "llm.example.com.", "a.lan", "a.b.lan:1", "[fd00::1]:8000",
                 "10.0.0.1", "my_box:8000", "localhost"):  # fmt: skip
        assert status(names, host) == 200, host
    for host in ("example.com", "a.llm.example.com", "lan", "alan", "a.lan.evil", "10.0.0.2"):
        assert status(names, host) == 403, host
    assert status(HostNames(("*",)), "evil.example:8000") == 200


@pytest.mark.parametrize(
    "pattern",
    ["", "*.", "**", "*a", "a.*", "llm.example.com:8000", "http://a", "a/", "a b", "a,b", "[::1",
     "[::1]:80", "1:2:3", "*.10.0.0.1", "*.::1", "\u00fc.example", "a%", "."],
)  # fmt: skip
def test_what_is_no_name_cannot_be_allowed(pattern):
    with pytest.raises(ValueError, match=r"--allowed-host must be a name or an address without a"):
        read_pattern("--allowed-host", pattern)
    with pytest.raises(ValueError, match="allowed_hosts must be"):
        HostNames((pattern,))


@BYTES_ALONE
@pytest.mark.parametrize("keys", [(), ("sk-me",)])
def test_another_host_is_refused_at_every_path_with_or_without_a_key(other_engine, keys, caplog):
    caplog.set_level("INFO", "dsv4_jax.serve")
    with (
        running(other_engine, api_keys=keys) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        client.headers["authorization"] = "Bearer sk-me"
        asked = [("GET", path) for path in (*GETS, "/nowhere", "/health/")]
        asked += [("POST", path) for path in (*POSTS, "/nowhere")]
        asked += [("OPTIONS", "/v1/completions"), ("PUT", "/"), ("HEAD", "/health")]
        for method, path in asked:
            answer = client.request(method, path, headers={"host": "evil.example:8000"})
            assert answer.status_code == 403, (method, path)
            if method != "HEAD":
                error = answer.json()["error"]
                assert error["message"].startswith("this server is not called 'evil.example'")
                assert "--allowed-host evil.example" in error["message"]
                assert error["type"] == "permission_error"
        for path in GETS:
            assert client.get(path).status_code == 200, path
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        # A browser sends these where a name points to the machine by surprise.
        for line in ("host: localhost\r\nhost: evil.example", "x: y", "host:", "host: a b"):
            raw = f"GET /health HTTP/1.1\r\n{line}\r\nconnection: close\r\n\r\n".encode()
            assert read_all(connect(server, raw)).startswith(b"HTTP/1.1 400 "), line
        old = b"GET /health HTTP/1.0\r\n"
        assert b" 200 OK\r\n" in read_all(connect(server, old + b"\r\n"))
        assert b" 403 " in read_all(connect(server, old + b"host: evil.example\r\n\r\n"))
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert sum(line["status"] == 403 for line in lines) == len(asked) + 1


@BYTES_ALONE
def test_a_target_with_a_host_says_the_host(server):
    """RFC 9112, 3.2.2: it counts, and the header does not."""
    for target, header, expected in (
        ("http://evil.example/health", "localhost", 403),
        ("http://localhost@evil.example/health", "localhost", 403),
        ("http://evil.example", "localhost", 403),
        ("http://localhost:8000/health?a=b", "evil.example", 200),
        ("http://[::1]/health", "evil.example", 200),
        ("http://localhost", "evil.example", 200),
        ("//evil.example/health", "localhost", 404),
        ("/health", "localhost", 200),
    ):
        raw = f"GET {target} HTTP/1.1\r\nhost: {header}\r\nconnection: close\r\n\r\n".encode()
        answer = read_all(connect(server, raw))
        assert answer.startswith(f"HTTP/1.1 {expected} ".encode()), (target, answer[:200])


@BYTES_ALONE
def test_no_redirect_names_a_host(server):
    """Of a slash too many, nothing is made."""
    for path in (*GETS, *POSTS):
        for method in ("GET", "POST"):
            for host in ("localhost", "127.0.0.1:1"):
                answer = httpx.request(method, f"{server.url}{path}/", headers={"host": host})
                assert answer.status_code in (404, 405), (method, path)
                assert "location" not in answer.headers


@BYTES_ALONE
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "::1", "127.0.0.2"])
def test_servers_at_other_addresses(other_engine, address):
    try:
        bound = bind(address, 0)
    except OSError as error:
        pytest.skip(f"not an address of this machine: {error}")
    with running(other_engine, bound=bound, listens_at=address) as server:
        host, port = server.address
        assert httpx.get(f"{server.url}/health").status_code == 200
        names = [f"localhost:{port}", f"[::1]:{port}", f"127.0.0.1:{port}"]
        for name, expected in [*((name, 200) for name in names), ("evil.example", 403)]:
            answer = httpx.get(f"{server.url}/health", headers={"host": name})
            assert answer.status_code == expected, name
        if host == "::":
            mapped = httpx.get(f"http://127.0.0.1:{port}/health")
            assert mapped.status_code == 200


# Sites.


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost:8000", "http://localhost:8000", 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("localhost", "http://localhost", 200),
        ("localhost:80", "http://localhost", 200),
        ("localhost", "https://localhost", 200),  # behind a proxy that speaks TLS
        ("localhost:443", "https://localhost", 200),
        ("localhost:8000", "http://localhost:3000", 403),
        ("localhost:8000", "http://127.0.0.1:8000", 403),
        ("localhost:8000", "http://localhost", 403),
        ("localhost", "http://localhost:8000", 403),
        ("localhost:8000", "http://evil.example", 403),
        ("localhost:8000", "http://localhost:8000.evil.example", 403),
        ("localhost:8000", "http://evil.example:8000", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "", 403),
        ("localhost:8000", "file://", 403),
        ("localhost:8000", "localhost:8000", 403),
        ("localhost:8000", "http://localhost:8000/", 403),
        ("localhost:8000", "http://localhost:8000 http://evil.example", 403),
        ("localhost:8000", "http://evil@localhost:8000", 403),
        ("localhost:8000", "chrome-extension://abcdefghijklmnop", 403),
        ("localhost:8000", "http://" + "x" * 5000, 403),
        # Names that the server is told may have other ports, and other hosts' pages ask there.
        ("localhost:8000", "https://llm.example.com", 200),
        ("llm.example.com", "https://llm.example.com", 200),
        ("localhost:8000", "http://llm.example.com:3000", 200),
        ("localhost:8000", "https://chat.lan", 200),
        ("localhost:8000", "chrome-extension://aaaabbbb", 200),
        ("llm.example.com", "http://localhost:8000", 403),
        ("llm.example.com", "https://evil.example", 403),
    ],
)
def test_origins(host, origin, expected):
    allowed = ("llm.example.com", "*.lan", "aaaabbbb")
    for names in (HostNames(allowed), HostNames((*allowed, "*"))):
        for method in ("POST", "GET", "OPTIONS", "DELETE"):
            assert status(names, host, origin=origin, method=method) == expected


@pytest.mark.parametrize(
    ("relation", "method", "expected"),
    [("cross-site", "POST", 403), ("same-site", "POST", 403), ("same-origin", "POST", 200),
     ("none", "POST", 200), (None, "POST", 200), ("cross-site", "GET", 200),
     ("cross-site", "HEAD", 200), ("cross-site", "PUT", 403)],
)  # fmt: skip
def test_a_browser_that_sends_no_origin_says_whether_it_is_another_site(relation, method, expected):
    assert status(HostNames(()), "localhost", method=method, sec_fetch_site=relation) == expected
    theirs = {"origin": "http://evil.example", "sec_fetch_site": relation}
    assert status(HostNames(()), "localhost", method=method, **theirs) == 403


@BYTES_ALONE
@pytest.mark.parametrize("keys", [(), ("sk-me",)])
def test_pages_of_another_site_get_nothing_that_costs(other_engine, keys):
    with (
        running(other_engine, api_keys=keys) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        client.headers.update({"authorization": "Bearer sk-me", "origin": "https://evil.example"})
        before = other_engine.metrics.submitted
        for path in POSTS:
            answer = client.post(path, json=SHORT)
            assert answer.status_code == 403, path
            assert "pages of 'https://evil.example' cannot use this server" in answer.text
            assert not [name for name in answer.headers if name.startswith("access-control")]
        form = {"content-type": "text/plain"}
        assert client.post(POSTS[0], content=json.dumps(SHORT), headers=form).status_code == 403
        assert client.options(POSTS[0]).status_code == 403
        for path in (STATE_PATH, "/metrics", "/v1/models"):
            assert client.get(path).status_code == 403, path
        for path in ("/health", *PAGE_PATHS):
            assert client.get(path).status_code == 200, path
        assert other_engine.metrics.submitted == before
        client.headers["origin"] = server.url
        assert client.post(POSTS[0], json=SHORT).status_code == 200
        twice = request_bytes(SHORT, headers=f"origin: {server.url}\r\norigin: null\r\n")
        assert b" 403 " in connect(server, twice).recv(65536)
        messages = client.post("/v1/messages", json={}, headers={"origin": "null"})
        assert messages.json()["error"]["type"] == "permission_error"


@BYTES_ALONE
def test_a_site_that_is_allowed_may_use_it(other_engine):
    with running(other_engine, allowed_hosts=("chat.example",)) as server:
        page = {"origin": "https://chat.example"}
        answer = httpx.post(f"{server.url}/v1/completions", json=SHORT, headers=page)
        assert answer.status_code == 200
        page["host"] = "chat.example"
        assert httpx.get(f"{server.url}/v1/models", headers=page).status_code == 200
