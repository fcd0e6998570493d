"""A small model on a CPU has one program, which is compiled quickly; nothing else changes."""

import jax
import pytest

from dsv4_jax import cli
from dsv4_jax.cli import generate, quick_start, serve
from dsv4_jax.cli.arguments import chosen_fields
from dsv4_jax.serving.options import EngineOptions

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine without a GPU")


seen_batch_sizes = []


@pytest.fixture
def built(monkeypatch):
    """What an engine is asked for, whatever command asks."""
    seen = []
    seen_batch_sizes.clear()

    def build(args, folder, config, **fields):
        options = chosen_fields(args, EngineOptions) | fields
        seen.append((options.get("prefill_tokens"), options.get("decode_tokens")))
        seen_batch_sizes.append(options.get("decode_batch_sizes"))
        raise ValueError("enough")

    for module in (generate, serve):
        monkeypatch.setattr(module, "build_engine", build)
    return seen


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["generate", "shipped", "a"], ((16,), 16)),
        (["generate", "shipped", *"abcdefghijklmnopqrst"], ((20,), 20)),
        (["generate", "shipped", "a", "b", "c", "--drafts", "auto"], ((18,), 18)),
        (["generate", "shipped", "a", "--steps-per-call", "4"], (None, None)),
        (["generate", "shipped", "a", "--prefill-activations", "bfloat16"], (None, None)),
    ],
)
def test_steps_have_one_shape(built, words, sizes):
    assert cli.main(words) == 2
    assert built == [sizes]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ([], ((16,), 16)),
        (["--prefill-tokens", "32"], ([32], None)),
        (["--decode-batch-sizes", "2"], (None, None)),
        (["--max-requests", "24"], ((24,), 24)),
    ],
)
def test_a_server_compiles_one_step_too(built, words, sizes):
    args = cli.make_parser().parse_args(["serve", *words])
    with pytest.raises(ValueError, match="enough"):
        serve.build(args)
    assert built == [sizes]


def test_large_models_and_gpus_start_as_they_did(built, monkeypatch, tmp_path):
    assert quick_start.starts_quickly(None)
    assert quick_start.starts_quickly("shipped")
    assert not quick_start.starts_quickly("owner/model")
    assert not quick_start.starts_quickly(str(tmp_path / "no"))
    assert not quick_start.starts_quickly("https://huggingface.co/owner/model")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert quick_start.starts_quickly(str(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(2**26 + 1)
    assert not quick_start.starts_quickly(str(tmp_path))
    monkeypatch.setattr(quick_start, "has_gpu", lambda: True)
    assert not quick_start.starts_quickly("shipped")
    assert cli.main(["generate", "shipped", "a", "b"]) == 2
    assert built == [(None, None)]
    assert seen_batch_sizes == [(2,)]  # one program more is not worth its time there


def test_programs_are_compiled_with_fewer_passes(monkeypatch):
    """But for commands that time what they compile; what the user sets wins in `set_xla_flags`."""
    seen = []
    monkeypatch.setattr(cli, "prepare_jax", lambda **flags: seen.append(flags))
    for command in ("generate", "serve", "batch", "verify", "evaluate", "sweep"):
        monkeypatch.setattr(f"dsv4_jax.cli.{command}.run", lambda args: 0)
    assert cli.main(["generate", "shipped", "a"]) == 0
    assert cli.main(["evaluate"]) == 0
    assert cli.main(["batch", "in", "out"]) == 0
    assert seen == [quick_start.FLAGS] * 3
    assert cli.main(["sweep", "shipped", "none", "--out", "x.jsonl"]) == 0
    assert cli.main(["serve", "owner/model"]) == 0
    assert seen[3:] == [{}] * 2
