"""A stream that waits shows that it is alive, in the form that each protocol's clients read."""

import contextlib
import re
import threading
import time

import httpx
import pytest

from helpers import slow
from helpers.clients import anthropic, openai
from helpers.serve import MODEL, num_slots, running, script, warm_engine
from helpers.serving import until

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
}
LONG = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def engine():
    return warm_engine()


@pytest.fixture(scope="module")
def server(engine):
    with running(engine, pulse_s=0.1, queue={"queue_timeout_s": 0.8}) as server:
        yield server


@contextlib.contextmanager
def occupied(server, seconds=None):
    """All slots are taken, for so long or to the end, so that the next request waits."""
    over = threading.Event()
    body = LONG | {"n": num_slots(server.endpoints.engine.engine)}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)

        def read():
            for _ in lines:
                if over.is_set():
                    break
            answer.close()

        reader = threading.Thread(target=read)
        reader.start()
        if seconds is not None:
            threading.Timer(seconds, over.set).start()
        try:
            yield
        finally:
            over.set()
            reader.join()
    until(lambda: server.endpoints.engine.num_unfinished == 0)


def stalled(monkeypatch, engine, seconds):
    """The engine takes so long for a step."""
    run = engine.loop.runner.run

    def run_late(*args):
        time.sleep(seconds)
        return run(*args)

    monkeypatch.setattr(engine.loop.runner, "run", run_late)


@pytest.mark.parametrize(
    "path", slow.all_but(["/v1/messages", "/v1/chat/completions"], list(BODIES))
)
def test_a_stream_that_waits_sends_signs_and_then_its_answer(server, path):
    body = {"model": MODEL, "stream": True} | BODIES[path]
    with occupied(server, seconds=0.5):
        answer = httpx.post(server.url + path, json=body, timeout=60)
    text = answer.text
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    sign = "event: ping\ndata: {" if path == "/v1/messages" else ": "
    assert text.startswith(sign)
    assert text.count(sign) >= 2
    assert not re.search(r'"error":(?! ?null)|event: (error|response.failed)', text)


@pytest.mark.parametrize("path", slow.all_but(["/v1/messages"], list(BODIES)))
def test_who_waits_for_too_long_is_told_by_an_event(server, path):
    body = {"model": MODEL, "stream": True} | BODIES[path]
    with occupied(server):
        answer = httpx.post(server.url + path, json=body, timeout=60)
        whole = httpx.post(server.url + path, json=body | {"stream": False}, timeout=60)
    assert answer.status_code == 200
    assert "rate_limit_error" in answer.text or "queue_full" in answer.text
    assert "[DONE]" not in answer.text
    assert whole.status_code == 429  # nothing was sent before
    assert whole.headers["retry-after"] == "1"


def test_a_stream_that_starts_at_once_has_no_signs_and_its_own_status(server):
    body = {"model": MODEL, "stream": True} | BODIES["/v1/chat/completions"]
    text = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).text
    assert text.startswith("data: ")
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"n": 99})
    assert refused.status_code == 400


def test_a_long_step_in_the_middle_of_an_answer_has_signs(server, engine, monkeypatch):
    script(monkeypatch, engine, "ok")
    stalled(monkeypatch, engine, 0.3)
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = {"model": MODEL, "stream": True} | BODIES[path]
        text = httpx.post(server.url + path, json=body, timeout=60).text
        sign = "event: ping" if path == "/v1/messages" else "\n: "
        assert text.rindex(sign) > text.index("data: {")


@pytest.mark.slow
def test_the_clients_read_what_a_waiting_stream_sends(server):
    ask = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    claude = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
    with ask, claude:
        for wait in (0.3, None):
            calls = (
                lambda: list(
                    ask.chat.completions.create(model=MODEL, messages=HI, max_tokens=3, stream=True)
                ),
                lambda: list(
                    ask.completions.create(model=MODEL, prompt="a", max_tokens=3, stream=True)
                ),
                lambda: list(
                    ask.responses.create(model=MODEL, input="hi", max_output_tokens=3, stream=True)
                ),
                lambda: list(
                    claude.messages.create(model=MODEL, messages=HI, max_tokens=3, stream=True)
                ),
            )
            for number, call in enumerate(calls):
                with occupied(server, seconds=wait):
                    if wait is not None:
                        assert call()
                    elif number == 2:
                        assert [event.type for event in call()] == ["error", "response.failed"]
                    else:
                        with pytest.raises((openai.APIError, anthropic.APIError), match="slot"):
                            call()
