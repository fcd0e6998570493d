"""The programs of examples/ run, on one layer of random weights and, slow, on what ships."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

import dsv4_jax as ds
from helpers.checkpoints import save_first_layer
from helpers.clients import openai
from helpers.serve import running, small_engine

pytestmark = pytest.mark.unoptimised

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def load(name):
    """An example as a module, which imports nothing of the repository but the packages."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(
    scope="module", params=["one layer", pytest.param("shipped", marks=pytest.mark.slow)]
)
def checkpoint(request, tmp_path_factory):
    if request.param == "shipped":
        return str(ds.SHIPPED_CHECKPOINT)
    folder = tmp_path_factory.mktemp("one_layer")
    save_first_layer(folder)
    return str(folder)


def test_there_is_a_test_of_each_and_the_page_lists_them():
    here = pathlib.Path(__file__).read_text()
    listed = (ROOT / "examples" / "README.md").read_text()
    assert len(EXAMPLES) == 6
    for path in EXAMPLES:
        assert path.stem in here
        assert f"[{path.name}]({path.name})" in listed


@pytest.mark.slow
def test_a_decode_loop(checkpoint, capsys):
    texts = load("decode_loop").main(["--checkpoint", checkpoint, "--tokens", "4"])
    assert len(texts) == 2
    assert all(texts)
    assert capsys.readouterr().out.count(" -> ") == 2


@pytest.mark.slow
def test_the_loop_draws_what_an_engine_draws():
    """In float32 rounding decides nothing; the example's prompts are of one prefill."""
    texts = load("decode_loop").main(["--tokens", "12"])
    engine = ds.Engine.from_checkpoint(ds.SHIPPED_CHECKPOINT, max_requests=2, progress=False)
    done = engine.generate(load("decode_loop").PROMPTS, max_new_tokens=12)
    assert [one.text[:4] for one in done] == [text[:4] for text in texts]


@pytest.mark.slow
def test_a_server_in_an_application(checkpoint):
    app = load("server_in_your_app").build_app(checkpoint, max_requests=2, max_context_tokens=256)
    with TestClient(app) as client:
        asked = {"prompt": "A for loop", "max_new_tokens": 8}
        answer = client.post("/complete", json=asked)
        assert (answer.status_code, bool(answer.text)) == (200, True)
        assert client.post("/complete", json=asked).text == answer.text
        wrong = client.post("/complete", json=asked | {"temperature": -1})
        assert wrong.status_code == 400
        assert "temperature" in wrong.json()["error"]
        assert client.post("/complete", json={}).status_code == 400
        assert client.get("/state").json()["counters"]["prompt_tokens"] > 0


@pytest.mark.slow
def test_a_file_of_prompts(checkpoint, tmp_path):
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("A for loop\n\nThe import statement\nA for loop\n")
    sizes = ["--checkpoint", checkpoint, "--max-new-tokens", "6", "--max-requests", "2"]
    assert load("batch").main([str(prompts), str(answers), *sizes]) == 3
    lines = sorted(map(json.loads, answers.read_text().splitlines()), key=lambda one: one["number"])
    assert [line["number"] for line in lines] == [0, 1, 2]
    assert lines[0]["text"] == lines[2]["text"] != lines[1]["text"]


@pytest.mark.slow
def test_a_conversation_with_tools(capsys):
    """One layer of random weights: what it calls is up to chance, and its form is not."""
    example = load("chat_with_tools")
    with (
        running(small_engine()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client,
    ):
        # One call ends the message; several would go on to its last token.
        messages = example.chat(
            client, next(iter(client.models.list())).id, "What is 17 times 23?",
            first_choice="required", max_rounds=1, max_tokens=400, parallel_tool_calls=False,
        )  # fmt: skip
    roles = [message["role"] for message in messages]
    assert roles[:3] == ["user", "assistant", "tool"]
    (call, *_) = messages[1]["tool_calls"]
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    assert messages[2]["content"] == str(example.FUNCTIONS[name](**arguments))
    assert f"{name}(" in capsys.readouterr().out


@pytest.mark.slow
def test_a_client_of_tools_without_a_server_says_so(capsys):
    """In one line; port 9 of this machine has none."""
    example = load("chat_with_tools")
    with pytest.raises(SystemExit) as ended:
        example.main(["a question", "--base-url", "http://127.0.0.1:9/v1"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "no server at http://127.0.0.1:9/v1; start one, or pass --base-url\n"
    )


@pytest.mark.slow
def test_a_mesh(tmp_path):
    """In a process of its own, which has as many devices as it asks for."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [
        sys.executable,
        ROOT / "examples" / "on_a_mesh.py",
        "--data-shards",
        "2",
        "--tokens",
        "6",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 x 1 of cpu\n")
    assert done.stdout.count(" -> ") == 4


@pytest.mark.slow
def test_a_chat_without_a_gpu(tmp_path, capsys):
    """The copy of the shipped model calls a tool by its schema, and takes the result."""
    folder = load("chat_checkpoint").main([str(tmp_path / "chat_model")])
    assert capsys.readouterr().out == f".venv/bin/dsv4-jax serve {folder} --no-think\n"
    config, params = ds.load_checkpoint(folder, progress=False)
    before, shipped = ds.load_checkpoint(ds.SHIPPED_CHECKPOINT, drafts=False, progress=False)
    assert config == dataclasses.replace(before, vocab_size=config.vocab_size)
    assert (params.embed[:258] == shipped.embed).all()
    assert (params.head[:258] == shipped.head).all()
    engine = ds.Engine.from_checkpoint(
        folder, max_requests=1, max_context_tokens=4096, prefill_tokens=(64,), progress=False,
    )  # fmt: skip
    example = load("chat_with_tools")
    with (
        running(engine, model_name="chat_model", thinks=False) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client,
    ):
        messages = example.chat(
            client, "chat_model", "What is 17 times 23?", first_choice="required", max_rounds=2,
            max_tokens=300, temperature=0, parallel_tool_calls=False,
        )  # fmt: skip
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = messages[1]["tool_calls"]
    assert messages[2]["content"] == str(
        example.FUNCTIONS[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
    )
    assert messages[3]["content"]
