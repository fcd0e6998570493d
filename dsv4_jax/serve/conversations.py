"""Conversations of the three protocols: rendered for V4 or V4.1, and parsed back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import deepseek_recipe as recipe

from dsv4_jax.schemas.time_limit import TooLongError, reading_within
from dsv4_jax.serve.completions import read_stream
from dsv4_jax.serve.constraints import Wanted, grammar_of
from dsv4_jax.serve.dialects import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Dialect,
    check_dialect,
    convert,
    is_schema_strict,
    must_call,
)
from dsv4_jax.serve.drawing import read_sampling, read_setting
from dsv4_jax.serve.errors import ApiError, ContextLengthError, refuse
from dsv4_jax.serve.fields import read_flag, read_integer
from dsv4_jax.serve.rendering import rendering_of
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serve.tools import namespaces_of, strict_tools
from dsv4_jax.serve.turns.digits import Digits, with_digits
from dsv4_jax.serve.turns.packed_turns import (
    SHORT_TURNS,
    PackedTurns,
    pack_parsing,
    unpack_parsing,
)
from dsv4_jax.serve.turns.prefill import continued, gives_reasoning, initial_stage, take_prefill
from dsv4_jax.serve.turns.sealed import open_items
from dsv4_jax.serve.turns.turn_order import in_order
from dsv4_jax.step.grammar import Grammar
from dsv4_jax.step.sampling import MAX_TOKENS, SamplingParams

_LOGPROBS = "message.output_text.logprobs"
"""What responses are asked to include; the library takes `top_logprobs` alone for it."""

_MAX_PLACES = 16
"""Of a schema, that a line of the log names."""


class Turns(NamedTuple):
    """A conversation as it is rendered.

    Attributes:
      request: what the library made of the body.
      messages: of the prompt.
      parsing: how its answer is read.
      fields: that the library reads, with a short conversation.
      digits: numbers that the library does not hold.
      continues_text: the prompt ends with a text of the assistant, and the answer goes on with it.
      field: of the body, that holds it.
    """

    request: recipe.ConversationRequest
    messages: list[recipe.Message]
    parsing: recipe.ParsingOptions
    fields: Mapping[str, Any]
    digits: Digits
    continues_text: bool
    field: str

    def pack(self) -> PackedTurns:
        """Its values, for another process; `Conversations.unpack` takes them."""
        parsing, stage = pack_parsing(self.parsing)
        return PackedTurns(
            self.fields, parsing, stage, self.digits, self.continues_text, self.field
        )


class AskedConversation(NamedTuple):
    """What was asked for.

    Attributes:
      prompt_ids: token ids of the rendered conversation.
      n: answers.
      sampling: how they draw; answer i has the seed and i more.
      streams: events are wanted.
      has_usage: the last event counts tokens.
      turns: what the answer is parsed by.
      echo: what it repeats, in the responses protocol.
      namespaces: by a function's name, its namespace and its name there; of that protocol too.
      form_field: which field asks for the form of the answer; "" if none does.
    """

    prompt_ids: list[int]
    n: int
    sampling: SamplingParams
    streams: bool
    has_usage: bool
    turns: Turns
    echo: recipe.ResponsesEcho | None
    namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({})
    form_field: str = ""


class Conversations:
    """Renders conversations for one model and tokenizer, and parses answers.

    Attributes:
      obstacle: why there are no conversations here, or None.
      tokenizer: the library's, or None.
    """

    def __init__(
        self,
        settings: ServeSettings,
        tokenizer_json: str | None,
        max_context_tokens: int,
        *,
        is_v41: bool = False,
    ) -> None:
        """Loads the tokenizer once more, into the library.

        Args:
          settings: of the server.
          tokenizer_json: contents of `tokenizer.json`; None if there is none.
          max_context_tokens: longest prompt and answer together.
          is_v41: the model is DeepSeek-V4.1, not V4.
        """
        self._rendering = rendering_of(settings.release, is_v41=is_v41)
        self._settings = settings
        self._max_context_tokens = max_context_tokens
        self._options = recipe.ConversionOptions(
            default_thinking_mode=settings.thinks,
            messages_web_search=recipe.WebSearchBehavior.Reject,
            responses_web_search=recipe.WebSearchBehavior.Reject,
            thinking_max_tokens_upper_bound=MAX_TOKENS,  # what the context leaves is the bound
            non_thinking_max_tokens_upper_bound=MAX_TOKENS,
        ).with_model_versions_by_name({settings.model_name: self._rendering.version})
        self.tokenizer = None
        self.obstacle: str | None = "the checkpoint has no tokenizer"
        if tokenizer_json is None:
            return
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer_json)
        added = json.loads(tokenizer_json).get("added_tokens", [])
        self._added_tokens = {one["content"]: one["id"] for one in added}
        self._encoding = self._rendering.encoding.with_tokenizer(self.tokenizer)
        self.obstacle = self._find_obstacle()

    def read(
        self, body: Mapping[str, Any], dialect: Dialect, left_out: list[str] | None = None
    ) -> AskedConversation:
        """Reads a body, and adds the names of what the model is asked without to a list.

        Raises:
          ApiError: it cannot be served, and why.
        """
        given = check_dialect(body, dialect, max_tools=self._settings.max_tools, left_out=left_out)
        streams, has_usage = read_flag(given, "stream"), False
        if dialect is CHAT:
            streams, has_usage = read_stream(given)
        n = read_integer(given, "n", 1, self._settings.max_choices, 1) or 1
        stops = read_setting("stop_texts", given, dialect.stops, ()) if dialect.stops else ()
        wanted = read_setting("max_new_tokens", given, dialect.max_tokens, None)
        turns, echo = self.convert(given, dialect)
        form = _read_wanted(given, dialect, turns)
        request = turns.request
        options = request.inference_options
        prompt_ids = self.encode(turns)
        room = self._max_context_tokens - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                len(prompt_ids),
                self._max_context_tokens,
                dialect.turns,
            )
        max_tokens = (
            request.resolve_max_tokens(len(prompt_ids), self._max_context_tokens)
            if wanted is None
            else min(wanted, room)
        )
        logprobs = read_setting("logprobs", given, "top_logprobs", 0)
        has_logprobs = options.logprobs or _LOGPROBS in given.get("include", [])
        sampling = read_sampling(
            given,
            max_new_tokens=max_tokens,
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            logprobs=logprobs if has_logprobs else None,
            grammar=self._find_grammar(form, given, turns, [] if left_out is None else left_out),
        )
        assert len(stops) == len(turns.parsing.stop_sequences)
        namespaces = namespaces_of(given)
        return AskedConversation(
            prompt_ids, n, sampling, streams, has_usage, turns, echo, namespaces, form.field
        )

    def convert(
        self, given: Mapping[str, Any], dialect: Dialect
    ) -> tuple[Turns, recipe.ResponsesEcho | None]:
        """Converts fields that were checked; errors are those of `read`."""
        if self.obstacle is not None:
            raise ApiError(
                400,
                f"this model knows no conversations: {self.obstacle}; use /v1/completions, or "
                "serve a model that does (examples/chat_checkpoint.py writes a small one)",
                code="no_conversations",
            )
        for name in ("temperature", "top_p"):
            read_setting(name, given, name, 1.0)
        digits = Digits()
        body, continues = prepare(given, dialect, digits)
        request, echo = convert(body, dialect, self._options)
        messages, parsing = request.conversation.messages, request.parsing_options
        if any(message.image_sources for message in messages):
            refuse(dialect.turns, "must have no images: the model reads text alone")
        if continues:
            thinks = request.conversation.thinking_mode
            if not thinks and gives_reasoning(given["messages"][-1]):
                where = f"messages[{len(given['messages']) - 1}]"
                refuse(where, "must have no reasoning: it is continued, and thinking is off")
            parsing.thinking_initial_stage = initial_stage(messages[-1], thinks=thinks)
            messages[-1] = continued(messages[-1])
        continues_text = continues and bool(messages[-1].content)
        fields = body | {dialect.turns: list(SHORT_TURNS)}
        found = Turns(request, messages, parsing, fields, digits, continues_text, dialect.turns)
        return found, echo

    def unpack(
        self, packed: PackedTurns, dialect: Dialect
    ) -> tuple[Turns, recipe.ResponsesEcho | None]:
        """What `convert` gave another process, as far as an answer is made by it."""
        request, echo = convert(packed.fields, dialect, self._options)
        parsing = unpack_parsing(packed.parsing, packed.stage, request.parsing_options)
        _, _, _, digits, continues_text, field = packed
        made = Turns(request, [], parsing, packed.fields, digits, continues_text, field)
        return made, echo

    def encode(self, turns: Turns) -> list[int]:
        """Token ids of a conversation, its effort by the release's name for it."""
        asked = turns.request.conversation
        effort = asked.reasoning_effort
        try:
            conversation = recipe.Conversation(
                turns.messages,
                thinking_mode=asked.thinking_mode,
                tools=asked.tools,
                tool_choice=asked.tool_choice,
                reasoning_effort=self._rendering.efforts[effort] if effort else None,  # type: ignore[arg-type]
            )
            if not turns.digits:
                return self._encoding.encode(conversation)
            return self._encode_parts(conversation, turns.digits)
        except (RuntimeError, ValueError) as error:
            refuse(turns.field, f"cannot be rendered: {error}")

    def _encode_parts(self, conversation: recipe.Conversation, digits: Digits) -> list[int]:
        """Token ids of a conversation with numbers that the library does not hold.

        As the library does, it encodes what is between special tokens as plain text.
        """
        rendered = self._encoding.render_conversation(conversation)
        text, ids, position = rendered.prompt, [], 0
        for start, end in [*rendered.special_ranges, (len(text), len(text))]:
            ids += self._encode_plain(digits.restore(text[position:start]))
            ids += [self._added_tokens[text[start:end]]] if end > start else []
            position = end
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of a text without special tokens, as the library encodes what a user says."""
        if not text:
            return []
        messages = [recipe.UserMessage(text)]
        said = self._encoding.encode(recipe.Conversation(messages, thinking_mode=False))
        return said[2:-2]  # between the begin and the user's mark, the assistant's and </think>

    def _find_grammar(
        self, form: Wanted, given: Mapping[str, Any], turns: Turns, left_out: list[str]
    ) -> Grammar | None:
        """The grammar of an answer, from its beginning."""
        places: list[str] = []
        try:
            with reading_within(self._settings.grammar_bounds.seconds):
                grammar = grammar_of(form, self._added_tokens, places, self._rendering.tags)
        except TooLongError as error:
            refuse(form.field, f"cannot be held: {error}")
        left_out += [f"{form.field} {place}" for place in places[:_MAX_PLACES]]
        if grammar is not None and turns.continues_text:
            told = "must not be continued where the answer's form is given; leave out one of them"
            refuse(f"messages[{len(given['messages']) - 1}]", told)
        return grammar

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


def prepare(
    given: Mapping[str, Any], dialect: Dialect, digits: Digits
) -> tuple[dict[str, Any], bool]:
    """The fields that the library reads, as it can read them, and whether a prefill is among them.

    Args:
      given: fields that were checked.
      dialect: their protocol.
      digits: gets the numbers that the library does not hold.

    Raises:
      ApiError: turns cannot be what they say, or a field is nested too deep.
    """
    body, continues = dict(given), False
    if isinstance(body.get(dialect.turns), list):
        turns, continues = take_prefill(body[dialect.turns], dialect, dialect.turns)
        turns = in_order(open_items(turns) if dialect is RESPONSES else turns, dialect)
        body[dialect.turns] = [with_digits(turn, digits) for turn in turns]
    for name, value in body.items():
        try:
            body[name] = digits.hide(value) if name in _FREE else _plain(value)
        except RecursionError:
            refuse(name, "is nested too deep")
    return body, continues


_FREE = ("messages", "input", "tools", "response_format", "text", "output_config")
"""Fields that hold JSON of the client's own; numbers elsewhere are settings."""


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float) else value


def _read_wanted(given: Mapping[str, Any], dialect: Dialect, turns: Turns) -> Wanted:
    """What a body that was checked says of its answer's form."""
    request = turns.request
    stage = turns.parsing.thinking_initial_stage
    thinks = stage is not None and stage.starts_in_reasoning()
    constraint = request.inference_options.output_constraint
    asked = given.get("response_format", given.get("text", {}).get("format", {}))
    asked = given.get("output_config", {}).get("format", asked)
    format_ = asked.get("type", "text")
    choice = given.get("tool_choice")
    choice = choice if isinstance(choice, dict) else {}
    if must_call(given) and not given.get("tools"):
        refuse("tool_choice", "must be auto or none without tools")
    if constraint is None:
        # Of messages the library reads no form.
        in_messages = format_ == "json_schema" and dialect is MESSAGES
        schema = asked.get("schema", {}) if in_messages else None
        return Wanted(thinks, schema=schema, field=f"{dialect.form}.schema")
    if not constraint.kind.startswith("tool_call"):
        schema = (
            json.loads(turns.digits.restore(constraint.schema))
            if constraint.schema
            else {"type": "object"}
        )
        is_strict = is_schema_strict(given)
        inner = "json_schema.schema" if dialect is CHAT else "schema"
        return Wanted(
            thinks,
            schema=schema,
            is_advisory=not is_strict,
            is_strict=is_strict,
            field=f"{dialect.form}.{inner}",
        )
    if format_ != "text":
        refuse(dialect.form, 'must be {"type": "text"} beside tools')
    if must_call(given) and thinks:
        refuse("tool_choice", "must be auto where the answer begins with reasoning")
    strict = strict_tools(given)
    tools = [
        {"function": one["function"] | {"strict": one["function"]["name"] in strict}}
        for one in json.loads(turns.digits.restore(constraint.schema))
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
        is_open=turns.parsing.starts_in_tool_calls,
        field="tools",
    )
