"""Options under the names that they had a release ago, and where a checkpoint stands."""

import re

import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint.find import find_checkpoint, may_be_checkpoint
from dsv4_jax.cli import generate, main, make_parser, sweep
from dsv4_jax.cli.old_names import settle_first


def parse(*words):
    args = make_parser().parse_args([str(word) for word in words])
    settle_first(args)
    return args


@pytest.mark.parametrize("command", [("generate", "shipped", "x"), ("serve",), ("plan", "flash")])
def test_sizes_of_a_mesh_have_names_of_their_own(command, capsys):
    """`--model` is what others call a checkpoint."""
    args = parse(*command, "--data-shards", 2, "--model-shards", 4)
    assert (args.data, args.model) == (2, 4)
    assert capsys.readouterr().err == ""
    args = parse(*command, "--data", 2, "--model=4")
    assert (args.data, args.model) == (2, 4)
    assert capsys.readouterr().err.splitlines() == [
        "[--data is now --data-shards; the old name goes with the next release]",
        "[--model is now --model-shards; the old name goes with the next release]",
    ]
    args = parse(*command)
    assert (args.data, args.model) == (None, None)
    told = "--model: must be a whole number .*; it is the old name of --model-shards, and a checkpo"
    with pytest.raises(ValueError, match=told):
        parse(*command, "--model", "deepseek-ai/DeepSeek-V4-Flash")


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        ("generate", {"prompt": ["a", "b"]}),
        ("sweep", {"ideas": ["none", "bf16"], "out": None}),
        ("verify", {}),
        ("evaluate", {}),
        ("serve", None),
        ("batch", {"requests": "in", "answers": "out"}),
    ],
)
def test_the_checkpoint_is_the_first_argument(command, rest, capsys):
    words = [word for value in (rest or {}).values() if value for word in value]
    words = ["in", "out"] if command == "batch" else words
    out = ["--out", "x.jsonl"] if command == "sweep" else []
    args = parse(command, "shipped", *words, *out)
    assert args.checkpoint == "shipped"
    mixed = parse(command, "shipped", *words[:1], *out, "--follow-links", *words[1:])
    assert mixed.follow_links
    assert {**vars(mixed), "follow_links": False} == vars(args)
    assert capsys.readouterr().err == ""
    if rest is None:
        return
    old = parse(command, *words, *out, "--checkpoint", "shipped")
    assert {name: vars(old)[name] for name in vars(args)} == vars(args)
    assert "[--checkpoint is now the first argument, CHECKPOINT; " in capsys.readouterr().err
    if command in ("verify", "evaluate"):
        with pytest.raises(ValueError, match="is given twice, 'a' and --checkpoint 'b'; leave"):
            parse(command, "a", "--checkpoint", "b")


def test_the_config_of_a_benchmark_is_its_first_argument(capsys):
    assert parse("bench", "decode", "flash", "--quick").config == "flash"
    assert parse("bench", "decode").config is None
    assert capsys.readouterr().err == ""
    assert parse("bench", "decode", "--config", "flash").config == "flash"
    assert "[--config is now the first argument, CONFIG; the old" in capsys.readouterr().err
    with pytest.raises(ValueError, match="the config is given twice, 'pro' and --config 'flash'"):
        parse("bench", "decode", "pro", "--config", "flash")


def test_prompts_and_ideas_without_a_checkpoint_are_still_taken(capsys, tmp_path):
    args = parse("generate", "The import statement", "and")
    generate._settle_prompts(args)
    assert (args.checkpoint, args.prompt) == (None, ["The import statement", "and"])
    told = r"\['The import statement' is no checkpoint that is here, so shipped .* shipped PROMPT\]"
    assert re.match(told, _said(capsys))
    for first in ("shipped", "owner/model", str(tmp_path), "./no", "https://huggingface.co/a/b"):
        args = parse("generate", first, "and")
        generate._settle_prompts(args)
        assert (args.checkpoint, args.prompt) == (first, ["and"])
    args = parse("generate", "and", "--checkpoint", "no")  # it was said to be one
    generate._settle_prompts(args)
    assert (args.checkpoint, args.prompt) == ("no", ["and"])
    assert _said(capsys).count("\n") == 1
    for first in ("none", "bf16", "module:name"):
        args = parse("sweep", first, "none", "--out", "x.jsonl")
        sweep._settle_ideas(args)
        assert (args.checkpoint, args.ideas) == (None, [first, "none"])
    with pytest.raises(ValueError, match="there must be an IDEA"):
        sweep._settle_ideas(parse("sweep", "shipped", "--out", "x.jsonl"))
    assert _said(capsys) == ""


def _said(capsys):
    return capsys.readouterr().err


def test_the_shipped_model_has_a_name(tmp_path, monkeypatch):
    assert find_checkpoint("shipped") == find_checkpoint() == ds.SHIPPED_CHECKPOINT
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shipped").mkdir()
    assert str(find_checkpoint("shipped")) == "shipped"
    assert not may_be_checkpoint("x" * 5000)


def test_without_a_command_there_is_help(capsys):
    for words, found in (((), "generate"), (("bench",), "kernels")):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        captured = capsys.readouterr()
        assert captured.out.startswith("usage: dsv4-jax")
        assert found in captured.out
        assert captured.err == ""
