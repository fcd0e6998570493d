"""Requests as bytes, over sockets of the test's own."""

import contextlib
import json
import socket

OPENED = []
"""Sockets that the fixture `sockets` closes at the end of a test."""


def close_all():
    while OPENED:
        OPENED.pop().close()


def connect(server, *parts):
    """A connection over which these bytes were sent."""
    opened = socket.create_connection(server.address, timeout=30)
    OPENED.append(opened)
    for part in parts:
        opened.sendall(part)
    return opened


def request_bytes(body, path="/v1/completions", headers="", length=None):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(raw) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {size}\r\n\r\n".encode() + raw


def read_all(opened):
    """What comes until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := opened.recv(65536):
            data += part
    return data
