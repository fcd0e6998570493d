"""Record: what the log says of one request."""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import time
from typing import Any

log = logging.getLogger("dsv4_jax.serve")
"""One line of JSON a request."""


@dataclasses.dataclass
class Record:
    """One request on its way.

    Attributes:
      request_id: what the client is told.
      path: of the address, cut short.
      method: of HTTP.
      client: the other end's address.
      key: which of the keys it came with; -1 for none.
      status: of the answer; 0 if there was none.
      started_s: when it came.
      first_token_s: when its first token was there.
      details: counts of tokens, and what else there is to say.
      body: JSON of the request's, where another process has read it and the log is to have it.
    """

    path: str
    method: str
    client: str
    request_id: str = dataclasses.field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    key: int = -1
    status: int = 0
    started_s: float = dataclasses.field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    body: str | None = None

    def count(self, **counts: int) -> None:
        """Adds to counts of tokens."""
        for name, value in counts.items():
            self.details[name] = self.details.get(name, 0) + value

    def write(self) -> None:
        """Writes the line."""
        now = time.perf_counter()
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(now - self.started_s, 4),
        }
        if self.key >= 0:
            line["key"] = self.key
        if self.first_token_s is not None:
            line["first_token_seconds"] = round(self.first_token_s - self.started_s, 4)
        told = json.dumps(line | self.details)
        if self.body is not None:
            told = f'{told[:-1]}, "body": {self.body}}}'
        log.info("%s", told)
