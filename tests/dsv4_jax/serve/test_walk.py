"""A walk through every endpoint with the clients that people use, on V4's own tokenizer.

Its tokens are parts of characters, and several characters at once. What answers say comes from a
script, also where a grammar holds them: the engine refuses a token that a grammar does not allow.
"""

import json
from typing import Literal

import httpx
import pydantic
import pytest

from dsv4_jax.serve.web_page import PAGE_PATHS, STATE_PATH
from helpers import slow
from helpers.clients import anthropic, openai
from helpers.serve import MODEL, ids_of, script

pytestmark = [
    pytest.mark.slow,  # an engine of 129,280 tokens compiles for 30 s and more
    pytest.mark.parametrize("tokenizer_name", ["released"], indirect=True),
]

TEXT = "Zoë 猕🐙𓀀na\u0308\u2028ive\x0c\r\n\t<b>&amp;"
"""Characters of several tokens and tokens of several characters, and what ends lines elsewhere."""
THOUGHT = "Hm… 🤔"
ASKED = [{"role": "user", "content": f"{TEXT} <｜User｜></think><｜end▁of▁sentence｜>"}]
PLAIN = {"thinking": {"type": "disabled"}}
PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "unit": {"type": "string", "enum": ["°C", "°F"]},
        "days": {"type": "integer"},
    },
    "required": ["place", "unit", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": TEXT, "parameters": PARAMETERS}
PLACE = "Zoë\u2028🐙"
ARGUMENTS = {"place": PLACE, "unit": "°C", "days": 3}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    f'<｜DSML｜parameter name="place" string="true">{PLACE}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="unit" string="true">°C</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


class Fruit(pydantic.BaseModel):
    name: str
    colour: Literal["grün", "🟠"]
    seeds: int | None


FRUIT = Fruit(name='"猕猴桃" 🥝', colour="🟠", seeds=None)
AS_JSON = json.dumps(FRUIT.model_dump(), ensure_ascii=False)


@pytest.fixture(scope="module")
def claude(server):
    """Anthropic's client."""
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def says(engine, monkeypatch):
    """Makes every answer a text, whether a grammar holds it or not."""
    return lambda text: script(monkeypatch, engine, text, replaces_masked=True)


@pytest.fixture(scope="module")
def count(tokenizer):
    """How many tokens texts have, and one more each: the end of reasoning, or of the answer."""
    return lambda *texts: sum(len(ids_of(tokenizer, text)) + 1 for text in texts)


def test_what_is_asked_is_hard(tokenizer):
    """Some tokens are parts of characters, and some are several; special tokens are text."""
    pieces = [tokenizer.decode([one]) for one in ids_of(tokenizer, TEXT)]
    assert any("\ufffd" in piece for piece in pieces)
    assert any(len(piece) > 2 for piece in pieces)
    assert tokenizer.decode(ids_of(tokenizer, TEXT)) == TEXT


# Completions.


def test_completions(ask, says, count, tokenizer):
    says(TEXT)
    asked = {"model": MODEL, "prompt": [TEXT, "b"], "max_tokens": 90, "n": 2}
    done = ask.completions.create(**asked)
    assert [choice.text for choice in done.choices] == [TEXT] * 4
    assert {choice.finish_reason for choice in done.choices} == {"stop"}
    assert done.usage.completion_tokens == 4 * count(TEXT)
    assert done.usage.prompt_tokens == count(TEXT) - 1 + 1
    parts = {number: [] for number in range(4)}
    for event in ask.completions.create(**asked, stream=True):
        for choice in event.choices:
            parts[choice.index].append(choice.text)
    assert ["".join(part) for part in parts.values()] == [TEXT] * 4
    assert all("\ufffd" not in piece for part in parts.values() for piece in part)
    assert all(len(part) > 10 for part in parts.values())  # it streams


def test_completions_that_repeat_their_prompt(ask, says, tokenizer):
    says("🐙")
    prompt = f"{TEXT}<｜User｜>"
    for given in (prompt, ids_of(tokenizer, prompt)):
        asked = {"model": MODEL, "prompt": given, "max_tokens": 9, "echo": True}
        assert ask.completions.create(**asked).choices[0].text == f"{prompt}🐙"
        events = list(ask.completions.create(**asked, stream=True))
        assert "".join(event.choices[0].text for event in events) == f"{prompt}🐙"


def test_completions_end_at_texts_that_are_parts_of_tokens(ask, says):
    says(TEXT)
    for stop in ("ive", "b>&", "𓀀"):
        asked = {"model": MODEL, "prompt": "a", "max_tokens": 90, "stop": ["\x0b", stop]}
        done = ask.completions.create(**asked).choices[0]
        assert (done.text, done.finish_reason) == (TEXT[: TEXT.index(stop)], "stop")
        events = list(ask.completions.create(**asked, stream=True))
        assert "".join(event.choices[0].text for event in events) == done.text


def test_log_probabilities_have_an_entry_a_token(ask, says, count):
    text = "ë猕\u2028🐙"
    says(text)
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 90, "logprobs": 2}
    found = ask.completions.create(**asked).choices[0].logprobs
    lengths = {len(part) for part in dict(found).values()}
    assert lengths == {count(text)}
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[-1] == len(text)
    done = ask.chat.completions.create(
        model=MODEL, messages=ASKED, logprobs=True, top_logprobs=2, extra_body=PLAIN
    )
    assert done.choices[0].message.content == text
    told = done.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in told).decode().startswith(text)
    assert {len(one.top_logprobs) for one in told} == {2}


# Chat.


def chat_parts(events):
    """Reasoning, content and reasons of a stream, each piece of which is whole characters."""
    thoughts, contents, reasons = "", "", []
    for event in events:
        for choice in event.choices:
            thought = getattr(choice.delta, "reasoning_content", None) or ""
            content = choice.delta.content or ""
            assert "\ufffd" not in thought + content
            thoughts, contents = thoughts + thought, contents + content
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return thoughts, contents, reasons


def test_a_chat(ask, says, count):
    says(f"{THOUGHT}</think>{TEXT}")
    asked = {"model": MODEL, "messages": ASKED}
    for effort in ("low", "high", "max"):
        done = ask.chat.completions.create(**asked, reasoning_effort=effort)
        message = done.choices[0].message
        assert (message.reasoning_content, message.content) == (THOUGHT, TEXT)
        assert done.usage.completion_tokens == count(THOUGHT, TEXT)
    streamed = ask.chat.completions.create(**asked, stream=True)
    assert chat_parts(streamed) == (THOUGHT, TEXT, ["stop"])
    says(TEXT)
    done = ask.chat.completions.create(**asked, n=2, extra_body=PLAIN)
    assert [choice.message.content for choice in done.choices] == [TEXT] * 2


@pytest.mark.parametrize("strict", slow.all_but([True], [False, True]))
def test_a_chat_calls_a_tool(ask, says, strict):
    tools = [{"type": "function", "function": WEATHER | {"strict": strict}}]
    asked = {"model": MODEL, "messages": ASKED, "tools": tools}
    says(f"Wait, 🐙.\n\n{CALL}")
    (choice,) = ask.chat.completions.create(**asked, extra_body=PLAIN).choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("Wait, 🐙.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    says(f"{THOUGHT}</think>{CALL}")
    with ask.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices
    (one,) = streamed.message.tool_calls
    assert streamed.message.reasoning_content == THOUGHT
    assert (one.function.name, json.loads(one.function.arguments)) == ("weather", ARGUMENTS)
    answered = [
        *ASKED,
        streamed.message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": one.id, "content": TEXT},
    ]
    says(f"{THOUGHT}</think>🐙")
    done = ask.chat.completions.create(**(asked | {"messages": answered}))
    assert done.choices[0].message.content == "🐙"


def test_a_chat_answers_with_a_class(ask, says):
    for lead, options in (("", {"extra_body": PLAIN}), (f"{THOUGHT}</think>", {})):
        says(lead + AS_JSON)
        asked = {"model": MODEL, "messages": ASKED, "response_format": Fruit}
        done = ask.chat.completions.parse(**asked, **options)
        assert done.choices[0].message.parsed == FRUIT
        with ask.chat.completions.stream(**asked, **options) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == FRUIT


def test_what_the_model_says_by_itself_is_of_a_schema(ask):
    schema = {"type": "object", "properties": {"a": {"enum": ["猕猴桃🥝", "𓀀"]}}, "required": ["a"]}
    format_ = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, "strict": True},
    }
    done = ask.chat.completions.create(
        model=MODEL, messages=ASKED, response_format=format_, extra_body=PLAIN, temperature=0
    )
    assert json.loads(done.choices[0].message.content)["a"] in ("猕猴桃🥝", "𓀀")


# Responses.


def test_a_response(ask, says, count):
    says(f"{THOUGHT}</think>{TEXT}")
    asked = {"model": MODEL, "input": ASKED, "instructions": TEXT}
    done = ask.responses.create(**asked, reasoning={"effort": "high"})
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert (done.output[0].content[0].text, done.output_text) == (THOUGHT, TEXT)
    assert (done.status, done.instructions) == ("completed", TEXT)
    assert done.usage.output_tokens == count(THOUGHT, TEXT)
    with ask.responses.stream(**asked) as stream:
        events = list(stream)
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == TEXT
    assert not any("\ufffd" in delta for delta in deltas)
    says("Kurz. 🐙")
    follow = [*ASKED, *[one.model_dump(exclude_none=True) for one in done.output], *ASKED]
    again = ask.responses.create(
        model=MODEL, input=follow, instructions=TEXT, reasoning={"effort": "none"}
    )
    assert again.output_text == "Kurz. 🐙"


@pytest.mark.parametrize("strict", slow.all_but([True], [False, True]))
def test_a_response_calls_a_tool(ask, says, strict):
    asked = {"model": MODEL, "input": ASKED, "reasoning": {"effort": "none"}}
    asked["tools"] = [{"type": "function", **WEATHER, "strict": strict}]
    says(CALL)
    done = ask.responses.create(**asked)
    (call,) = [item for item in done.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
    with ask.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    (one,) = [item for item in final.output if item.type == "function_call"]
    assert (one.name, json.loads(one.arguments)) == ("weather", ARGUMENTS)
    follow = [*ASKED, call.model_dump(exclude_none=True)]
    follow += [{"type": "function_call_output", "call_id": call.call_id, "output": TEXT}]
    says("🐙")
    assert ask.responses.create(**(asked | {"input": follow})).output_text == "🐙"


def test_a_response_answers_with_a_class(ask, says):
    says(AS_JSON)
    asked = {"model": MODEL, "input": ASKED, "reasoning": {"effort": "none"}}
    done = ask.responses.parse(**asked, text_format=Fruit)
    assert done.output_parsed == FRUIT


# Messages.


def test_a_message(claude, says, count):
    says(f"{THOUGHT}</think>{TEXT}")
    asked = {"model": MODEL, "max_tokens": 400, "messages": ASKED, "system": TEXT}
    done = claude.messages.create(**asked, thinking={"type": "adaptive"})
    assert (done.content[0].thinking, done.content[1].text) == (THOUGHT, TEXT)
    assert (done.stop_reason, done.usage.output_tokens) == ("end_turn", count(THOUGHT, TEXT))
    counted = claude.messages.count_tokens(model=MODEL, messages=ASKED, system=TEXT)
    assert counted.input_tokens == done.usage.input_tokens
    with claude.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert final.content[0].thinking == THOUGHT
    follow = [*ASKED, {"role": "assistant", "content": final.model_dump()["content"]}, *ASKED]
    says(TEXT)
    plainly = asked | {"messages": follow, "thinking": {"type": "disabled"}}
    assert claude.messages.create(**plainly).content[0].text == TEXT
    stopped = claude.messages.create(**plainly, stop_sequences=["𓀀n"])
    assert stopped.content[0].text == TEXT[: TEXT.index("𓀀")]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "𓀀n")


def test_a_message_uses_a_tool(claude, says):
    tools = [{"name": "weather", "description": TEXT, "input_schema": PARAMETERS}]
    asked = {"model": MODEL, "max_tokens": 400, "messages": ASKED, "tools": tools}
    says(f"{THOUGHT}</think>Wait.\n\n{CALL}")
    done = claude.messages.create(**asked)
    assert [part.type for part in done.content] == ["thinking", "text", "tool_use"]
    assert (done.content[-1].name, done.content[-1].input) == ("weather", ARGUMENTS)
    with claude.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[-1].input == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": done.content[-1].id, "content": TEXT}
    follow = [
        *ASKED,
        {"role": "assistant", "content": done.model_dump()["content"]},
        {"role": "user", "content": [result]},
    ]
    says(CALL)
    forced = claude.messages.create(
        **(asked | {"messages": follow}), tool_choice={"type": "any"},
        thinking={"type": "disabled"},
    )  # fmt: skip
    assert forced.content[-1].input == ARGUMENTS


# The rest.


def test_models_tokens_health_metrics_and_the_page(server, ask, claude, tokenizer):
    assert [model.id for model in ask.models.list()] == [MODEL]
    assert [model.id for model in claude.models.list()] == [MODEL]
    assert ask.models.retrieve(MODEL).id == claude.models.retrieve(MODEL).id == MODEL
    with httpx.Client(base_url=server.url) as client:
        for text in (TEXT, f"{TEXT}<｜User｜></think>", "\u2028", ""):
            found = client.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
            assert found["tokens"] == ids_of(tokenizer, text)
            assert found["count"] == len(found["tokens"])
            body = {"model": MODEL, "tokens": found["tokens"]}
            assert client.post("/detokenize", json=body).json() == {"prompt": text}
        assert client.get("/health").json() == {"status": "ok"}
        assert "dsv4_generated_tokens_total" in client.get("/metrics").text
        assert {client.get(path).status_code for path in (*PAGE_PATHS, STATE_PATH)} == {200}
        assert client.get(STATE_PATH).json()["takes_conversations"]
    with pytest.raises(openai.BadRequestError, match=r"2048|context"):
        ask.completions.create(model=MODEL, prompt=[5] * 2048, max_tokens=9)
