"""`dsv4-jax serve`: options, and a process of its own that ends when it is told to."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

import dsv4_jax
from dsv4_jax.cli import main
from dsv4_jax.cli.serve import tell_of_completions
from dsv4_jax.serve.server import bind
from helpers.clients import openai

pytestmark = pytest.mark.usefixtures("interrupts_arrive")


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
        port = str(taken.getsockname()[1])
        assert message_of(capsys, "--port", port).endswith(
            f"cannot listen at --host '127.0.0.1', --port {port}: Address already in use; another "
            "program has this port: choose another --port, or 0 for one that is free"
        )


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("nowhere.invalid", "(Name or service not known|Temporary failure in name resolution)"),
        ("192.0.2.1", "Cannot assign requested address"),
        ("a..b", ".*label empty or too long.*"),
        ("x" * 70, ".*label.* too long.*"),
        ("", "(Name or service not known|Temporary failure in name resolution)"),
        ("[::1]", "(Name or service not known|Temporary failure in name resolution)"),
        ("localhost:80", "(Name or service not known|Temporary failure in name resolution)"),
    ],
)
def test_a_host_that_is_not_this_machine_is_named(capsys, host, why):
    said = message_of(capsys, "--host", host, "--port", "0")
    start = re.escape(f"cannot listen at --host {host!r}, --port 0: ")
    assert re.search(rf"{start}{why}; --host must be an address of this machine or a name", said)


def test_a_port_of_privileged_users_is_named(capsys, monkeypatch):
    """Where root runs the tests, it may have them: so the kernel's answer stands in."""

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    said = message_of(capsys, "--port", "80")
    assert "--host '127.0.0.1', --port 80: Permission denied; low ports are for privileged" in said


def test_a_name_that_is_none_is_refused_before_anything_is_loaded(capsys):
    said = message_of(capsys, "--allowed-host", "a.lan", "--allowed-host", "http://b.lan:80")
    assert "--allowed-host must be a name or an address without a port" in said
    assert said.endswith("got 'http://b.lan:80'")


def test_without_its_libraries_the_server_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(dsv4_jax, "serve", dsv4_jax.serve)  # which is imported again
    for name in list(sys.modules):
        if name == "dsv4_jax.serve" or name.startswith("dsv4_jax.serve."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    assert "pip install 'dsv4-jax[serve]'" in message_of(capsys)


def test_a_model_that_only_completes_text_does_not_sound_like_a_fault():
    reason = "the checkpoint has no tokenizer"
    shipped = tell_of_completions("shipped", reason, is_shipped=True)
    assert shipped.startswith("shipped completes text, at /v1/completions; requests for a chat are")
    assert "Nothing is wrong" in shipped
    assert reason not in shipped
    assert tell_of_completions("mine", reason, is_shipped=False).endswith(f", since {reason}")


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


STARTS = """
import gc, os, signal, sys
from dsv4_jax import __main__, cli
from dsv4_jax.cli import serve

def interrupt(args):
    def callback(phase, info):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    gc.callbacks.append(callback)
    gc.collect()
    gc.callbacks.remove(callback)
    print("went on", file=sys.stderr)
    sys.exit(0)

serve.build = interrupt
sys.exit(cli.main(["serve", "--port", "0"]))
"""


@pytest.mark.slow
def test_an_interrupt_in_a_callback_of_the_collector_ends_a_start():
    done = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (130, "dsv4-jax serve: interrupted\n")


STALLS = """
import sys, time
from dsv4_jax import cli

def stall(*_, **__):
    print("stalls", file=sys.stderr, flush=True)
    time.sleep(60)

setattr(cli, sys.argv.pop(), stall)
sys.exit(cli.main(["serve", "--port", "0"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "said"),
    [("_module_of", "dsv4-jax: terminated\n"), ("prepare_jax", "dsv4-jax serve: terminated\n")],
)
def test_a_signal_before_the_command_runs_ends_it(stage, said):
    """While a command is imported, and while JAX is set up: SIGTERM has a line there too."""
    command = [sys.executable, "-c", STALLS, stage]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "stalls\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30) == (None, said)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_a_start_ends_it(number):
    """From the first imports to when it serves, each half as late again as the one before."""
    small = ["--max-requests", "1", "--max-context-tokens", "64", "--prefill-tokens", "16"]
    command = [sys.executable, "-m", "dsv4_jax", "serve", "--port", "0", *small, "--no-grammars"]
    delay_s, was_ready = 0.3, False
    while not was_ready:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            time.sleep(delay_s)
            assert process.poll() is None
            process.send_signal(number)
            sent_s = time.perf_counter()
            _, said = process.communicate(timeout=30)
        assert time.perf_counter() - sent_s < 3, (delay_s, said)
        was_ready = " answers at " in said and process.returncode == 0
        # Python itself ends by the signal before the package is there.
        early = (-number,) if delay_s < 1 else ()
        assert process.returncode in (*((0,) if was_ready else ()), 128 + number, *early), said
        if process.returncode == 128 + number:
            word = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
            assert said.splitlines()[-1] in (f"dsv4-jax: {word}", f"dsv4-jax serve: {word}")
        assert "Traceback" not in said or process.returncode == -number, said
        delay_s *= 1.5
