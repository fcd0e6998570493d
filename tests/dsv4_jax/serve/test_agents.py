"""What agents send is served: what it asks for is obeyed, or left out and named in the log."""

import copy
import json
import types

import httpx
import pytest

from dsv4_jax.serve import ServeSettings
from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES, check_dialect
from dsv4_jax.serve.errors import ApiError
from dsv4_jax.serving.requests.request import Completion, Token
from helpers.agent_requests import CODEX, REQUESTS
from helpers.serve import EOS, MODEL, script, v4_tokenizer
from helpers.serving import until

pytestmark = pytest.mark.compiles_for_others

HI = [{"role": "user", "content": "hi"}]
MARK = "｜DSML｜"


def call(name, parameter, value):
    inner = f'<{MARK}parameter name="{parameter}" string="true">{value}</{MARK}parameter>\n'
    return f'<{MARK}invoke name="{name}">\n{inner}</{MARK}invoke>\n'


CALLS = (
    f"R.</think>\n\n<{MARK}tool_calls>\n"
    + call("mcp__maps__find", "city", "Bern")
    + call("apply_patch", "input", "*** Begin")
    + f"</{MARK}tool_calls>"
)


@pytest.fixture(scope="module")
def reader():
    return Conversations(ServeSettings(model_name=MODEL), v4_tokenizer().to_str(), 8192)


DIALECTS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}


def answer_to(reader, path, body, text):
    """What a client gets where the model says that text: a whole answer, or events as a text."""
    dialect, left_out = DIALECTS[path], []
    asked = reader.read({"model": MODEL} | body, dialect, left_out)
    renderer = ConversationRenderer(asked, dialect, MODEL, reader.tokenizer)
    ids = [*v4_tokenizer().encode(text, add_special_tokens=False).ids, EOS]
    tokens = [Token(0, one, "stop" if one == EOS else None) for one in ids]
    done = Completion(ids, None, "stop", prompt_tokens=len(asked.prompt_ids))
    raw = renderer.start(0) + b"".join(renderer.tokens(0, [one]) for one in tokens)
    return (raw + renderer.end([done])).decode(), left_out, asked


@pytest.mark.parametrize("name", [name for name, one in REQUESTS.items() if one[0] in DIALECTS])
def test_requests_of_agents_are_answered(name, reader):
    path, body, expected = REQUESTS[name]
    sent = copy.deepcopy(body)
    answer, left_out, asked = answer_to(reader, path, body, "R.</think>Q")
    assert '"Q"' in answer or asked.sampling.grammar is not None
    assert answer.startswith(("data: ", "event: ") if body.get("stream") else "{")
    assert sorted(left_out) == (expected or [])
    assert body == sent
    formed = ("class" in name) or ("schema" in name) or ("title" in name) or ("strict" in name)
    assert (asked.sampling.grammar is not None) == formed


def test_what_is_left_out_is_said_in_the_log_and_counted_the_same(server, caplog):
    caplog.set_level("INFO", "dsv4_jax.serve")
    for number, name in enumerate(("Claude Code, a count", "litellm, responses"), 1):
        path, body, left_out = REQUESTS[name]
        body = {"model": MODEL} | body | ({"max_output_tokens": 2} if "input" in body else {})
        answer = httpx.post(server.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        until(lambda number=number: len(caplog.records) == number)
        line = json.loads(caplog.records[-1].getMessage())
        assert sorted(line["left_out"]) == left_out


def test_tools_of_codex_are_called_by_the_names_that_it_gave_them(reader):
    answer, _, _ = answer_to(reader, "/v1/responses", CODEX | {"stream": False}, CALLS)
    answer = json.loads(answer)
    calls = [item for item in answer["output"] if item["type"].endswith("_call")]
    assert [(one["type"], one["name"], one.get("namespace")) for one in calls] == [
        ("function_call", "find", "mcp__maps"),
        ("custom_tool_call", "apply_patch", None),
    ]
    assert json.loads(calls[0]["arguments"]) == {"city": "Bern"}
    assert calls[1]["input"] == "*** Begin"
    assert answer["store"] is False


def prompt_of(reader, body, dialect):
    asked = reader.read({"model": MODEL} | body, dialect)
    return v4_tokenizer().decode(asked.prompt_ids, skip_special_tokens=False)


def test_what_is_left_out_is_not_in_the_prompt_and_what_is_kept_is(reader):
    prompt = prompt_of(reader, CODEX, RESPONSES)
    assert "web_search" not in prompt
    assert "exec" not in prompt
    assert "mcp__maps__find" in prompt
    assert "apply_patch" in prompt
    for path, body, _ in REQUESTS.values():
        if path == "/v1/messages":
            assert "redacted" not in prompt_of(reader, body, MESSAGES)


def test_a_tool_that_is_left_out_cannot_be_forced(server):
    search = {"type": "web_search_20250305", "name": "web_search"}
    for path, body in (
        ("/v1/messages", {"messages": HI, "max_tokens": 9, "tools": [search],
                          "tool_choice": {"type": "tool", "name": "web_search"}}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}],
                           "tool_choice": {"type": "web_search_preview"}}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}],
                           "tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": HI, "tool_choice": "required",
                                  "tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ):  # fmt: skip
        answer = httpx.post(server.url + path, json={"model": MODEL} | body, timeout=60)
        assert answer.status_code == 400
        assert "tool_choice" in answer.json()["error"]["message"]


def test_hundreds_of_tools_are_taken_up_to_the_limit(reader):
    tools = [{"name": f"t{i}", "input_schema": {"type": "object"}} for i in range(259)]
    space = {"type": "namespace", "name": "n", "tools": [
        {"type": "function", "name": f"t{i}", "parameters": {}} for i in range(300)]}  # fmt: skip
    body = {"messages": HI, "max_tokens": 9, "tools": tools}
    assert len(check_dialect(body, MESSAGES, max_tools=259)["tools"]) == 259
    for fields, dialect, most in (
        (body, MESSAGES, 258), ({"input": "hi", "tools": [space]}, RESPONSES, 299),
    ):  # fmt: skip
        with pytest.raises(ApiError, match=f"at most {most}"):
            check_dialect(fields, dialect, max_tools=most)


THINKS, SILENT = "<think>", "</think>"
MAXIMUM = "Reasoning Effort: Absolute maximum"


@pytest.mark.parametrize(
    ("dialect", "fields", "end", "is_high"),
    [
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, THINKS, False),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 31999}}, THINKS, True),
        (MESSAGES, {"thinking": {"budget_tokens": 8000}}, THINKS, True),
        (MESSAGES, {"thinking": {"type": "disabled", "budget_tokens": 8000}}, SILENT, False),
        (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 0}}, THINKS, True),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 31999},
                    "output_config": {"effort": "low"}}, THINKS, False),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, THINKS, False),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9000}}, THINKS, True),
        (CHAT, {"enable_thinking": False}, SILENT, False),
        (CHAT, {"enable_thinking": True, "thinking_budget": 100}, THINKS, False),
        (CHAT, {"thinking_budget": 100}, THINKS, False),
        (CHAT, {"chat_template_kwargs": {"thinking": False}}, SILENT, False),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, SILENT, False),
        (CHAT, {"chat_template_kwargs": {"thinking": True, "reasoning_effort": "low"}},
         THINKS, False),
        (CHAT, {"reasoning": {"enabled": False}}, SILENT, False),
        (CHAT, {"reasoning": {"effort": "low"}}, THINKS, False),
        (CHAT, {"reasoning": {"max_tokens": 50}}, THINKS, False),
        (CHAT, {}, THINKS, True),
    ],
)  # fmt: skip
def test_thinking_is_obeyed_in_every_spelling(dialect, fields, end, is_high):
    settings = ServeSettings(model_name=MODEL, release="later")
    later = Conversations(settings, v4_tokenizer().to_str(), 4096)
    body = {"messages": HI} | ({"max_tokens": 9} if dialect is MESSAGES else {})
    sent = copy.deepcopy(fields)
    prompt = prompt_of(later, body | fields, dialect)
    assert prompt.endswith(f"<｜Assistant｜>{end}")
    assert (MAXIMUM in prompt) == is_high  # "high" has that paragraph in later releases
    assert fields == sent


@pytest.mark.parametrize(
    ("dialect", "fields", "told"),
    [
        (CHAT, {"thinking": {"type": "enabled"}, "enable_thinking": False}, "enable_thinking"),
        (CHAT, {"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        (CHAT, {"thinking_budget": -1}, "thinking_budget"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": "9"}}, "budget_tokens"),
        (MESSAGES, {"context_management": {"edits": [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]}}, "value"),
        (MESSAGES, {"context_management": {"edits": [
            {"type": "clear_thinking_20251015", "keep": 3}]}}, "keep"),
        (MESSAGES, {"context_management": {"edits": ["x"]}}, "edits"),
        (MESSAGES, {"context_management": {"edits": [{"type": "compact_20260112"}]}}, "edits"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_cannot_be_obeyed_is_named(dialect, fields, told):
    with pytest.raises(ApiError, match=told):
        check_dialect({"messages": HI, "max_tokens": 9} | fields, dialect, max_tools=9)


def said(thought, *, calls=False):
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    thinking = {"type": "thinking", "thinking": thought, "signature": "s"}
    text = {"type": "text", "text": f"after {thought}"}
    return {"role": "assistant", "content": [thinking, call if calls else text]}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("all", {"A", "B", "C", "D"}), ({"type": "all"}, {"A", "B", "C", "D"}),
        (None, {"D"}), ({"type": "thinking_turns", "value": 1}, {"D"}),
        ({"type": "thinking_turns", "value": 2}, {"B", "C", "D"}),
    ],
)  # fmt: skip
def test_thinking_of_earlier_turns_is_cleared_where_that_is_asked(keep, kept):
    """A turn goes on over results of tools; one without thinking does not count."""
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
    plain = {"role": "assistant", "content": "no thought"}
    turns = [*HI, said("A"), *HI, said("B", calls=True), result, said("C"), *HI, plain, *HI,
             said("D"), *HI]  # fmt: skip
    edit = {"type": "clear_thinking_20251015"} | ({"keep": keep} if keep else {})
    body = {"messages": turns, "max_tokens": 9, "context_management": {"edits": [edit]}}
    given = check_dialect(body, MESSAGES, max_tools=9)
    parts = [part for one in given["messages"] for part in one["content"] if isinstance(part, dict)]
    assert {part["thinking"] for part in parts if part["type"] == "thinking"} == kept
    assert len(given["messages"]) == len(turns)


@pytest.mark.parametrize(
    ("dialect", "choice"),
    [
        (CHAT, lambda mode: {"type": "allowed_tools", "allowed_tools": {
            "mode": mode, "tools": [{"type": "function", "function": {"name": "b"}}]}}),
        (RESPONSES, lambda mode: {
            "type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "b"}]}),
    ],
)  # fmt: skip
def test_a_choice_among_some_tools_is_obeyed(dialect, choice):
    tools = [{"name": name, "parameters": {"type": "object"}} for name in "abc"]
    tools = [
        {"type": "function", "function": one} if dialect is CHAT else {"type": "function", **one}
        for one in tools
    ]
    body = {"tools": tools, **({"messages": HI} if dialect is CHAT else {"input": "hi"})}
    for mode in ("auto", "required"):
        given = check_dialect(body | {"tool_choice": choice(mode)}, dialect, max_tools=9)
        assert given["tool_choice"] == mode
        assert given["tools"] == [tools[1]]
    with pytest.raises(ApiError, match=r"tool_choice\.(allowed_tools\.)?tools: must be"):
        check_dialect(
            body | {"tools": tools[:1], "tool_choice": choice("auto")}, dialect, max_tools=9
        )


def test_null_is_absent_at_any_depth_and_kept_in_the_callers_words(reader):
    schema = {"type": "object", "properties": {"a": {"default": None, "enum": [None, 1]}}}
    body = {
        "system": None, "stop_sequences": None, "tool_choice": None, "thinking": None,
        "metadata": None, "output_config": {"effort": None, "format": None}, "max_tokens": 9,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "citations": None}]},
            {"role": "assistant", "content": [{
                "type": "tool_use", "id": "t", "name": "f", "input": {"a": None}, "caller": None}]},
            {"role": "user", "content": [{
                "type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": None}]},
        ],
        "tools": [{"name": "f", "input_schema": schema, "type": None, "description": None,
                   "strict": None, "defer_loading": None, "input_examples": None,
                   "allowed_callers": None, "cache_control": None}],
    }  # fmt: skip
    prompt = prompt_of(reader, body, MESSAGES)
    assert '"enum":[null,1]' in prompt.replace(" ", "")
    assert ">null<" in prompt
    body["messages"][1]["content"][0]["input"] = None  # how some write an empty object
    body["tools"][0]["input_schema"] = None
    assert ">null<" not in prompt_of(reader, body, MESSAGES)
    chat = {
        "messages": [
            {"role": "system", "content": "s", "name": None},
            {"role": "assistant", "content": "a", "refusal": None, "audio": None,
             "function_call": None, "tool_calls": None, "annotations": None},
            {"role": "assistant", "tool_calls": [{
                "id": "c", "type": "function", "function": {"name": "f", "arguments": None}}]},
            {"role": "tool", "tool_call_id": "c", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]},
        ],
        "thinking": {"type": None, "budget_tokens": None}, "stream_options": None,
        "tools": [{"type": "function", "function": {
            "name": "f", "description": None, "parameters": None, "strict": None}}],
        "response_format": None, "audio": None, "functions": None, "unknown": None,
    }  # fmt: skip
    assert prompt_of(reader, chat, CHAT).endswith(THINKS)
    item = {"type": "message", "role": "user", "id": None, "status": None, "content": [
        {"type": "input_text", "text": "a", "prompt_cache_breakpoint": None}]}  # fmt: skip
    responses = {
        "input": [item], "reasoning": {"effort": None, "summary": None}, "include": None,
        "text": {"format": None, "verbosity": None}, "conversation": None, "prompt": None,
    }  # fmt: skip
    assert prompt_of(reader, responses, RESPONSES).endswith(THINKS)


def test_an_answer_has_what_the_context_leaves(server, engine, monkeypatch):
    script(monkeypatch, engine, "R.</think>It rains.")
    for path, field in (
        ("/v1/chat/completions", "max_tokens"), ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/messages", "max_tokens"), ("/v1/responses", "max_output_tokens"),
        ("/v1/completions", "max_tokens"),
    ):  # fmt: skip
        body = {"input": "hi"} if path == "/v1/responses" else {"messages": HI}
        body = {"prompt": "a"} if path == "/v1/completions" else body
        body = {"model": MODEL, field: 500_000} | body
        answer = httpx.post(server.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_the_tokens_that_the_context_leaves_are_all_drawn(server):
    """A prompt of 2,044 tokens leaves room for four in this context of 2,048."""
    body = {"model": MODEL, "prompt": [5] * 2044, "max_tokens": 99, "ignore_eos": True}
    done = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    assert done["usage"]["completion_tokens"] == 4
    assert done["choices"][0]["finish_reason"] == "length"


def test_clients_of_threads_are_told_to_send_the_whole_conversation(server):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        body = {"model": MODEL, "messages": HI, "max_tokens": 9, "thread": thread}
        answer = httpx.post(f"{server.url}/v1/messages", json=body)
        assert answer.status_code == 400
        found = types.SimpleNamespace(**answer.json()["error"])
        assert found.type == "invalid_request_error"
        assert found.details == {"error_code": "thread_unsupported_request"}
        assert "thread" in found.message
