"""ServeSettings: what a server is told when it starts."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from dsv4_jax.rules import Flag, Ruled, Whole, Word, check_fields
from dsv4_jax.serving.engine import MAX_SAMPLES
from dsv4_jax.serving.requests.grammar_trials import GrammarBounds

EFFORTS = {
    "first": {"low": "low", "high": "low", "xhigh": "high", "max": "high"},
    "later": {"low": "low", "high": "high", "xhigh": "xhigh", "max": "max"},
}
"""By release of a checkpoint, how the library that renders prompts calls each reasoning effort.

The first releases knew two efforts, and rendered a paragraph for the higher one alone; later ones
render that paragraph for "high", and another one for "max".
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What a server allows and how it answers.

    Attributes:
      model_name: what requests call the model.
      api_keys: one of them is asked for; none is asked for if there are none.
      listens_at: the name or address that it listens at, by which it may be called.
      allowed_hosts: other names by which it may be called, besides those of loopback and the
        address at which a connection came in; `*.example.com` and `*` stand for many. Pages of
        these hosts, but not of `*`, may use it.
      thinks: conversations think unless a request says otherwise.
      release: a key of `EFFORTS`.
      max_body_bytes: the largest body.
      max_held_bytes: of large bodies that come or are read, and of large answers that are made of
        a body alone, all together.
      max_choices: most answers to one request: prompts times `n`.
      max_tools: most tools of a conversation.
      grammar_bounds: what reading and compiling the form of one answer may take.
      pulse_s: seconds after which a stream that has nothing to say sends a sign of life.
      body_timeout_s: seconds in which a body has to come.
      header_timeout_s: seconds in which the head of a request has to come.
      stall_timeout_s: seconds without reading after which a connection is cut.
      drain_timeout_s: seconds that answers have to end after SIGTERM.
      keep_alive_s: seconds that a connection may idle between requests.
      max_connections: connections at once.
      retry_after_s: what a refused client is told to wait.
      log_prompts: log lines hold prompts.
      has_page: there are the page at `/` and the state of the engine that it shows.

    Raises:
      ValueError: a field with a rule is of another type or out of range.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    listens_at: str = ""
    allowed_hosts: tuple[str, ...] = ()
    thinks: bool = True
    release: Annotated[
        str,
        Ruled(
            Word(tuple(EFFORTS)),
            help="release of the checkpoint, by which efforts of reasoning are rendered",
        ),
    ] = "first"
    max_body_bytes: Annotated[int, Ruled(Whole(1), help="largest body of a request")] = 4 * 2**20
    max_held_bytes: Annotated[
        int,
        Ruled(
            Whole(1, 2**44),
            flag=Whole(2**16, 2**44),
            help="most bytes of large bodies, and of large answers of /tokenize and /detokenize, "
            "that are held at a time, of all requests together",
        ),
    ] = 256 * 2**20
    max_choices: Annotated[
        int, Ruled(Whole(1, MAX_SAMPLES), help="most answers to one request")
    ] = 16
    max_tools: Annotated[int, Ruled(Whole(1, 2**16), help="most tools of a conversation")] = 1024
    grammar_bounds: GrammarBounds = dataclasses.field(default_factory=GrammarBounds)
    pulse_s: float = 2.0
    body_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    keep_alive_s: int = 5
    max_connections: Annotated[int, Ruled(Whole(1, 2**16), help="most connections at once")] = 1000
    retry_after_s: int = 1
    log_prompts: Annotated[bool, Ruled(Flag(), help="write the bodies of requests to the log")] = (
        False
    )
    has_page: bool = True

    def __post_init__(self) -> None:
        """Fields with a rule become checked values."""
        check_fields(self)
