"""Load: requests for a server with OpenAI's API, and their times.

In an open loop requests come when they come, whether or not the server keeps up. Arrivals are a
Poisson process that is drawn before the first request is sent, and a request's times count from
its arrival, so that a server which delays its clients cannot make itself look better.

In a closed loop a number of clients ask one request after the other, each as soon as its last
answer has ended. A request's times count from when it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4_jax.lines import BLANKS, read_lines
from dsv4_jax.regular_files import open_given

if TYPE_CHECKING:
    import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVED = "200"
"""The status of a request that was served to its end."""

_MAX_LINE = 2**24
"""Bytes of a line of prompts."""

_MAX_REFUSAL = 2**16
"""Bytes that are read of what a server says of a request that it refused."""

_SHOWN_CHARS = 300
"""Characters of it that are shown."""


@dataclasses.dataclass
class Outcome:
    """What became of one request.

    Attributes:
      status: HTTP's; "error in the stream", "cut off", "timeout", or the name of what the client
        raised, where there is none or it is not the end of the matter.
      late_s: seconds from its arrival until it was sent.
      first_s: seconds from its arrival to the first text; None if there was none.
      gaps_s: seconds between events that carry text.
      whole_s: seconds from its arrival to the end.
      drawn_tokens: tokens of the answer, by the server's account.
      prompt_tokens: those of the prompt.
      hit_tokens: those of the prompt that were in the server's cache; None if it does not say.
      problem: what the server said of a request that it refused; empty if there is nothing.
    """

    status: str = ""
    late_s: float = 0.0
    first_s: float | None = None
    gaps_s: list[float] = dataclasses.field(default_factory=list)
    whole_s: float = 0.0
    drawn_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int | None = None
    problem: str = ""

    @property
    def per_token_s(self) -> float | None:
        """Seconds from the first text to the last, for each token after the first."""
        return sum(self.gaps_s) / (self.drawn_tokens - 1) if self.drawn_tokens > 1 else None


def draw_bodies(
    count: int,
    *,
    seed: int,
    prompt_tokens: tuple[int, int],
    shared: float,
    vocab_size: int,
    max_tokens: int,
    temperature: float | None = None,
) -> list[dict[str, Any]]:
    """Completions of random tokens, of log-uniform lengths.

    Args:
      count: how many.
      seed: of the draws.
      prompt_tokens: the shortest prompt and the longest.
      shared: share of prompts whose first half is that of one common document.
      vocab_size: token ids are below it.
      max_tokens: tokens of each answer, which no end token ends.
      temperature: of each request; None leaves it to the server.
    """
    rng = np.random.default_rng(seed)
    low, high = np.log(prompt_tokens[0]), np.log(prompt_tokens[1] + 1)
    head = rng.integers(0, vocab_size, prompt_tokens[1])
    chosen = {} if temperature is None else {"temperature": temperature}
    bodies = []
    for number in range(count):
        length = min(int(np.exp(rng.uniform(low, high))), prompt_tokens[1])
        own = rng.integers(0, vocab_size, length)
        if rng.random() < shared:
            own[: length // 2] = head[: length // 2]
        bodies.append(
            {
                "prompt": own.tolist(),
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "seed": seed + number,
            }
            | chosen
        )
    return bodies


def read_bodies(path: str | pathlib.Path, *, max_tokens: int) -> list[dict[str, Any]]:
    """Requests of a JSON-lines file.

    A line is a text, or an object with `prompt` or `messages` and further fields of the request.

    Raises:
      ValueError: a line is neither, there is none, or it is no file of `open_given`.
      OSError: the file cannot be read.
    """
    bodies = []
    with open_given(path) as file:
        for number, line in enumerate(read_lines(file, _MAX_LINE), 1):
            if line is not None and not line.strip(BLANKS):
                continue
            try:
                value = None if line is None else json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, str):
                value = {"prompt": value}
            if not isinstance(value, dict) or not ("prompt" in value) ^ ("messages" in value):
                raise ValueError(
                    f"{path}: line {number} must be a JSON text, or an object with either prompt "
                    f"or messages, of at most {_MAX_LINE} bytes"
                )
            bodies.append({"max_tokens": max_tokens} | value)
    if not bodies:
        raise ValueError(f"{path} must have a line at least, and has none")
    return bodies


def draw_arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """Seconds from the start, ascending; the first is 0."""
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, count)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def find_model(url: str, headers: dict[str, str], timeout_s: float) -> str:
    """The name of the first model that a server has.

    Raises:
      ValueError: the server cannot be reached, refuses, or answers something else.
    """
    httpx = _find_httpx()
    try:
        with httpx.Client(trust_env=False, timeout=timeout_s) as client:
            answer = client.get(f"{url}/v1/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"no server answers at {url}: {error}") from None
    if answer.status_code != 200:
        way_out = "; pass --api-key" if answer.status_code == 401 else ""
        raise ValueError(f"{url}/v1/models answered with status {answer.status_code}{way_out}")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{url}/v1/models named no model; pass --model") from None


async def run_load(
    url: str,
    bodies: Sequence[dict[str, Any]],
    arrivals_s: Sequence[float] | None,
    *,
    headers: dict[str, str],
    timeout_s: float,
    concurrency: int | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Sends every request at its time, each on a connection of its own.

    Args:
      url: of the server, without a path.
      bodies: of the requests; answers stream and count their tokens.
      arrivals_s: when each comes, in seconds from the start, ascending; None in a closed loop.
      headers: of every request.
      timeout_s: seconds after which a request is given up.
      concurrency: requests at a time in a closed loop; None in an open loop.
      on_end: is told of each outcome.

    Returns:
      Outcomes in the order of the requests, and seconds from the first arrival to the last end.

    Raises:
      ValueError: both arrivals and a concurrency are given, or neither.
    """
    if (arrivals_s is None) == (concurrency is None):
        raise ValueError(
            "run_load needs either arrivals_s (an open loop) or concurrency (a closed loop), "
            f"got {'neither' if concurrency is None else 'both'}"
        )
    httpx = _find_httpx()
    places = asyncio.Semaphore(len(bodies) if concurrency is None else concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
        began = time.perf_counter()

        async def ask(body: dict[str, Any], arrival_s: float) -> Outcome:
            path = CHAT if "messages" in body else COMPLETIONS
            body = body | {"stream": True, "stream_options": {"include_usage": True}}
            outcome = Outcome()
            try:
                async with asyncio.timeout(timeout_s):
                    request = client.build_request("POST", url + path, json=body, headers=headers)
                    await _ask_one(client, request, began + arrival_s, outcome)
            except TimeoutError:
                outcome.status = "timeout"
            except (httpx.HTTPError, OSError) as error:
                outcome.status = type(error).__name__
            outcome.whole_s = time.perf_counter() - began - arrival_s
            on_end(outcome)
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, body in enumerate(bodies):
                await places.acquire()
                sent_s = time.perf_counter() - began
                arrival_s = sent_s if arrivals_s is None else arrivals_s[number]
                await asyncio.sleep(max(arrival_s - sent_s, 0))
                tasks.append(group.create_task(ask(body, arrival_s)))
                tasks[-1].add_done_callback(lambda task: places.release())
        return [task.result() for task in tasks], time.perf_counter() - began


async def _ask_one(
    client: httpx.AsyncClient, request: httpx.Request, arrival_s: float, outcome: Outcome
) -> None:
    """Sends a request, and reads its answer into the outcome."""
    outcome.late_s = time.perf_counter() - arrival_s
    answer = await client.send(request, stream=True)
    try:
        if answer.status_code != 200:
            outcome.status = str(answer.status_code)
            outcome.problem = _read_problem(await _read_refusal(answer))
            return
        outcome.status, last_s, rest = "cut off", 0.0, b""
        async for part in answer.aiter_raw():
            now = time.perf_counter()
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event[event.find(b"data:") + 5 :].strip()
                if data == b"[DONE]":
                    outcome.status = SERVED
                    return
                if not _read_event(data, outcome):
                    continue
                if outcome.first_s is None:
                    outcome.first_s = now - arrival_s
                else:
                    outcome.gaps_s.append(now - last_s)
                last_s = now
            if outcome.status == "error in the stream":
                return
    finally:
        await answer.aclose()


async def _read_refusal(answer: httpx.Response) -> bytes:
    """The beginning of its body, as far as it comes: the status stands whatever follows."""
    body = b""
    with contextlib.suppress(_find_httpx().HTTPError, OSError):
        async for part in answer.aiter_raw():
            body += part
            if len(body) > _MAX_REFUSAL:
                break
    return body[:_MAX_REFUSAL]


def _read_problem(body: bytes) -> str:
    """The message of a refusal in OpenAI's form, or what there is; one line that can be printed."""
    try:
        told = json.loads(body)
        error = told.get("error", told)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, AttributeError):
        text = body[:_SHOWN_CHARS].decode(errors="replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:_SHOWN_CHARS]


def _read_event(data: bytes, outcome: Outcome) -> bool:
    """Whether an event carries text; it counts usage, and notes an error."""
    try:
        event = json.loads(data)
        if "error" in event:
            outcome.status = "error in the stream"
            return False
        if usage := event.get("usage"):
            outcome.drawn_tokens = int(usage.get("completion_tokens") or 0)
            outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            hits = details.get("cached_tokens", usage.get("prompt_cache_hit_tokens"))
            outcome.hit_tokens = None if hits is None else int(hits)
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        spoken = (delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
        return bool(choice.get("text") or any(spoken))
    except (ValueError, TypeError, AttributeError):
        return False


def _find_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise ValueError(
            "httpx is not installed; it comes with the extra bench: pip install 'dsv4-jax[bench]'"
        ) from None
    return httpx
