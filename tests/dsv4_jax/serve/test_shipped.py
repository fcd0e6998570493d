"""The shipped checkpoint behind the server: answers are those of the engine, drafts or none."""

import concurrent.futures
import json

import pytest

import dsv4_jax as ds
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers.clients import openai
from helpers.serve import MODEL, running

pytestmark = pytest.mark.unoptimised


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_64_at_once_get_what_each_gets_alone(draft_tokens):
    """Documents with common heads, greedy and drawn, whole and streamed, with stop texts."""
    engine = ds.Engine(
        *ds.load_checkpoint(ds.SHIPPED_CHECKPOINT),
        tokenizer=load_tokenizer(ds.SHIPPED_CHECKPOINT),
        max_requests=3, max_context_tokens=512, prefill_tokens=(48,), decode_tokens=48,
        draft_tokens=draft_tokens,
    )  # fmt: skip
    document = (json.__doc__ or "")[:400]
    prompts = [document[: (i % 7) * 40] + document[i * 5 : i * 5 + 40] for i in range(64)]
    asked = [
        {"max_new_tokens": 3 + i % 20, "temperature": 0.7 * (i % 2), "seed": i,
         "stop_texts": ["the"] if i % 3 else []}
        for i in range(64)
    ]  # fmt: skip
    expected = [
        engine.generate([prompt], **options)[0]
        for prompt, options in zip(prompts, asked, strict=True)
    ]
    with (
        running(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0) as client,
        concurrent.futures.ThreadPoolExecutor(64) as pool,
    ):

        def run(i):
            options = {
                "model": MODEL, "prompt": prompts[i], "max_tokens": asked[i]["max_new_tokens"],
                "temperature": asked[i]["temperature"], "seed": i, "stop": asked[i]["stop_texts"],
            }  # fmt: skip
            if i % 2:
                choice = client.completions.create(**options).choices[0]
                return choice.text, choice.finish_reason
            text, reason = "", None
            for event in client.completions.create(**options, stream=True):
                text += event.choices[0].text
                reason = event.choices[0].finish_reason
            return text, reason

        answers = list(pool.map(run, range(64)))
    assert answers == [(done.text, done.finish_reason) for done in expected]
    assert draft_tokens == 0 or engine.metrics.accepted_tokens > 0
