"""`/v1/completions`: text that goes on from a prompt."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from dsv4_jax import checks
from dsv4_jax.serve.drawing import read_sampling, read_setting
from dsv4_jax.serve.errors import ApiError, refuse
from dsv4_jax.serve.fields import read_flag, read_integer, within
from dsv4_jax.serve.token_names import TokenNames
from dsv4_jax.serving.requests.request import Completion, Token
from dsv4_jax.serving.requests.text import INCOMPLETE, TextState
from dsv4_jax.step.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""That of the protocol."""


class CompletionRequest(NamedTuple):
    """What was asked for.

    Attributes:
      prompts: texts or lists of token ids.
      n: answers to each.
      sampling: how they draw; answer i of a prompt has the seed and i more.
      streams: events are wanted.
      has_usage: the last event counts tokens.
      echoes: answers begin with their prompts.
      names_by_id: log-probabilities call every token by its id.
    """

    prompts: list[str | list[int]]
    n: int
    sampling: SamplingParams
    streams: bool
    has_usage: bool
    echoes: bool
    names_by_id: bool


def read_completion(body: Mapping[str, Any], *, max_choices: int) -> CompletionRequest:
    """Reads fields that were checked.

    Raises:
      ApiError: one is of another type, out of range, or does not go with another one.
    """
    prompts = _read_prompts(body, max_choices)
    n = read_integer(body, "n", 1, max_choices, 1) or 1
    if len(prompts) * n > max_choices:
        refuse("n", f"prompts times n must be at most {max_choices}, got {len(prompts) * n}")
    if body.get("best_of", n) != n:
        refuse("best_of", "is not supported: all answers are given")
    echoes = read_flag(body, "echo")
    logprobs = read_setting("logprobs", body, "logprobs", None)
    if echoes and logprobs is not None:
        refuse("logprobs", "is not supported with echo: a prompt has no log-probabilities here")
    streams, has_usage = read_stream(body)
    max_tokens = read_setting("max_new_tokens", body, "max_tokens", DEFAULT_MAX_TOKENS)
    sampling = read_sampling(
        body,
        max_new_tokens=max_tokens or DEFAULT_MAX_TOKENS,
        stop_texts=read_setting("stop_texts", body, "stop", ()),
        logprobs=logprobs,
    )
    names_by_id = read_flag(body, "return_tokens_as_token_ids")
    return CompletionRequest(prompts, n, sampling, streams, has_usage, echoes, names_by_id)


def read_stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether events are wanted, and whether they count tokens."""
    streams = read_flag(body, "stream")
    if "stream_options" not in body:
        return streams, False
    if not streams:
        refuse("stream_options", "is for stream=true alone")
    return streams, read_flag(within(body, "stream_options"), "stream_options.include_usage")


def _read_prompts(body: Mapping[str, Any], max_choices: int) -> list[str | list[int]]:
    prompt = body.get("prompt")
    rule = f"must be a text, token ids, or 1 to {max_choices} of one of them"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        refuse("prompt", f"{rule}, got {checks.shown(prompt)}")
    if all(type(one) is int for one in prompt):
        return [prompt]
    if len(prompt) > max_choices:
        refuse("prompt", f"{rule}, got {len(prompt)}")
    for one in prompt:
        if not isinstance(one, str) and not (
            isinstance(one, list) and all(type(token) is int for token in one)
        ):
            refuse("prompt", f"{rule}, got {checks.shown(prompt)}")
    return prompt


class CompletionRenderer:
    """Tokens to the objects of `/v1/completions`; choice i * n + j is answer j to prompt i."""

    def __init__(
        self, asked: CompletionRequest, model_name: str, tokenizer: Tokenizer | None
    ) -> None:
        """Of one request."""
        self.streams, self.n = asked.streams, asked.n
        self._asked = asked
        self._tokenizer = tokenizer
        has_names = asked.sampling.logprobs is not None
        self._names = TokenNames(tokenizer if has_names else None, by_id=asked.names_by_id)
        self._model_name = model_name
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._before = b"data: " + json.dumps(self._head).encode()[:-1] + b', "choices": [{"text": '
        self._after: dict[int, str] = {}  # by number, the rest of an event that is not the last
        self._echoed: set[int] = set()
        self._offsets: dict[int, tuple[int, TextState]] = {}
        self._logprobs: dict[int, list[dict[str, Any]]] = {}

    def start(self, hit_tokens: int) -> bytes:
        """Nothing: every event stands by itself."""
        return b""

    def tokens(self, number: int, tokens: list[Token]) -> bytes:
        """One event for all tokens that came together, if they add text or end the answer."""
        logprobs = None
        if tokens[0].logprobs is not None:
            logprobs = self._add_logprobs(number, tokens)
        if not self.streams:
            return b""
        text = "".join([token.text or "" for token in tokens])
        if self._asked.echoes and number not in self._echoed:
            self._echoed.add(number)
            text = self._prompt_text(number) + text
        reason = tokens[-1].finish_reason
        if not text and reason is None and logprobs is None:
            return b""
        after = self._after.get(number)
        if after is None or logprobs is not None or reason is not None:
            after = (
                f', "index": {number}, "logprobs": {json.dumps(logprobs) if logprobs else "null"}, '
                f'"finish_reason": {json.dumps(reason)}}}]}}\n\n'
            )
            if logprobs is None and reason is None:
                self._after[number] = after
        return self._before + (encode_basestring_ascii(text) + after).encode()

    def is_done(self, number: int) -> bool:
        """The engine knows the stop texts."""
        return False

    def end(self, completions: Sequence[Completion]) -> bytes:
        """The usage and the end of a stream, or the whole answer."""
        if self.streams:
            last = b"data: [DONE]\n\n"
            if not self._asked.has_usage:
                return last
            event = self._head | {"choices": [], "usage": self._usage(completions)}
            return b"data: " + json.dumps(event).encode() + b"\n\n" + last
        choices = [
            {
                "text": (self._prompt_text(number) if self._asked.echoes else "")
                + (done.text or ""),
                "index": number,
                "logprobs": _join_logprobs(self._logprobs.get(number)),
                "finish_reason": done.finish_reason,
            }
            for number, done in enumerate(completions)
        ]
        return json.dumps(
            self._head | {"choices": choices, "usage": self._usage(completions)}
        ).encode()

    def failed(self, error: ApiError) -> bytes:
        """An event with the error; there is no [DONE] after it."""
        return b"data: " + json.dumps(error.openai()).encode() + b"\n\n"

    def _prompt_text(self, number: int) -> str:
        prompt = self._asked.prompts[number // self._asked.n]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt) if self._tokenizer is not None else ""

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        drawn = sum(len(done.token_ids) for done in completions)
        return count_usage(completions[:: self.n], drawn, 0)  # nothing is told from the text

    def _add_logprobs(self, number: int, tokens: list[Token]) -> dict[str, Any]:
        new: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        offset, state = self._offsets.get(number, (0, TextState()))
        for token in tokens:
            assert token.logprobs is not None
            drawn, best = token.token_id, token.logprobs.top
            if best and drawn not in dict(best):
                best = (*best, (drawn, token.logprobs.logprob))
            new["tokens"].append(self._names.of(drawn))
            new["token_logprobs"].append(token.logprobs.logprob)
            new["top_logprobs"].append(self._names.of_best(drawn, best))
            new["text_offset"].append(offset + self._held_chars(state))
            if self._tokenizer is not None:  # `token.text` may come later, as of stop texts
                state, text = state.add(drawn, self._tokenizer)
                offset += len(text)
        self._offsets[number] = offset, state
        if not self.streams:
            self._logprobs.setdefault(number, []).append(new)
        return new

    def _held_chars(self, state: TextState) -> int:
        """Whole characters before one of which only some bytes are there."""
        if self._tokenizer is None or not state.held:
            return 0
        return len(state.rest(self._tokenizer).rstrip(INCOMPLETE))


def _join_logprobs(parts: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    if not parts:
        return None
    return {name: [one for part in parts for one in part[name]] for name in parts[0]}


def count_usage(
    prompts: Sequence[Completion], answer_tokens: int, reasoning_tokens: int
) -> dict[str, Any]:
    """The counts of a request, as OpenAI and DeepSeek have them.

    Args:
      prompts: one answer to each prompt.
      answer_tokens: of all answers.
      reasoning_tokens: those of them that are reasoning.
    """
    prompt_tokens = sum(done.prompt_tokens for done in prompts)
    hit_tokens = sum(done.hit_tokens for done in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": hit_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "prompt_cache_hit_tokens": hit_tokens,
        "prompt_cache_miss_tokens": prompt_tokens - hit_tokens,
    }
