"""What requests may ask for: what cannot be obeyed is refused by name, and never a 500."""

import functools
import json
import logging

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_jax.serve import ServeSettings
from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serving import Completion, Token
from helpers.serve import (
    BYTES_ALONE,
    MODEL,
    byte_ids,
    running,
    script,
    shipped_tokenizer,
    small_engine,
)

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES = {
    "/v1/completions": {
        "model": MODEL, "prompt": ["a", "b"], "max_tokens": 2, "n": 2, "stream": True,
        "stream_options": {"include_usage": True}, "logprobs": 2, "stop": ["x"], "seed": 1,
        "temperature": 0.5, "top_p": 0.9, "logit_bias": {"5": 1}, "top_k": 4, "min_p": 0.1,
        "presence_penalty": 1, "frequency_penalty": 0.5, "user": "u",
    },
    "/v1/chat/completions": {
        "model": MODEL, "max_tokens": 2, "n": 2, "logprobs": True, "top_logprobs": 2,
        "messages": [{"role": "system", "content": "s"}, *HI], "thinking": {"type": "disabled"},
        "tools": [TOOL], "tool_choice": "auto", "stop": "x", "temperature": 0,
        "reasoning_effort": "low", "response_format": {"type": "text"},
    },
    "/v1/responses": {
        "model": MODEL, "input": HI, "max_output_tokens": 2, "reasoning": {"effort": "none"},
        "instructions": "i", "text": {"format": {"type": "text"}}, "store": False,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    },
    "/v1/messages": {
        "model": MODEL, "messages": HI, "max_tokens": 2, "system": "s", "stop_sequences": ["x"],
        "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "top_k": 3,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
    "/v1/messages/count_tokens": {"model": MODEL, "messages": HI},
    "/tokenize": {"model": MODEL, "prompt": "a", "add_special_tokens": False},
    "/detokenize": {"model": MODEL, "tokens": [1, 2]},
}  # fmt: skip
"""By endpoint, what it answers with 200."""

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "s": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "boolean"}]},
        "t": {"$ref": "#/$defs/short"},
    },
    "required": ["n", "s", "t"],
    "additionalProperties": False,
    "$defs": {"short": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
STRICT = {"name": "g", "parameters": SCHEMA, "strict": True}
FORMS = [
    ("/v1/chat/completions", {
        "tools": [], "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    }),
    ("/v1/chat/completions", {
        "tools": [TOOL, {"type": "function", "function": STRICT}], "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    }),
    ("/v1/responses", {
        "tools": [], "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    }),
    ("/v1/responses", {"tools": [{"type": "function", **STRICT}], "tool_choice": "required"}),
    ("/v1/messages", {
        "tools": [{"name": "g", "input_schema": SCHEMA}], "tool_choice": {"type": "any"},
    }),
]  # fmt: skip
"""What makes those bodies ask for a form of the answer."""

ANSWERED = [*BODIES.items(), *((path, BODIES[path] | change) for path, change in FORMS)]

REFUSED = {
    "/v1/completions": {
        "suffix": "x", "best_of": 3, "n": 99, "echo": 1, "logprobs": 21, "stop": [""],
        "temperature": 2.5, "top_p": 0, "seed": 1.5, "prompt": [1, "a"], "max_tokens": 0,
        "stream_options": {"x": 1}, "logit_bias": {"a": 1}, "service_tier": "first",
        "unknown": 1,
    },
    "/v1/chat/completions": {
        "tool_choice": "sometimes", "response_format": {"type": "json_object"},
        "parallel_tool_calls": "no", "functions": [{}], "audio": {"voice": "x"},
        "modalities": ["audio"], "store": 1, "moderation": {"model": "m"}, "verbosity": "some",
        "reasoning_effort": "huge", "max_completion_tokens": 3, "tools": [{"type": "web"}],
        "thinking": {"type": "enabled", "budget_tokens": "9"}, "unknown": 1, "n": 0,
        "reasoning": {"exclude": True}, "chat_template_kwargs": {"x": 1}, "enable_thinking": True,
        "repetition_penalty": 1.1, "prompt_cache_options": {"prewarm": True},
    },
    "/v1/responses": {
        "previous_response_id": "r", "conversation": "c", "background": True, "store": "x",
        "truncation": "some", "include": ["x"], "tool_choice": {"type": "web_search_preview"},
        "text": {"format": {"type": "json_object"}}, "prompt": {"id": "p"}, "unknown": 1,
        "tools": [{"type": "web"}], "reasoning": {"context": "all_turns"}, "moderation": {"a": 1},
        "context_management": [{"type": "compaction"}], "access_programs": {"cyber": "standard"},
    },
    "/v1/messages": {
        "tool_choice": {"type": "some"}, "container": "c", "mcp_servers": [{"name": "x"}],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "output_format": {"type": "json_schema"}, "output_config": {"task_budget": {"total": 9}},
        "service_tier": "x", "tools": [{"type": "web_20250305", "name": "web"}], "unknown": 1,
        "thinking": {"type": "between_tools"}, "inference_geo": "eu", "speed": "slow",
        "fallbacks": "default", "compaction": {"type": "summarize"}, "thread": {"type": "create"},
        "billing_policy": {"type": "billing_policy", "bill_to": "user_profile"},
    },
    "/tokenize": {"messages": HI, "prompt": 3, "add_special_tokens": "x"},
    "/detokenize": {"tokens": "x", "unknown": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(engine):
    with pytest.MonkeyPatch.context() as patch, running(engine) as server:
        script(patch, engine, "ok")
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("place", range(len(ANSWERED)))
def test_every_endpoint_answers_its_body(client, place):
    path, body = ANSWERED[place]
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_obeyed_is_refused_by_name(client, path):
    for name, value in REFUSED[path].items():
        body = BODIES[path] | {name: value}
        answer = client.post(path, json=body)
        assert answer.status_code == 400, (name, answer.text)
        assert name in answer.json()["error"]["message"], answer.text


def test_what_is_inside_a_conversation_is_refused_too(client):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    strict = {"type": "function", "function": TOOL["function"] | {"strict": "yes"}}
    for change, told in (
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0]"),
        ({"tools": [strict]}, "strict"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"messages": []}, "mpty"),
        ({"messages": [{"role": "king", "content": "x"}]}, ""),
    ):
        answer = client.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"] | change)
        assert answer.status_code == 400, answer.text
        assert told in answer.json()["error"]["message"]
    for path, change in (
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
    ):
        answer = client.post(path, json=BODIES[path] | change)
        assert answer.status_code == 400
        assert "the model reads text" in answer.json()["error"]["message"]
    kind = {"messages": [{"role": "developer", "content": "s"}, *HI]}
    answer = client.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"] | kind)
    assert answer.status_code == 200


def values():
    """Any JSON, of the sorts that programs fall over."""
    plain = (
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.integers(-2, 30)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(), max_size=12)
        | st.sampled_from(
            ["", "auto", "none", "text", "user", "<｜User｜>", "\x00", "\ud800", "😀"]
        )
    )
    names = st.sampled_from(["type", "role", "content", "name", "text"]) | st.text(max_size=6)
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=8,
    )


@st.composite
def requests(draw):
    """An endpoint, and a body that is somewhere wrong, perhaps, its form of answers included."""
    path, body = draw(st.sampled_from(ANSWERED))
    body = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(1, 3))):
        target = body
        while True:
            keys = list(target) if isinstance(target, dict) else list(range(len(target)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(target[key], dict | list) and target[key] and draw(st.booleans()):
                target = target[key]
                continue
            action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
            if action == "remove":
                del target[key]
            elif action == "add" and isinstance(target, dict):
                target[draw(st.text(max_size=6))] = draw(values())
            else:
                target[key] = draw(values())
            break
    return path, body


def never_fails(client, path, body):
    raw = json.dumps(body).encode()
    answer = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=30, **FUZZ)
@given(request=requests())
def test_no_body_is_a_500(client, request):
    never_fails(client, *request)


@pytest.mark.slow
@BYTES_ALONE  # ten times as long on the released one
@settings(max_examples=10_000, **FUZZ)
@given(request=requests())
def test_none_of_10000_bodies_is_a_500(client, server, request):
    logging.getLogger("dsv4_jax.serve").setLevel(logging.WARNING)
    never_fails(client, *request)
    assert server.endpoints.engine.is_serving


# Conversations.

HIGHER = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
HIGHEST = "Reasoning Effort: Beyond maximum"


@pytest.fixture(scope="module")
def read(tokenizer):
    """What reads conversations as a release renders them."""
    text = tokenizer.to_str()
    return functools.cache(
        lambda release: Conversations(ServeSettings(model_name=MODEL, release=release), text, 4096)
    )


@pytest.fixture
def reader(read):
    return read("first")


@pytest.mark.parametrize(
    ("release", "effort", "told"),
    [
        ("first", None, ""), ("first", "low", ""), ("first", "medium", ""), ("first", "high", ""),
        ("first", "xhigh", HIGHER), ("first", "max", HIGHER),
        ("later", None, HIGHER), ("later", "low", ""), ("later", "high", HIGHER),
        ("later", "max", HIGHEST),
    ],
)  # fmt: skip
def test_efforts_are_rendered_as_their_release_has_them(read, tokenizer, release, effort, told):
    reader = read(release)
    bodies = [
        (CHAT, {"messages": HI} | ({"reasoning_effort": effort} if effort else {})),
        (RESPONSES, {"input": "hi"} | ({"reasoning": {"effort": effort}} if effort else {})),
        (MESSAGES, {"messages": HI, "max_tokens": 5}
         | ({"output_config": {"effort": effort}} if effort else {})),
    ]  # fmt: skip
    for dialect, body in bodies:
        asked = reader.read({"model": MODEL} | body, dialect)
        text = tokenizer.decode(asked.prompt_ids, skip_special_tokens=False)
        assert text.startswith("<｜begin▁of▁sentence｜>" + (told or "<｜User｜>"))
        assert text.endswith("<｜User｜>hi<｜Assistant｜><think>")


def test_text_is_never_a_special_token(reader, tokenizer):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "<｜User｜>"}]}
    asked = reader.read(body | {"thinking": {"type": "disabled"}}, CHAT)
    user = tokenizer.token_to_id("<｜User｜>")
    assert asked.prompt_ids.count(user) == 1
    assert tokenizer.decode(asked.prompt_ids, skip_special_tokens=False).count("<｜User｜>") == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_tokenizer_without_chat_tokens_refuses_conversations(path):
    with running(small_engine(shipped_tokenizer())) as server:
        refused = httpx.post(server.url + path, json=BODIES[path] | {"tools": []})
        assert refused.status_code == 400
        told = refused.json()["error"]["message"]
        assert "is not made for conversations" in told
        assert "/v1/completions" in told
        fine = httpx.post(
            f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 2}
        )
        assert fine.status_code == 200


@pytest.mark.slow
def test_a_checkpoint_without_a_tokenizer_has_no_conversations():
    reader = Conversations(ServeSettings(model_name=MODEL), None, 4096)
    with pytest.raises(ApiError, match="no tokenizer"):
        reader.read({"model": MODEL, "messages": HI}, CHAT)


def test_an_answer_does_not_depend_on_how_many_tokens_come_at_once(reader, tokenizer):
    """Here half a character is the last thing that is drawn, and another one is amid the rest."""
    body = {"model": MODEL, "messages": HI, "max_tokens": 6, "thinking": {"type": "disabled"}}
    asked = reader.read(body, CHAT)
    drawn = byte_ids(tokenizer, [183, 204, 1, 30, 242, 194])
    tokens = [Token(0, one, "length" if i == 5 else None) for i, one in enumerate(drawn)]
    done = Completion(drawn, None, "length", prompt_tokens=len(asked.prompt_ids))
    for size in range(1, 7):
        renderer = ConversationRenderer(asked, CHAT, MODEL, reader.tokenizer)
        renderer.start(0)
        for begin in range(0, 6, size):
            renderer.tokens(0, tokens[begin : begin + size])
        answer = json.loads(renderer.end([done]))
        assert answer["choices"][0]["message"]["content"] == "\ufffd\ufffd\x01\x1e"
