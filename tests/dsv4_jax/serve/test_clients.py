"""The clients that people use, against a running server.

The model is one layer of random weights. Where an answer has to say something, a script takes the
place of what it draws.
"""

import concurrent.futures
import json

import httpx
import pytest

import dsv4_jax as ds
from helpers.clients import anthropic, openai
from helpers.serve import BEGIN, MODEL, ids_of, script

HI = [{"role": "user", "content": "hi"}]
PLAIN = {"thinking": {"type": "disabled"}}
TOOL = {
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
CALL = (
    'Wait.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="place" string="true">Bern</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@pytest.fixture(scope="module")
def claude(server):
    """Anthropic's client."""
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def count(tokenizer):
    """How many tokens texts have, and one more each: the end of reasoning, or of the answer."""
    return lambda *texts: sum(len(ids_of(tokenizer, text)) + 1 for text in texts)


@pytest.fixture
def says(engine, monkeypatch):
    """Makes every request draw the tokens of a text, and then end."""
    return lambda text: script(monkeypatch, engine, text)


def post(server, path, body, **options):
    return httpx.post(server.url + path, json={"model": MODEL} | body, **options)


# Completions.


@pytest.mark.slow
def test_64_completions_are_those_of_generate(server, ask, other_engine):
    """Whole and streamed, greedy and drawn, all at once."""
    prompts = [f"{'A prompt' * (i % 5)} {i}" for i in range(64)]
    asked = [
        {"max_new_tokens": 1 + i % 9, "temperature": 0.8 * (i % 2), "seed": i} for i in range(64)
    ]
    expected = other_engine.generate(prompts, sampling=[ds.SamplingParams(**one) for one in asked])

    def run(i):
        options = {
            "model": MODEL, "prompt": prompts[i], "max_tokens": asked[i]["max_new_tokens"],
            "temperature": asked[i]["temperature"], "seed": i,
        }  # fmt: skip
        if i % 4 < 2:
            done = ask.completions.create(**options)
            (choice,), usage = done.choices, done.usage
            return choice.text, choice.finish_reason, usage
        text, reason, usage = "", None, None
        streamed = ask.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        for event in streamed:
            assert (event.object, event.model) == ("text_completion", MODEL)
            for choice in event.choices:
                text, reason = text + choice.text, choice.finish_reason
            usage = event.usage
        return text, reason, usage

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(run, range(64)))
    for (text, reason, usage), done in zip(answers, expected, strict=True):
        assert (text, reason) == (done.text, done.finish_reason)
        assert usage.prompt_tokens == done.prompt_tokens
        assert usage.completion_tokens == len(done.token_ids)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details.cached_tokens >= 0


def test_several_prompts_several_answers_and_echo(ask, other_engine, tokenizer):
    """Answer j of a prompt has the seed and j more; token ids are prompts too."""
    ids = tokenizer.encode("two").ids
    done = ask.completions.create(
        model=MODEL, prompt=["one", "two"], n=2, max_tokens=4, seed=5, echo=True, temperature=1
    )
    texts = [
        prompt + other_engine.generate([prompt], max_new_tokens=4, seed=seed, temperature=1)[0].text
        for prompt in ("one", "two")
        for seed in (5, 6)
    ]
    assert [choice.text for choice in done.choices] == texts
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage.prompt_tokens == len(ids) * 2
    same = ask.completions.create(model=MODEL, prompt=ids, n=2, max_tokens=4, seed=5, temperature=1)
    assert ["two" + choice.text for choice in same.choices] == texts[2:]
    parts = {number: "" for number in range(4)}
    for event in ask.completions.create(
        model=MODEL, prompt=["one", "two"], n=2, max_tokens=4, seed=5, echo=True, temperature=1,
        stream=True,
    ):  # fmt: skip
        for choice in event.choices:
            parts[choice.index] += choice.text
    assert list(parts.values()) == texts


def test_stop_texts_end_a_completion(ask, says):
    says("one two three")
    done = ask.completions.create(model=MODEL, prompt="a", max_tokens=20, stop=[" th", "zz"])
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("one two", "stop")
    streamed = ask.completions.create(
        model=MODEL, prompt="a", max_tokens=20, stop=" th", stream=True
    )
    assert "".join(event.choices[0].text for event in streamed) == "one two"


def test_log_probabilities_of_a_completion(ask, other_engine):
    """Those of `generate`, of tokens as texts."""
    (expected,) = other_engine.generate(["hello"], max_new_tokens=5, logprobs=3)
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "temperature": 0, "logprobs": 3}
    found = ask.completions.create(**asked).choices[0].logprobs
    assert found.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs])
    assert len(found.tokens) == len(found.text_offset) == 5
    tops = [list(top.values()) for top in found.top_logprobs]
    for top, one in zip(tops, expected.logprobs, strict=True):
        assert set(top) <= {logprob for _, logprob in one.top}
    parts = [
        event.choices[0].logprobs
        for event in ask.completions.create(**asked, stream=True)
        if event.choices and event.choices[0].logprobs
    ]
    assert [one for part in parts for one in part.token_logprobs] == found.token_logprobs
    assert [one for part in parts for one in part.text_offset] == found.text_offset


def test_how_tokens_are_drawn_is_up_to_the_request(ask, other_engine):
    """Fields of OpenAI's, and those that other servers have too."""
    asked = {"temperature": 0.9, "top_p": 0.8, "seed": 3, "presence_penalty": 0.5}
    asked |= {"frequency_penalty": 0.2, "logit_bias": {"97": 5.0}}
    extra = {"top_k": 9, "min_p": 0.05, "ignore_eos": True}
    expected = other_engine.generate(
        ["x"], max_new_tokens=12, stop_token_ids=(), top_k=9, min_p=0.05,
        **(asked | {"logit_bias": {97: 5.0}}),
    )  # fmt: skip
    done = ask.completions.create(model=MODEL, prompt="x", max_tokens=12, **asked, extra_body=extra)
    assert done.choices[0].text == expected[0].text


# Chat.


def test_a_chat_with_and_without_thinking(ask, says, count, tokenizer):
    says("Hm.</think>Hello")
    done = ask.chat.completions.create(model=MODEL, messages=HI, max_tokens=40)
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello")
    assert choice.message.reasoning_content == "Hm."
    assert (choice.finish_reason, done.object) == ("stop", "chat.completion")
    assert done.usage.completion_tokens == count("Hm.", "Hello")
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    says("Hello, you.")
    done = ask.chat.completions.create(model=MODEL, messages=HI, max_tokens=3, extra_body=PLAIN)
    cut = tokenizer.decode(ids_of(tokenizer, "Hello, you.")[:3])
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (cut, "length")


def test_a_chat_that_streams(ask, says):
    says("Hm.</think>Hello")
    events = list(
        ask.chat.completions.create(
            model=MODEL, messages=HI, max_completion_tokens=40, stream=True, stop=["lo"],
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    deltas = [choice.delta for event in events for choice in event.choices]
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Hel"
    assert deltas[0].role == "assistant"
    assert {event.id for event in events} == {events[0].id}
    assert events[-1].choices[0].finish_reason == "stop"
    assert events[-1].usage.total_tokens > events[-1].usage.prompt_tokens > 0


def test_several_answers_of_a_chat(ask, other_engine, tokenizer):
    """Answers with a seed each, as `generate` gives them."""
    asked = {"model": MODEL, "messages": HI, "max_tokens": 6, "seed": 4, "n": 3, "temperature": 0.7}
    done = ask.chat.completions.create(**asked, extra_body=PLAIN)
    prompt = ids_of(tokenizer, f"{BEGIN}<｜User｜>hi<｜Assistant｜></think>")
    expected = [
        other_engine.generate([prompt], max_new_tokens=6, seed=seed, temperature=0.7)[0]
        for seed in (4, 5, 6)
    ]
    ends = other_engine.config.eos_token_ids
    drawn = [one.token_ids[: -1 if one.token_ids[-1] in ends else None] for one in expected]
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in drawn]
    shown = [choice.message.content for choice in done.choices]
    for text, choice in zip(texts, shown, strict=True):
        assert len(choice) > 0
        assert text.startswith(choice.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert done.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
    parts, usage = {0: "", 1: "", 2: ""}, None
    for event in ask.chat.completions.create(
        **asked, extra_body=PLAIN, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage
        for choice in event.choices:
            parts[choice.index] += choice.delta.content or ""
    assert list(parts.values()) == shown
    assert usage.completion_tokens == done.usage.completion_tokens


@pytest.mark.slow
def test_a_tool_is_called(ask, says):
    tools = [{"type": "function", "function": TOOL}]
    asked = {"model": MODEL, "messages": HI, "tools": tools, "extra_body": PLAIN}
    says(CALL)
    (choice,) = ask.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"place": "Bern"}
    assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")
    name = arguments = ""
    for event in ask.chat.completions.create(**asked, stream=True):
        for part in event.choices[0].delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, json.loads(arguments)) == ("weather", {"place": "Bern"})
    answered = [
        *HI,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    says("Rain.")
    done = ask.chat.completions.create(**(asked | {"messages": answered}))
    assert done.choices[0].message.content == "Rain."


def test_log_probabilities_of_a_chat(ask, engine):
    asked = {"model": MODEL, "messages": HI, "max_tokens": 4, "temperature": 0, "extra_body": PLAIN}
    done = ask.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    found = done.choices[0].logprobs.content
    assert 0 < len(found) <= 4
    for one in found:
        assert one.logprob <= 0
        assert [len(one.top_logprobs), one.top_logprobs[0].logprob] == [2, one.logprob]
        assert isinstance(one.bytes, list)


# Responses and messages.


def test_a_response(ask, says, count):
    says("Hm.</think>Hello")
    done = ask.responses.create(model=MODEL, input="hi", instructions="Be kind.")
    assert (done.output_text, done.status, done.object) == ("Hello", "completed", "response")
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert done.output[0].content[0].text == "Hm."
    assert done.instructions == "Be kind."
    assert done.usage.output_tokens == count("Hm.", "Hello")
    tools = [{"type": "function", **TOOL}]
    says(CALL)
    called = ask.responses.create(
        model=MODEL, input="hi", tools=tools, reasoning={"effort": "none"}
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"place": "Bern"})
    short = ask.responses.create(
        model=MODEL, input="hi", max_output_tokens=3, reasoning={"effort": "none"}
    )
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_response_that_streams(ask, says):
    says("Hm.</think>Hello")
    with ask.responses.stream(model=MODEL, input="hi") as stream:
        events = list(stream)
        done = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(text) == done.output_text == "Hello"


def test_a_message(claude, says, count):
    asked = {"model": MODEL, "max_tokens": 40, "messages": HI, "system": "Be kind."}
    says("Hm.</think>Hello")
    done = claude.messages.create(**asked)
    assert [block.type for block in done.content] == ["thinking", "text"]
    assert (done.content[0].thinking, done.content[1].text) == ("Hm.", "Hello")
    assert (done.role, done.stop_reason, done.type) == ("assistant", "end_turn", "message")
    assert done.usage.output_tokens == count("Hm.", "Hello")
    counted = claude.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    assert counted.input_tokens == done.usage.input_tokens
    assert claude.messages.create(**asked, stop_sequences=["m."]).stop_reason == "end_turn"
    says("Hello")
    plainly = asked | {"thinking": {"type": "disabled"}}
    stopped = claude.messages.create(**plainly, stop_sequences=["ll"])
    assert (stopped.content[0].text, stopped.stop_reason) == ("He", "stop_sequence")
    assert stopped.stop_sequence == "ll"
    tools = [{"name": "weather", "input_schema": TOOL["parameters"]}]
    says(CALL)
    called = claude.messages.create(**(plainly | {"max_tokens": 200}), tools=tools)
    assert (called.content[-1].name, called.content[-1].input) == ("weather", {"place": "Bern"})
    assert called.stop_reason == "tool_use"


def test_a_message_that_streams(claude, says, count):
    says("Hm.</think>Hello")
    with claude.messages.stream(model=MODEL, max_tokens=40, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello"
        done = stream.get_final_message()
    assert (done.stop_reason, done.content[0].thinking) == ("end_turn", "Hm.")
    assert done.usage.output_tokens == count("Hm.", "Hello")


# The rest.


def test_models_health_and_metrics(server, ask, claude):
    assert [model.id for model in ask.models.list()] == [MODEL]
    assert [model.id for model in claude.models.list()] == [MODEL]
    assert ask.models.retrieve(MODEL).max_model_len == 2048
    with pytest.raises(openai.NotFoundError):
        ask.models.retrieve("another")
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    metrics = httpx.get(f"{server.url}/metrics")
    assert "dsv4_generated_tokens_total" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain")


def test_tokens_and_texts(server, tokenizer):
    """V4's own tokenizer puts no token before a text; the stand-in begins it."""
    tokens = post(server, "/tokenize", {"prompt": "aé"}).json()
    assert tokens["tokens"] == tokenizer.encode("aé").ids
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 2048)
    bare = post(server, "/tokenize", {"prompt": "aé", "add_special_tokens": False}).json()
    assert bare["tokens"] == ids_of(tokenizer, "aé")
    text = post(server, "/detokenize", {"tokens": bare["tokens"]}).json()
    assert text == {"prompt": "aé"}
    assert post(server, "/detokenize", {"tokens": [10**6]}).status_code == 400
    assert post(server, "/tokenize", {"prompt": 3}).status_code == 400


LONG = " ".join(map(str, range(3000)))
"""More than 2,048 tokens of any tokenizer."""


def test_errors_are_those_of_the_protocol(server, ask, claude):
    with pytest.raises(openai.BadRequestError) as refused:
        ask.completions.create(model=MODEL, prompt="a", suffix="b")
    assert (refused.value.param, refused.value.type) == ("suffix", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        ask.chat.completions.create(model="another", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as too_long:
        ask.completions.create(model=MODEL, prompt=[5] * 2048)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="prompt is too long") as too_long:
        ask.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": LONG}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is"):
        ask.responses.create(model=MODEL, input=LONG)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2047"):
        claude.messages.create(
            model=MODEL, max_tokens=4, messages=[{"role": "user", "content": LONG}]
        )
    with pytest.raises(openai.BadRequestError) as refused:
        ask.chat.completions.create(model=MODEL, messages=HI, logit_bias={"999999": 1})
    assert refused.value.param == "logit_bias"
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(
            model=MODEL, max_tokens=4, messages=HI, extra_body={"container": "x"}
        )
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id == refused.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="another", max_tokens=4, messages=HI)
