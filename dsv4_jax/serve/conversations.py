"""Chat completions, responses and messages: conversations rendered for V4, and parsed back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import deepseek_recipe as recipe

from dsv4_jax.serve.completions import read_stream
from dsv4_jax.serve.constraints import Wanted, grammar_of
from dsv4_jax.serve.dialects import (
    CHAT,
    Dialect,
    check_dialect,
    convert,
    is_schema_strict,
    must_call,
    strict_tools,
)
from dsv4_jax.serve.drawing import MAX_LOGPROBS, read_max_tokens, read_sampling, read_stops
from dsv4_jax.serve.errors import ApiError, refuse
from dsv4_jax.serve.fields import read_flag, read_integer, read_number
from dsv4_jax.serve.settings import EFFORTS, ServeSettings
from dsv4_jax.step.sampling import SamplingParams


class AskedConversation(NamedTuple):
    """What was asked for.

    Attributes:
      prompt_ids: token ids of the rendered conversation.
      n: answers.
      sampling: how they draw; answer i has the seed and i more.
      streams: events are wanted.
      has_usage: the last event counts tokens.
      request: what the answer is parsed by.
      echo: what it repeats, in the responses protocol.
    """

    prompt_ids: list[int]
    n: int
    sampling: SamplingParams
    streams: bool
    has_usage: bool
    request: recipe.ConversationRequest
    echo: recipe.ResponsesEcho | None


class Conversations:
    """Renders conversations for one model and tokenizer, and parses answers.

    Attributes:
      obstacle: why there are no conversations here, or None.
      tokenizer: the library's, or None.
    """

    def __init__(
        self, settings: ServeSettings, tokenizer_json: str | None, max_context_tokens: int
    ) -> None:
        """Loads the tokenizer once more, into the library.

        Args:
          settings: of the server.
          tokenizer_json: contents of `tokenizer.json`; None if there is none.
          max_context_tokens: longest prompt and answer together.
        """
        self._settings = settings
        self._max_context_tokens = max_context_tokens
        self._options = recipe.ConversionOptions(
            default_thinking_mode=settings.thinks,
            messages_web_search=recipe.WebSearchBehavior.Reject,
            responses_web_search=recipe.WebSearchBehavior.Reject,
        ).with_model_versions_by_name({settings.model_name: recipe.ModelVersion.DeepseekV4Pro})
        self.tokenizer = None
        self.obstacle: str | None = "the checkpoint has no tokenizer"
        if tokenizer_json is None:
            return
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer_json)
        added = json.loads(tokenizer_json).get("added_tokens", [])
        self._added_tokens = {one["content"]: one["id"] for one in added}
        self._encoding = recipe.DeepseekV4Encoding().with_tokenizer(self.tokenizer)
        self.obstacle = self._find_obstacle()

    def read(self, body: Mapping[str, Any], dialect: Dialect) -> AskedConversation:
        """Reads a body.

        Raises:
          ApiError: it cannot be served, and why.
        """
        given = check_dialect(body, dialect, max_tools=self._settings.max_tools)
        streams, has_usage = read_flag(given, "stream"), False
        if dialect is CHAT:
            streams, has_usage = read_stream(given)
        n = read_integer(given, "n", 1, self._settings.max_choices, 1) or 1
        stops = read_stops(given, dialect.stops) if dialect.stops else ()
        wanted = read_max_tokens(given, dialect.max_tokens, None)
        request, echo = self.convert(given, dialect)
        options = request.inference_options
        prompt_ids = self.encode(request)
        try:
            max_tokens = request.resolve_max_tokens(len(prompt_ids), self._max_context_tokens)
        except recipe.ConversionError as error:
            raise ApiError(400, json.loads(error.body)["error"]["message"]) from None
        logprobs = read_integer(given, "top_logprobs", 0, MAX_LOGPROBS, 0)
        sampling = read_sampling(
            given,
            max_new_tokens=max_tokens if wanted is None else wanted,
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            logprobs=logprobs if options.logprobs else None,
            grammar=grammar_of(_read_wanted(given, request), self._added_tokens),
        )
        assert len(stops) == len(request.parsing_options.stop_sequences)
        return AskedConversation(prompt_ids, n, sampling, streams, has_usage, request, echo)

    def convert(
        self, given: Mapping[str, Any], dialect: Dialect
    ) -> tuple[recipe.ConversationRequest, recipe.ResponsesEcho | None]:
        """Converts fields that were checked; errors are those of `read`."""
        if self.obstacle is not None:
            raise ApiError(400, f"{self.obstacle}; use /v1/completions", code="no_conversations")
        for name in ("temperature", "top_p"):
            read_number(given, name, 0, 2 if name == "temperature" else 1, 1.0)
        request, echo = convert(given, dialect, self._options)
        if any(message.image_sources for message in request.conversation.messages):
            raise ApiError(400, "images are not supported: the model reads text alone")
        return request, echo

    def encode(self, request: recipe.ConversationRequest) -> list[int]:
        """Token ids of a conversation, its effort by the release's name for it."""
        asked = request.conversation
        effort = asked.reasoning_effort
        try:
            return self._encoding.encode(
                recipe.Conversation(
                    asked.messages,
                    thinking_mode=asked.thinking_mode,
                    tools=asked.tools,
                    tool_choice=asked.tool_choice,
                    reasoning_effort=EFFORTS[self._settings.release][effort] if effort else None,  # type: ignore[arg-type]
                )
            )
        except (RuntimeError, ValueError) as error:
            raise ApiError(400, f"the conversation cannot be rendered: {error}") from None

    def _find_obstacle(self) -> str | None:
        """Renders a conversation with all the tokens that a conversation needs."""
        messages = [recipe.SystemMessage("a"), recipe.UserMessage("b")]
        try:
            for thinks in (False, True):
                self._encoding.encode(recipe.Conversation(messages, thinking_mode=thinks))
        except RuntimeError as error:
            reason = str(error).split(": ")[-1]
            return f"the checkpoint's tokenizer is not made for conversations: {reason}"
        return None


def _read_wanted(given: Mapping[str, Any], request: recipe.ConversationRequest) -> Wanted:
    """What a body that was checked says of its answer's form."""
    stage = request.parsing_options.thinking_initial_stage
    thinks = stage is not None and stage.starts_in_reasoning()
    found = request.inference_options.output_constraint
    asked = given.get("response_format", given.get("text", {}).get("format", {}))
    format_ = asked.get("type", "text")
    choice = given.get("tool_choice")
    choice = choice if isinstance(choice, dict) else {}
    if must_call(given) and not given.get("tools"):
        refuse("tool_choice", "must be auto or none without tools")
    if found is None:
        return Wanted(thinks)
    if not found.kind.startswith("tool_call"):
        if request.conversation.messages[-1].prefix and not thinks:
            refuse("messages", "must not end with a part of the answer where its form is given")
        schema = json.loads(found.schema) if found.schema else {"type": "object"}
        return Wanted(thinks, schema=schema, is_strict=is_schema_strict(given))
    if format_ != "text":
        name = "response_format" if "response_format" in given else "text.format"
        refuse(name, 'must be {"type": "text"} beside tools')
    if must_call(given) and thinks:
        refuse("tool_choice", "must be auto where the answer begins with reasoning")
    strict = strict_tools(given)
    tools = [
        {"function": one["function"] | {"strict": one["function"]["name"] in strict}}
        for one in json.loads(found.schema)
    ]
    if choice.get("type") == "tool":
        tools = [one for one in tools if one["function"]["name"] == choice.get("name")]
        if not tools:
            refuse("tool_choice.name", "must be that of one of the tools")
    single = choice.get("disable_parallel_tool_use") or given.get("parallel_tool_calls") is False
    return Wanted(
        thinks,
        tools=tools,
        must_call=must_call(given),
        calls_once=bool(single),
        is_open=request.parsing_options.starts_in_tool_calls,
    )
