"""What `dsv4-jax plan` says fits, `dsv4-jax serve` takes: one count, and a line that says how."""

import re
import shlex

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax import mesh
from dsv4_jax.bench.engine_bytes import engine_bytes
from dsv4_jax.cache.empty_cache import init_cache
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.cache.snapshots import init_snapshot_store
from dsv4_jax.checkpoint.find import SHIPPED, find_checkpoint
from dsv4_jax.cli import main, memory, presets
from dsv4_jax.cli.arguments import chosen_fields
from dsv4_jax.cli.engine_options import auto_drafts
from dsv4_jax.cli.parser import Parser
from dsv4_jax.cli.plan_serve import UNNAMED
from dsv4_jax.cli.serve import add_arguments
from dsv4_jax.model.params import param_shapes
from dsv4_jax.runtime import Memory
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.sizing import plan_engine
from helpers import slow

H200_BYTES = 141 * 10**9


def planned(capsys, *words):
    """What `plan` says, and the arguments of `serve` in its last line."""
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    *start, line = text.splitlines()[-1].partition("to serve it: ")
    program, command, *rest = shlex.split(line)
    assert (start, program, command) == (["", "to serve it: "], "dsv4-jax", "serve")
    parser = Parser("test")
    add_arguments(parser)
    return text, parser.parse_args(rest)


def engine_of(args, config):
    """The options of the engine that `serve` builds by these arguments, and the config it loads."""
    if args.drafts == "auto":
        args.draft_tokens, args.draft_cut = auto_drafts(config)
    data, model = args.data or 1, args.model or 1
    devices = np.array(jax.devices()[:1] * data * model).reshape(data, model)
    found = jax.sharding.Mesh(devices, mesh.AXES) if data * model > 1 else None
    options = EngineOptions(**chosen_fields(args, EngineOptions) | {"mesh": found})
    return options, config if args.draft_tokens else config.without_draft()


CASES = [
    ("flash", "--gpu h200x2 --context 128K"),
    ("flash", "--gpu h200x2 --context 128K --drafts off --prefill-tokens 64,256,8192"),
    ("flash", "--gpu h200x4 --model-shards 4 --context 16K"),
    ("flash-0731", "--gpu h200x2 --context 128K"),
    ("v41-flash", "--gpu h200x4 --context 128K"),
    ("v41-flash", "--gpu h200x4 --context 128K --drafts off --cache-format bf16"),
    ("pro", "--gpu h200x8 --model-shards 8 --split-cache --context 1M"),
    ("flash_slim", "--context 64K --weights bfloat16"),
]
FEW = [CASES[i] for i in (1, 3, 7)]


@pytest.mark.parametrize(("preset", "words"), slow.all_but(FEW, CASES))
def test_the_most_that_plan_names_is_the_most_that_serve_takes(capsys, monkeypatch, preset, words):
    """By the sums of `check_engine_memory` on a card of which nothing is in use."""
    text, args = planned(capsys, preset, *words.split())
    (most,) = re.findall(r"at most ([\d,]+) would fit", text)
    assert args.max_requests == int(most.replace(",", ""))
    config = presets.read_config(preset, drafts=args.drafts == "auto")
    options, config = engine_of(args, config)
    assert options.draft_tokens > 0 or "--drafts off" in words
    shapes = param_shapes(config, weights=args.weights)
    card = Memory("a card", H200_BYTES, H200_BYTES, is_host=False)
    monkeypatch.setattr(memory, "find_memory", lambda: card)
    monkeypatch.setattr(memory, "stored_bytes", lambda *_, **__: tree_bytes(shapes))
    monkeypatch.setattr(memory, "_has_codes", lambda *_, **__: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mesh, "_check_devices", lambda _: None)  # there is one, as often as needed
    loading = memory.Loading(None, "bfloat16", weights=args.weights, drafts=config.has_draft)
    memory.check_engine_memory(config, options, loading, way_out="less")
    more = options.changed(max_requests=options.max_requests + (args.data or 1))
    with pytest.raises(MemoryError, match=r"needs .* and a card has"):
        memory.check_engine_memory(config, more, loading, way_out="less")
    data, model = args.data or 1, args.model or 1
    counted = engine_bytes(config, options, data=data, model=model)
    plan = plan_engine(config, options, params=shapes, has_tokenizer=True)
    assert counted.pools == plan.pools
    assert counted.step_tokens == plan.step_sizes.all[-1]


@pytest.mark.parametrize("drafts", ["auto", "off"])
def test_a_plan_counts_the_arrays_of_an_engine(capsys, drafts):
    text, args = planned(capsys, SHIPPED, "--requests", "64", "--drafts", drafts)
    options, config = engine_of(args, ds.DSV4Config.from_hf(find_checkpoint(SHIPPED)))
    assert (options.max_requests, options.max_context_tokens) == (64, 4096)
    arrays = jax.eval_shape(lambda: init_cache(config, max_requests=64, max_context_tokens=4096))
    store = jax.eval_shape(
        lambda: init_snapshot_store(
            init_cache(config, max_requests=1, max_context_tokens=4096), 8 * 64
        )
    )
    mib = {"auto": "55.8", "off": "46.5"}[drafts]
    assert f"{(tree_bytes(arrays) + tree_bytes(store)) / 2**20:.1f}" == mib
    assert f"cache: {mib} MiB for 64 request(s) of 4,096 tokens" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "deepseek-ai/DeepSeek-V4-Flash --gpu h200x2 --requests 5 --context 8K --follow-links",
            "deepseek-ai/DeepSeek-V4-Flash --data-shards 2 --model-shards 1 --drafts auto "
            "--max-requests 6 --max-context-tokens 8192 --follow-links",
        ),
        (
            "tiny --requests 3 --context 2K --drafts off --cache-format bf16 --host-cache 64GiB "
            "--disk-cache-size 1000 --prefill-tokens 64,512",
            f"{UNNAMED} --drafts off --max-requests 3 --max-context-tokens 2048 "
            "--prefill-tokens 64,512 --cache-format bf16 --host-cache 64GiB --disk-cache DIR "
            "--disk-cache-size 1000",
        ),
        (
            "v41-flash --gpu h200x4 --model-shards 4 --requests 8 --context 8K",
            "deepseek-ai/DeepSeek-V4.1-Flash --data-shards 1 --model-shards 4 --drafts auto "
            "--max-requests 8 --max-context-tokens 8192",
        ),
    ],
)
def test_a_plan_ends_with_the_command_that_serves_it(capsys, words, line):
    text, _ = planned(capsys, *words.split())
    assert text.splitlines()[-1] == f"to serve it: dsv4-jax serve {line}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "v41-flash --gpu h200x4",
            "an engine of a model with Engram tables on more than one GPU, drafts on more than one",
        ),
        (
            "v41-flash --gpu h200x4 --drafts off",
            "an engine of a model with Engram tables on more than one GPU",
        ),
        ("flash --gpu h200x2", "drafts on more than one GPU, which --drafts off leaves out"),
        ("flash --gpu h200x2 --drafts off", None),
        ("tiny", None),
    ],
)
def test_a_plan_says_what_of_it_no_gpu_has_run(capsys, words, told):
    text, _ = planned(capsys, *words.split(), "--requests", "1", "--context", "1K")
    assert (told is None) == ("no GPU has run this yet" not in text)
    assert told is None or f"no GPU has run this yet: {told}" in text


def test_what_does_not_fit_is_not_served(capsys):
    assert main(["plan", "flash"]) == 1
    assert "to serve it" not in capsys.readouterr().out


def test_an_engine_may_have_as_many_requests_as_a_plan(capsys):
    """A small model would fit more often than an engine can have requests."""
    _, args = planned(capsys, "tiny", "--context", "128", "--prefill-tokens", "64,512")
    assert args.max_requests == 512  # the largest step holds a token of every request
    text, args = planned(capsys, "tiny", "--context", "128")
    assert args.max_requests == 2**16
    assert "at most 65,536 would fit" in text
    assert main(["plan", "tiny", "--requests", "65537"]) == 2
