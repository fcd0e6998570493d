"""Conversations of DeepSeek-V4.1: how they are rendered, held to a form and parsed.

Source: deepseek_v41.md section 13.
"""

import json

import pytest

from dsv4_jax.serve.errors import ApiError
from helpers.answers import PLAIN, Answers, D, closed, tool
from helpers.released_tokenizer import END, VOCAB, released_tokenizer_json

SYSTEM = "<｜System｜>"


@pytest.fixture(scope="module")
def answers():
    """The released tokenizer of V4, with the token that V4.1 has beside its others."""
    told = json.loads(released_tokenizer_json())
    own = next(one for one in told["added_tokens"] if one["content"] == "<｜User｜>")
    spare = next(one for one in told["added_tokens"] if "place▁holder" in one["content"])
    spare.update({**own, "id": spare["id"], "content": SYSTEM})
    return Answers(json.dumps(told), VOCAB, END, is_v41=True)


def rendered(answers, body):
    return answers.tokenizer.decode(answers.read(body).prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("effort", "number"), [(None, 75), ("low", 50), ("high", 75), ("xhigh", 75), ("max", 100)]
)
def test_an_effort_is_a_number_behind_a_system_token(answers, effort, number):
    body = {"reasoning_effort": effort} if effort else {}
    text = rendered(answers, body)
    assert text.startswith(
        f"<｜begin▁of▁sentence｜>{SYSTEM}Reasoning Effort: {number} (range 1-100"
    )
    assert text.endswith("<｜User｜>hi<｜Assistant｜><think>")
    plain = rendered(answers, body | PLAIN)
    assert plain == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"


def test_calls_have_its_tags_in_prompts_and_in_answers(answers):
    strict = tool(closed(s={"type": "string"}))
    body = {"tools": [strict]}
    assert f"</{D} calls>" in rendered(answers, body)

    def block(gap, name):
        value = f'<{D}{gap}parameter name="s" string="true">x</{D}{gap}parameter>\n'
        call = f'<{D}{gap}invoke name="f">\n{value}</{D}{gap}invoke>\n'
        return f"hm</think>ok\n\n<{D}{name}>\n{call}</{D}{name}>"

    ours, others = block(" ", " calls"), block("", "tool_calls")
    assert answers.allows(body, ours)
    assert not answers.allows(body, others)
    assert answers.calls(body, ours) == [("f", json.dumps({"s": "x"}))]
    must = body | {"tool_choice": "required"} | PLAIN
    assert rendered(answers, must).endswith(f"<{D} calls>\n")


def test_images_are_refused(answers):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "what is it"}]}]
    with pytest.raises(ApiError) as caught:
        answers.read({"messages": turns})
    assert caught.value.status == 400
