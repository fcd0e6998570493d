"""ConversationRenderer: tokens to the events of a conversation's protocol."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import deepseek_recipe as recipe

from dsv4_jax.serve.completions import count_usage
from dsv4_jax.serve.conversations import AskedConversation
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.turns import digits
from dsv4_jax.serve.turns.sealed import seal_items
from dsv4_jax.serving.requests.request import Completion, Token
from dsv4_jax.serving.requests.text import INCOMPLETE


class ConversationRenderer:
    """Each answer has a parser of the library, which finds reasoning, tool calls and stop texts.

    An answer of several choices is several answers of one, with numbers of their own.
    """

    def __init__(
        self,
        asked: AskedConversation,
        dialect: Dialect,
        model_name: str,
        tokenizer: recipe.Tokenizer,
    ) -> None:
        """Of one request."""
        self.streams, self.n = asked.streams, asked.n
        self._asked = asked
        self._dialect = dialect
        self._model_name = model_name
        self._id = f"{dialect.id_prefix}{secrets.token_hex(12)}"
        self._num_events = 0
        self._events: list[list[Any]] = [[] for _ in range(asked.n)]
        self._num_silent = [0] * asked.n  # last tokens that have given no text yet
        self._num_told = [0] * asked.n  # tokens up to the end of an answer
        self._has_ended = [False] * asked.n  # other than by a stop text
        self._usages: list[dict[str, Any]] = [{} for _ in range(asked.n)]  # of choices that ended
        self._parsers = [
            recipe.StreamProcessor(self._make_generator(), asked.turns.parsing, tokenizer)
            for _ in range(asked.n)
        ]

    def start(self, hit_tokens: int) -> bytes:
        """The events that open the answers."""
        usage = recipe.PromptUsage(
            prompt_tokens=len(self._asked.prompt_ids), prompt_cache_hit_tokens=hit_tokens
        )
        ready = recipe.InferenceChunk.ready(prompt_usage=usage)
        parts = [self._take(i, parser.push(ready)) for i, parser in enumerate(self._parsers)]
        return b"".join(parts)

    def tokens(self, number: int, tokens: list[Token]) -> bytes:
        """The events of new tokens; a stop token counts and has no text."""
        parser, reason = self._parsers[number], tokens[-1].finish_reason
        if parser.finished:
            return b""
        spoken = tokens[:-1] if reason == "stop" else tokens
        # One at a time: of a chunk that ends within a character the parser may never tell the rest.
        chunks = [recipe.InferenceChunk.tokens([one.token_id], _logprobs(one)) for one in spoken]
        if reason == "stop":
            chunks.append(recipe.InferenceChunk.text("", 1))
            chunks.append(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        elif reason is not None:
            chunks += self._unfinished(number, tokens)
            chunks.append(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Length))
        for one in tokens:
            self._num_silent[number] = 0 if one.text else self._num_silent[number] + 1
        events = []
        for index, chunk in enumerate(chunks):
            if not parser.finished:
                self._num_told[number] += index < len(tokens)
                self._has_ended[number] = reason is not None and chunk is chunks[-1]
                events += parser.push(chunk)
        if reason is not None:
            events += parser.finish()
        return self._take(number, events)

    def _unfinished(self, number: int, tokens: Sequence[Token]) -> list[recipe.InferenceChunk]:
        """The part of a character that an answer ends with, of which the parser would not tell."""
        *before, last = tokens
        if not last.text or not last.text.endswith(INCOMPLETE):
            return []
        silent = self._num_silent[number]
        for one in before:
            silent = 0 if one.text else silent + 1
        return [recipe.InferenceChunk.text(last.text, silent + 1)]

    def is_done(self, number: int) -> bool:
        """A stop text was found."""
        return self._parsers[number].finished and not self._has_ended[number]

    def end(self, completions: Sequence[Completion]) -> bytes:
        """The end of a stream, or the whole answer."""
        if not self.streams:
            return self._whole(completions)
        done = self._dialect.response_class.sse_done_data()
        last = b"" if done is None else f"data: {done}\n\n".encode()
        if self._asked.n > 1 and self._asked.has_usage:
            event = {
                "id": self._id,
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": self._model_name,
                "choices": [],
                "usage": self._count_usage(completions),
            }
            last = b"data: " + json.dumps(event).encode() + b"\n\n" + last
        return last

    def failed(self, error: ApiError) -> bytes:
        """The event of an error; of responses two, since clients look for one or the other."""
        if self._dialect is CHAT:
            return _event(error.openai())
        if self._dialect is MESSAGES:
            return _event(error.anthropic(self._id), "error")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        told = {
            "type": "error",
            "code": error.code or code,
            "message": error.message,
            "param": None,
            "sequence_number": self._num_events,
        }
        response = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": self._model_name,
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": [],
        }
        failed = {
            "type": "response.failed",
            "response": response,
            "sequence_number": self._num_events + 1,
        }
        return _event(told, "error") + _event(failed, "response.failed")

    def _make_generator(self) -> Any:
        dialect, asked = self._dialect, self._asked
        if dialect is MESSAGES and asked.turns.continues_text:  # there is no thinking before it
            return recipe.MessagesChunkGenerator(self._id, self._model_name, False)
        request = asked.turns.request
        made = dialect.request_class.chunk_generator(request, self._id, self._model_name)
        if dialect is not RESPONSES:
            return made
        return made.with_echo(asked.echo).with_namespace_tool_map(dict(asked.namespaces))

    def _take(self, number: int, events: list[Any]) -> bytes:
        """Shows events, or keeps them for the whole answer."""
        if not self.streams:
            self._events[number] += events
            return b""
        self._num_events += len(events)
        name_of, parts = self._dialect.response_class.sse_event_name, []
        for event in events:
            name, data = name_of(event), self._finish(event.to_json(), number)
            if self._asked.n > 1:
                data = self._with_number(data, number)
            parts.append(f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n")
        return "".join(parts).encode()

    def _finish(self, data: str, number: int) -> str:
        """An event or answer of the library's, with what it does not hold."""
        if '"usage":{' in data:
            data = _with_count(data, self._num_told[number])
        if self._dialect is RESPONSES:
            if '"encrypted_content":' in data:
                data = _sealed(data)
            data = self._asked.turns.digits.restore(data)  # of the tools that it repeats
        if data.isascii():
            return data
        return data.translate(_LINE_ENDS)

    def _whole(self, completions: Sequence[Completion]) -> bytes:
        answers = []
        for number, (events, done) in enumerate(zip(self._events, completions, strict=True)):
            response = self._dialect.response_class(
                self._id, self._model_name, int(time.time()), done.prompt_tokens, done.hit_tokens
            )
            inputs: dict[int, str] = {}
            for event in events:
                if self._dialect is MESSAGES:
                    _gather_input(event.to_json(), inputs)
                response.accumulate(event)
            answers.append(_with_inputs(self._finish(response.to_json(), number), inputs))
        if len(answers) == 1:
            return answers[0].encode()
        parsed = [json.loads(answer) for answer in answers]
        choices = [one["choices"][0] | {"index": number} for number, one in enumerate(parsed)]
        self._usages = [one["usage"] for one in parsed]
        usage = self._count_usage(completions)
        return json.dumps(parsed[0] | {"choices": choices, "usage": usage}).encode()

    def _with_number(self, data: str, number: int) -> str:
        """An event of a chat completion as that of a choice, whose usage is kept for the end."""
        event = json.loads(data)
        self._usages[number] = event.pop("usage", None) or self._usages[number]
        for choice in event["choices"]:
            choice["index"] = number
        return json.dumps(event)

    def _count_usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The usage of several choices, which have one prompt."""
        counted = [one["completion_tokens"] for one in self._usages]  # of the text up to its stop
        drawn = [min(n, len(done.token_ids)) for n, done in zip(counted, completions, strict=True)]
        reasoning = [one["completion_tokens_details"]["reasoning_tokens"] for one in self._usages]
        return count_usage(completions[:1], sum(drawn), sum(reasoning))


def _event(value: dict[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def _logprobs(token: Token) -> list[tuple[float, list[tuple[int, float]]]] | None:
    found = token.logprobs
    return None if found is None else [(found.logprob, list(found.top))]


_LINE_ENDS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}
"""Within texts of JSON, where many readers of lines would end one."""


def _sealed(data: str) -> str:
    """An event or answer whose reasoning items can be given back by their encrypted content."""
    found = json.loads(data)
    answer = found.get("response", found)
    items = [found["item"]] if isinstance(found.get("item"), dict) else answer.get("output", [])
    seal_items(items)
    return json.dumps(found)


def _with_count(data: str, num_drawn: int) -> str:
    """An event or answer whose usage has as many tokens as were drawn for it.

    The library counts tokens by the texts that they give, and some give none. It says nothing of
    the reasoning of a chat that has none.
    """
    found = digits.loads(data)
    usage = (found.get("response") or found.get("message") or found).get("usage")
    if usage is None:  # what stands there is of a schema
        return data
    name = "completion_tokens" if "completion_tokens" in usage else "output_tokens"
    if "total_tokens" in usage:
        usage["total_tokens"] += num_drawn - usage[name]
    usage[name] = num_drawn
    if name == "completion_tokens":
        usage.setdefault("completion_tokens_details", {"reasoning_tokens": 0})
    if (details := usage.get(f"{name}_details")) is not None:
        details["reasoning_tokens"] = min(details["reasoning_tokens"], num_drawn)
    return digits.dumps(found)


def _gather_input(data: str, inputs: dict[int, str]) -> None:
    """Adds a part of a call's arguments, by the place of its block."""
    if '"partial_json":' in data:
        event = json.loads(data)
        index = event["index"]
        inputs[index] = inputs.get(index, "") + event["delta"]["partial_json"]


def _with_inputs(data: str, inputs: Mapping[int, str]) -> str:
    """An answer whose calls have the model's own numbers, which the library would round."""
    written = {}
    for index, text in inputs.items():
        with contextlib.suppress(ValueError, RecursionError):
            value = digits.loads(text)
            if isinstance(value, dict) and digits.Digits().hide(value) != value:
                written[index] = value
    if not written:
        return data
    answer = json.loads(data)
    for index, value in written.items():
        answer["content"][index]["input"] = value
    return digits.dumps(answer)
