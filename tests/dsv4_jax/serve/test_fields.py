"""Every field of the official clients' requests is decided: obeyed, nothing, or refused by name.

The clients' types are walked beside the server's rules, so that a field that is new in a release of
theirs fails here by its name until somebody decides what becomes of it.
"""

import pkgutil
import typing

import pytest
import typing_extensions

from dsv4_jax.serve.completions import read_stream
from dsv4_jax.serve.drawing import read_sampling
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serve.fields import (
    ANY,
    NOTHING,
    Rule,
    aside,
    check_fields,
    fields_of,
    kind_of,
    missing,
    needed,
)
from dsv4_jax.serve.fields_messages import MESSAGES
from dsv4_jax.serve.fields_openai import CHAT, COMPLETIONS
from dsv4_jax.serve.fields_responses import RESPONSES

OPENAI, ANTHROPIC = "openai.types", "anthropic.types"
TYPES = [
    (f"{OPENAI}.completion_create_params.CompletionCreateParamsStreaming", COMPLETIONS),
    (f"{OPENAI}.completion_create_params.CompletionCreateParamsNonStreaming", COMPLETIONS),
    (f"{OPENAI}.chat.completion_create_params.CompletionCreateParamsStreaming", CHAT),
    (f"{OPENAI}.chat.completion_create_params.CompletionCreateParamsNonStreaming", CHAT),
    (f"{OPENAI}.responses.response_create_params.ResponseCreateParamsStreaming", RESPONSES),
    (f"{OPENAI}.responses.response_create_params.ResponseCreateParamsNonStreaming", RESPONSES),
    (f"{ANTHROPIC}.message_create_params.MessageCreateParamsStreaming", MESSAGES),
    (f"{ANTHROPIC}.message_create_params.MessageCreateParamsNonStreaming", MESSAGES),
    (f"{ANTHROPIC}.message_count_tokens_params.MessageCountTokensParams", MESSAGES),
    (f"{ANTHROPIC}.beta.message_create_params.MessageCreateParamsStreaming", MESSAGES),
    (f"{ANTHROPIC}.beta.message_create_params.MessageCreateParamsNonStreaming", MESSAGES),
    (f"{ANTHROPIC}.beta.message_count_tokens_params.MessageCountTokensParams", MESSAGES),
]
OWN_WORDS = {
    "parameters", "input_schema", "schema", "input", "metadata", "logit_bias",
    "tool_choice.tools", "tool_choice.allowed_tools.tools", "thinking.budget_tokens",
    "keep",  # of `context_management`; `clear_thinking` reads it
}  # fmt: skip
"""Fields of which what is inside is the caller's own, or is read by a function of its own."""


def parts_of(kind):
    """The dictionaries with named fields that a type may be or hold, without lists and unions."""
    if typing_extensions.is_typeddict(kind):
        return [kind]
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return []
    return [found for one in inner for found in parts_of(one)]


def kinds_of(kind, field):
    """The values of the field of a dictionary that says its kind; {None} where it has none."""
    hint = typing.get_type_hints(kind).get(field)
    values = {one for one in _literals(hint) if isinstance(one, str)} if hint else set()
    return values or {None}


def _literals(hint):
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return [one for inner in typing.get_args(hint) for one in _literals(inner)]


def find_undecided(kind, rule, name, seen=()):
    """Names of fields of a type, and of what it holds, of which the rules say nothing.

    Fields that the rules need and the type does not are named too.
    """
    if (kind, id(rule)) in seen:
        return
    seen = (*seen, (kind, id(rule)))
    for field, hint in typing.get_type_hints(kind).items():
        where = f"{name}.{field}" if name else field
        inner = rule.fields.get(field)
        if inner is None:
            yield where
        elif inner.is_needed and not _needs(kind, field):
            yield f"{where} may be absent"
        else:
            for part in parts_of(hint):
                yield from _find_in(part, inner, where, seen)


def _needs(kind, field):
    hint = typing.get_type_hints(kind, include_extras=True)[field]
    origin = typing_extensions.get_origin(hint)
    if origin is typing_extensions.NotRequired:
        return False
    return kind.__total__ or origin is typing_extensions.Required


def _find_in(part, rule, where, seen):
    if rule.is_dropped or field_of(where) in OWN_WORDS or where in OWN_WORDS:
        return  # taken as a whole, or refused as a whole
    if rule.each is not None:
        yield from _find_in(part, rule.each, f"{where}[]", seen)
    elif rule.kinds is not None:
        for kind in kinds_of(part, rule.kind_field):
            # What is not among the kinds is refused by its name.
            inner = rule.kinds.get(kind_of({rule.kind_field: kind}, rule.kind_field))
            if inner is not None:
                yield from _find_in(part, inner, f"{where}({kind})", seen)
    elif rule.fields is not None:
        yield from find_undecided(part, rule, where, seen)
    elif not rule.is_left_out({}):
        yield f"{where}: {part.__name__}"


def field_of(where):
    return where.rsplit(".", 1)[-1].split("[")[0]


@pytest.mark.parametrize(("name", "rules"), TYPES, ids=[name for name, _ in TYPES])
def test_every_field_of_the_clients_types_is_decided(name, rules):
    kind = pkgutil.resolve_name(name)
    undecided = sorted(set(find_undecided(kind, Rule(fields=rules, is_closed=True), "")))
    assert not undecided, "say in the tables of dsv4_jax/serve what becomes of these"


def test_a_field_that_is_new_is_found_at_any_depth():
    class Inner(typing.TypedDict):
        known: str
        new: int

    class Text(typing.TypedDict):
        type: typing.Literal["text"]
        new: str

    class Image(typing.TypedDict):
        type: typing.Literal["image"]
        new: str

    class Body(typing.TypedDict):
        known: typing.Iterable[Inner | str]
        parts: list[Text | Image]
        refused: Inner
        new: str
        extra: typing.NotRequired[str]

    rules = {
        "extra": needed(ANY),
        "known": Rule(each=fields_of(known=ANY)),
        "parts": Rule(each=Rule(kinds={"text": fields_of(type=ANY)})),
        "refused": missing("no"),
    }
    found = set(find_undecided(Body, Rule(fields=rules), ""))
    assert found == {"known[].new", "parts[](text).new", "new", "extra may be absent"}


def test_what_asks_for_nothing_is_dropped_and_what_is_left_out_is_named():
    rules = {
        "turns": Rule(each=fields_of(text=ANY, hint=NOTHING, style=aside("plain"))),
        "schema": ANY,
    }
    body = {
        "turns": [
            {"text": "a", "hint": {"x": 1}, "style": "plain", "other": None},
            {"text": "b", "style": "loud", "other": 3},
            {"text": None, "style": "loud"},
        ],
        "schema": {"default": None, "enum": [None]},
    }
    left_out = []
    assert check_fields(body, rules, left_out) == {
        "turns": [{"text": "a"}, {"text": "b"}, {}],
        "schema": {"default": None, "enum": [None]},
    }
    assert left_out == ["turns[].style", "turns[].other"]


def test_an_empty_text_asks_for_nothing_that_is_missing():
    assert check_fields({"prompt": "a", "suffix": ""}, COMPLETIONS) == {"prompt": "a"}
    with pytest.raises(ApiError, match="suffix"):
        check_fields({"prompt": "a", "suffix": "b"}, COMPLETIONS)


def test_a_message_of_the_system_may_say_nothing():
    """Its type lets it; one that changes the effort of what comes after it is refused by that."""
    messages = [{"role": "user", "content": "a"}, {"role": "system"}]
    left_out = []
    assert check_fields({"messages": messages}, MESSAGES, left_out) == {"messages": messages[:1]}
    assert left_out == ["messages[] (system)"]
    messages[1]["output_config"] = {"effort": "low"}
    with pytest.raises(ApiError, match=r"messages\[1\]\.output_config"):
        check_fields({"messages": messages}, MESSAGES)


def test_a_bias_is_named_with_its_token():
    with pytest.raises(ApiError) as found:
        read_sampling({"logit_bias": {"5": 1, "7": 101}}, max_new_tokens=1)
    assert found.value.param == "logit_bias.7"


@pytest.mark.parametrize("rules", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("value", [[], [{}], "a", 5, True, 0.5])
def test_an_object_of_known_fields_is_no_other_value(rules, value):
    """Such as `thinking` or `stream_options`, whose fields are read without a further look."""
    closed = [name for name, rule in rules.items() if rule.is_closed]
    assert closed
    for name in closed:
        with pytest.raises(ApiError, match=f"{name}: must be "):
            check_fields({name: value}, rules)


@pytest.mark.parametrize("rules", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_every_option_of_a_stream_that_is_taken_is_read(rules):
    """What the table lets through is not refused where it is read."""
    options = {"include_usage": True, "include_obfuscation": True, "continuous_usage_stats": False}
    body = {"stream": True, "stream_options": options}
    if rules is CHAT:
        body["messages"] = []
    assert read_stream(check_fields(body, rules)) == (True, True)
    options["include_usage"] = 1
    with pytest.raises(ApiError, match=r"stream_options\.include_usage"):
        read_stream(check_fields(body, rules))
    options["continuous_usage_stats"] = True
    with pytest.raises(ApiError, match=r"stream_options\.continuous_usage_stats"):
        check_fields(body, rules)


@pytest.mark.parametrize(
    ("rules", "body", "told"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         r"messages\[0\].content\[0\].type"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{
            "type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "text", "text": "a"}, {"type": "document"}]}]}]},
         r"messages\[0\].content\[0\].content\[1\].type"),
        (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, r"messages\[0\].audio"),
        (CHAT, {"tools": [{"type": "webhook"}]}, r"tools\[0\]"),
        (CHAT, {"tools": [{"type": ["function"]}]}, r"tools\[0\]"),
        (RESPONSES, {"input": [{"type": "compaction"}]}, r"input\[0\]"),
        (RESPONSES, {"text": {"forms": 1}}, "text.forms"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_where_it_stands(rules, body, told):
    with pytest.raises(ApiError, match=told):
        check_fields(body, rules)
