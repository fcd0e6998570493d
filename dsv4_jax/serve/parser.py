"""RequestParser: reads HTTP/1.1, whatever other protocol a request offers."""

from __future__ import annotations

from collections.abc import Buffer
from typing import Protocol

import httptools


class _Reader(Protocol):
    """What a parser tells of requests, besides the methods that httptools calls.

    Attributes:
      parser: what reads the next bytes.
    """

    parser: httptools.HttpRequestParser

    def take_offer(self) -> bytes | None:
        """The head of a request that offers another protocol, without the offer."""
        ...


class RequestParser(httptools.HttpRequestParser):
    """httptools' parser for a server that never changes the protocol.

    After a head with `Upgrade`, such as curl and Java send to offer HTTP/2, the parser of httptools
    takes all that follows for the other protocol. A server that does not want it answers as if
    there were no offer (RFC 9110, 7.8), so that what follows is the body of the request: another
    parser reads the head without the offer, and goes on from there.
    """

    def __init__(self, reader: _Reader) -> None:
        """A parser of one connection."""
        super().__init__(reader)
        self._reader = reader
        if hasattr(self, "set_dangerous_leniencies"):  # since httptools 0.6.3
            # What comes after a request that closes the connection is no fault of that request.
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Buffer) -> None:
        """Reads what has come.

        Raises:
          httptools.HttpParserError: it is no HTTP.
          httptools.HttpParserUpgrade: of a method that needs another protocol, CONNECT.
        """
        rest, parser = memoryview(data), super()
        while True:
            try:
                return parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                head = self._reader.take_offer()
                if head is None:
                    raise
                rest = rest[offer.args[0] :]
            self._reader.parser = successor = RequestParser(self._reader)
            parser = super(RequestParser, successor)
            parser.feed_data(head)
