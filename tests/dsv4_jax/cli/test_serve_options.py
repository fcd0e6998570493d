"""What `dsv4-jax serve` does if nothing is said is what its parts do by default."""

import inspect
import json

import pytest

from dsv4_jax.cli import batch, serve
from dsv4_jax.cli.parser import Parser
from dsv4_jax.rules import rules_of
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serving import AsyncEngine
from dsv4_jax.serving.requests.grammar_trials import GrammarBounds


def parsed(*words):
    parser = Parser("test")
    serve.add_arguments(parser)
    return parser.parse_args(words)


def test_defaults_are_those_of_the_settings():
    args = parsed()
    assert serve.answer_settings(args) == ServeSettings(model_name="shipped")
    own = ServeSettings
    assert (args.stall_timeout, args.drain_timeout) == (own.stall_timeout_s, own.drain_timeout_s)
    assert args.page == own.has_page
    assert args.max_waiting == inspect.signature(AsyncEngine).parameters["max_waiting"].default
    assert serve.answer_settings(args).grammar_bounds == GrammarBounds()


def test_options_reach_the_settings():
    words = (
        "--release=later", "--max-body-bytes=7", "--max-choices=2", "--max-tools=3",
        "--max-connections=4", "--max-held-bytes=65536", "--log-prompts", "--no-think",
        "--model-name=m",
    )  # fmt: skip
    found = serve.answer_settings(parsed(*words))
    assert found == ServeSettings(
        model_name="m", release="later", max_body_bytes=7, max_choices=2, max_tools=3,
        max_connections=4, max_held_bytes=65536, log_prompts=True, thinks=False,
    )  # fmt: skip
    assert len(rules_of(ServeSettings)) == 7


def test_python_is_refused_what_the_command_line_is():
    with pytest.raises(ValueError, match=r"argument --max-choices: must be .* from 1 to 128"):
        parsed("--max-choices", "129")
    with pytest.raises(ValueError, match="max_choices must be at most 128, got 129"):
        ServeSettings(model_name="m", max_choices=129)
    with pytest.raises(ValueError, match="release must be one of"):
        ServeSettings(model_name="m", release="last")


def test_a_context_beyond_the_models_is_refused_before_anything_is_loaded(monkeypatch):
    """The default is cut to what the model has; what was asked for is not."""
    given = []
    monkeypatch.setattr(serve, "build_engine", lambda *_, **fields: given.append(fields) or 1 / 0)
    for words in (("--max-context-tokens", "1M"), ("--max-context-tokens", "4097")):
        told = r"--max-context-tokens must be at most 4,096, the longest that shipped is meant for"
        with pytest.raises(ValueError, match=told):
            serve.build(parsed("shipped", *words))
    assert not given
    with pytest.raises(ZeroDivisionError):
        serve.build(parsed("shipped"))
    assert given[0]["max_context_tokens"] == 4096


@pytest.mark.parametrize(("words", "bound"), [((), 600_000), (("--max-step-ms", "40"), 40)])
def test_nobody_reads_a_batch_token_by_token(tmp_path, monkeypatch, words, bound):
    """So steps with prompts have the size that reads most, unless somebody says otherwise."""
    requests, built = tmp_path / "in.jsonl", []

    def build(args, *, one_shape):
        built.append((args.max_step_ms, one_shape))
        raise InterruptedError

    monkeypatch.setattr(batch, "build", build)
    body = {"model": "shipped", "prompt": "a", "max_tokens": 1}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    requests.write_text(json.dumps(line))
    parser = Parser("test")
    batch.add_arguments(parser)
    with pytest.raises(InterruptedError):
        batch.run(parser.parse_args([str(requests), str(tmp_path / "out.jsonl"), *words]))
    assert built == [(bound, False)]
