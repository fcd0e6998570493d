"""Checkpoints whose files do not fit, are damaged or are not there."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax import progress
from helpers.checkpoints import problems_of, write_tensors
from helpers.saved_checkpoint import (
    NUM_EXPERTS,
    SAVED,
    load,
    names_in_memory,
    released_names,
    saved_config,
    saved_tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.unoptimised


def test_all_problems_are_listed(tmp_path):
    tensors = released_names(saved_tensors())
    del tensors["layers.0.attn.wq_a.weight"], tensors["layers.2.ffn.experts.3.w2.weight"]
    tensors |= {
        "layers.1.attn.wkv.weight": np.zeros((16, 31), np.float32),
        "layers.1.ffn.experts.0.w1.weight": np.zeros((20, 32, 1), np.float32),
        "layers.3.attn_norm.weight": np.zeros(32, np.float32),
        "layers.0.attn.compressor.ape": np.zeros((4, 32), np.float32),
        "lm_head.weight": tensors["head.weight"],
        "layers.0.ffn.gate.tid2eid": np.zeros((64, 2), np.float32),
        "norm.weight": np.ones(32, np.int32),
    }
    folder = write_checkpoint(tmp_path / "x", tensors)
    assert problems_of(folder, dtype=jnp.float32) == [
        "missing: layers.0.attn.wq_a.weight [12, 32]",
        "missing: layers.2.ffn.experts.3.w2.weight [32, 20]",
        "twice: head.weight, as head.weight and lm_head.weight",
        "unexpected: layers.0.attn.compressor.ape [4, 32]",
        "unexpected: layers.3.attn_norm.weight [32]",
        "wrong dtype: layers.0.ffn.gate.tid2eid, which is float32",
        "wrong dtype: norm.weight, which is int32",
        "wrong shape: layers.1.attn.wkv.weight must be [16, 32], is [16, 31]",
        "wrong shape: layers.1.ffn.experts.0.w1.weight must be [20, 32], is [20, 32, 1]",
    ]


@pytest.mark.parametrize("shape", [(4, 38, 32), (3, 40, 32), (5, 40, 32), (40, 32), ()])
def test_fused_experts_of_a_wrong_shape(tmp_path, shape):
    tensors = names_in_memory(saved_tensors())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"gate_up_proj|layers\.1\.ffn\.experts\.3\.w1"):
        load(write_checkpoint(tmp_path / "x", tensors))


def test_one_tensor_in_two_files(tmp_path):
    folder = write_checkpoint(tmp_path / "x", saved_tensors())
    write_tensors(folder / "other.safetensors", {"head.weight": saved_tensors()["head.weight"]})
    with pytest.raises(ValueError, match=r"head\.weight, in model\.safetensors and other\."):
        load(folder)


def test_truncated_file(tmp_path):
    whole = (SAVED / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    folder = write_checkpoint(tmp_path / "x", {})
    file = folder / "model.safetensors"
    for size in [0, 4, 8, header // 2, header - 1, header, header + 1, len(whole) // 2]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
            load(folder)
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"of {len(whole) - 1:,}$"):
        load(folder)
    file.write_bytes(whole)
    load(folder)


@pytest.mark.parametrize(
    "content",
    [
        (4).to_bytes(8, "little") + b"{{{{",
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        (4).to_bytes(8, "little") + b"1234",
    ],
)
def test_no_safetensors_file(tmp_path, content):
    folder = write_checkpoint(tmp_path / "x", {})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is.* no safetensors file"):
        load(folder)


def test_shape_and_bytes_disagree(tmp_path):
    folder = write_checkpoint(tmp_path / "x", {"norm.weight": np.zeros(32, np.float32)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape": [32]', b'"shape": [31]'))
    with pytest.raises(ValueError, match=r"damaged: norm\.weight"):
        load(folder)


def test_stored_dtype_that_is_unknown(tmp_path):
    tensors = saved_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* has dtype F64"):
        load(write_checkpoint(tmp_path / "x", tensors))


@pytest.mark.parametrize("expert", [-1, NUM_EXPERTS])
def test_hash_table_that_names_no_expert(tmp_path, expert):
    tensors = saved_tensors()
    tensors["model.layers.0.ffn.gate.tid2eid"][17, 1] = expert
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.gate\.tid2eid must hold experts 0\.\.3"):
        load(write_checkpoint(tmp_path / "x", tensors))


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    write_tensors(tmp_path / "model.safetensors", saved_tensors())
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"pass one that holds a config\.json"):
        load(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(saved_config()))
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        load(tmp_path)


def test_progress_is_on_stderr_and_can_be_off(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0)  # else a short work shows nothing
    ds.load_checkpoint(SAVED, dtype=jnp.float32)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "loading" in shown.err
    ds.load_checkpoint(SAVED, dtype=jnp.float32, progress=False)
    assert capsys.readouterr() == ("", "")
