"""`dsv4-jax serve`: options, and a process of its own that ends when it is told to."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import openai
import pytest

from dsv4_jax.cli import main
from dsv4_jax.serve.server import bind


def message_of(capsys, *arguments):
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "70000"], "--port"),
        (["--api-key", "a b"], "--api-key must be of printable ASCII"),
        (["--release", "tomorrow"], "--release"),
        (["--max-choices", "0"], "--max-choices"),
        (["--drain-timeout", "nan"], "--drain-timeout"),
        (["/nowhere", "--port", "0"], "/nowhere"),
    ],
)
def test_bad_options_are_named(capsys, arguments, told):
    assert told in message_of(capsys, *arguments)


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(capsys):
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        assert "in use" in message_of(capsys, "--port", str(taken.getsockname()[1]))


def test_without_its_libraries_the_server_says_what_to_install(capsys, monkeypatch):
    for name in list(sys.modules):
        if name == "dsv4_jax.serve" or name.startswith("dsv4_jax.serve."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    assert "pip install 'dsv4-jax[serve]'" in message_of(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_shipped_checkpoint_is_served_and_a_signal_under_load_ends_it(number):
    """The example of the README, then answers that run, one to its end and one not."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    sizes = ["--max-requests", "3", "--max-context-tokens", "512", "--prefill-tokens", "48"]
    sizes += ["--drain-timeout", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dsv4_jax", "serve", "--port", str(port), *sizes],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"DSV4_JAX_API_KEY": "sk-me"},
    )  # fmt: skip
    said = []
    ready = threading.Event()

    def listen():
        for line in process.stderr:
            said.append(line)
            if " answers at " in line:
                ready.set()
        ready.set()

    listener = threading.Thread(target=listen)
    listener.start()
    assert ready.wait(500)
    assert process.poll() is None, said
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sk-me", max_retries=0)
    asked = {"model": "shipped", "temperature": 0}
    done = client.completions.create(prompt="The import statement", max_tokens=20, **asked)
    assert len(done.choices[0].text) == 20
    with pytest.raises(openai.BadRequestError, match="not made for conversations"):
        client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **asked)
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = asked | {"prompt": "a", "stream": True, "ignore_eos": True}
    with (
        httpx.stream(
            "POST", url, json=body | {"max_tokens": 20}, timeout=60,
            headers={"authorization": "Bearer sk-me"},
        ) as short,
        httpx.stream(
            "POST", url, json=body | {"max_tokens": 500}, timeout=60,
            headers={"authorization": "Bearer sk-me"},
        ) as long,
    ):  # fmt: skip
        assert short.status_code == long.status_code == 200
        process.send_signal(number)
        assert short.read().endswith(b"data: [DONE]\n\n")
        ended = long.read()
        assert ended.endswith(b"data: [DONE]\n\n") or b'"error"' in ended
    assert process.wait(30) == 0
    listener.join()
    process.stderr.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))
    lines = [json.loads(line) for line in said if line.startswith("{")]
    assert [line["status"] for line in lines][:2] == [200, 400]
    assert "Traceback" not in "".join(said)
