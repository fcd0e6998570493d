"""The files of DeepSeek-V4.1: the release's table of tensors, and small ones read and written."""

import collections
import dataclasses
import warnings

import jax
import ml_dtypes
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint import convert_checkpoint, engram_tables
from dsv4_jax.checkpoint.inventory import V41_IMAGES, list_release, read_inventory, size_of
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.read_json import read_contents
from dsv4_jax.runtime import Memory
from helpers import v41
from helpers.checkpoints import problems_of, read_tensors, write_tensors
from pallas_kernels.common.weights import MXFP4, BlockFP8

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


@pytest.fixture(scope="module")
def release():
    return list(list_release(DSV4Config.v41_flash()))


def test_the_published_counts_and_bytes(release):
    """deepseek_v41.md section 3."""
    found = size_of(release)
    assert found.tensors == 95_819
    assert found.tensors + V41_IMAGES.tensors == 96_085
    assert found.num_bytes + V41_IMAGES.num_bytes == 510_286_023_000
    draft = [entry for entry in release if entry.name.startswith("mtp.")]
    assert (len(release) - len(draft), len(draft)) == (93_418, 2_401)
    by_kind = collections.Counter()
    for entry in release:
        is_draft, is_expert = entry.name.startswith("mtp."), ".experts." in entry.name
        kind = "experts" if is_expert else entry.dtype.name
        if ".engram.embed." in entry.name:
            kind = "tables"
        elif entry.name.endswith(".scale") and not is_expert:
            kind = "float8_e4m3fn"
        by_kind[f"draft {kind}" if is_draft and is_expert else kind] += entry.num_bytes
    assert by_kind == {
        "experts": 288_777_830_400,
        "tables": 202_758_032_400,
        "draft experts": 7_219_445_760,
        "float8_e4m3fn": 7_408_601_600,
        "bfloat16": 2_982_346_752,
        "float32": 169_229_128,
    }


def test_names_dtypes_and_shapes_of_the_release(release):
    found = {entry.name: (entry.dtype.name, entry.shape) for entry in release}
    fp8, scale, bf16, f32 = "float8_e4m3fn", "float8_e8m0fnu", "bfloat16", "float32"
    wanted = {
        "embed.weight": (bf16, (129280, 5120)),
        "norm.weight": (bf16, (5120,)),
        "layers.0.hc_attn_fn": (f32, (24, 20480)),
        "layers.0.hc_ffn_scale": (f32, (3,)),
        "layers.0.attn.wq_a.weight": (fp8, (1280, 5120)),
        "layers.0.attn.wq_a.scale": (scale, (40, 160)),
        "layers.0.attn.wq_b.scale": (scale, (1024, 40)),
        "layers.0.attn.wkv.scale": (scale, (16, 160)),
        "layers.0.attn.wo_a.weight": (fp8, (8192, 4096)),
        "layers.0.attn.wo_b.scale": (scale, (160, 256)),
        "layers.2.attn.compressor.wkv.weight": (bf16, (512, 5120)),
        "layers.14.attn.compressor.wgate.weight": (bf16, (512, 5120)),
        "layers.20.attn.compressor.norm.weight": (bf16, (512,)),
        "layers.20.attn.indexer.wk.weight": (bf16, (128, 512)),
        "layers.8.attn.indexer.k_norm.weight": (bf16, (128,)),
        "layers.36.attn.indexer.wq_b.weight": (fp8, (4096, 1280)),
        "layers.36.attn.indexer.wq_b.scale": (scale, (128, 40)),
        "layers.36.attn.indexer.weights_proj.weight": (bf16, (32, 5120)),
        "layers.39.ffn.gate.weight": (bf16, (384, 5120)),
        "layers.39.ffn.gate.bias": (f32, (384,)),
        "layers.39.ffn.gate.bias_vl": (f32, (384,)),
        "layers.39.ffn.experts.383.w1.weight": ("int8", (2304, 2560)),
        "layers.39.ffn.experts.383.w2.scale": (scale, (5120, 72)),
        "layers.39.ffn.shared_experts.w1.scale": (scale, (72, 160)),
        "layers.1.engram.embed.weight": (fp8, (384006168, 256)),
        "layers.14.engram.embed.scale": (scale, (384016682, 8)),
        "layers.14.engram.wkv.weight": (fp8, (25600, 6144)),
        "layers.14.engram.wkv.scale": (scale, (800, 192)),
        "layers.1.engram.q_weight": (bf16, (4, 5120)),
        "mtp.0.main_proj.weight": (fp8, (5120, 15360)),
        "mtp.0.main_proj.scale": (scale, (160, 480)),
        "mtp.1.ffn.experts.127.w3.weight": ("int8", (2304, 2560)),
        "mtp.2.norm.weight": (bf16, (5120,)),
        "mtp.2.markov_head.embed.weight": (bf16, (129280, 256)),
        "mtp.2.markov_head.head.weight": (bf16, (129280, 256)),
        "mtp.2.confidence_head.proj.weight": (bf16, (1, 5376)),
    }
    assert {name: found[name] for name in wanted} == wanted
    absent = (
        "hc_head_fn", "mtp.2.hc_head_fn", "layers.2.attn.compressor.ape",
        "layers.20.attn.compressor.wgate.weight", "layers.3.attn.compressor.wkv.weight",
        "layers.24.attn.indexer.wk.weight", "layers.21.attn.indexer.wq_b.weight",
        "layers.0.ffn.gate.tid2eid", "mtp.0.attn.compressor.wkv.weight",
        "mtp.0.ffn.experts.128.w1.weight", "layers.2.attn.indexer.compressor.wkv.weight",
    )  # fmt: skip
    assert not found.keys() & set(absent)


def decode(tensors, name):
    """A tensor's values, by the description of the formats."""
    values, scale = tensors[name], tensors.get(name.replace(".weight", ".scale"))
    if scale is None or not name.endswith(".weight"):
        return values.astype(np.float64)
    scale = scale.astype(np.float64)
    if values.dtype == np.int8:
        pairs = values.view(np.uint8)
        values = E2M1[np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), -1)]
    rows = 1 if len(scale) == len(values) else 32
    scale = np.repeat(np.repeat(scale, rows, 0)[: len(values)], 32, 1)
    return values.astype(np.float64) * scale[:, : values.shape[1]]


# Sizes that 32 does not divide, of outputs and inputs, and in which 128 would find fewer blocks.
ODD = {
    "hidden_size": 72,
    "q_lora_rank": 40,
    "moe_intermediate_size": 36,
    "o_lora_rank": 20,
    "o_groups": 4,
}


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.slow), ODD])
def test_stored_weights_are_loaded_saved_and_converted_bit_for_bit(tmp_path, changes):
    folder, tensors = v41.write_released(tmp_path / "released", **changes)
    config, params = ds.load_checkpoint(folder, progress=False)
    assert config == DSV4Config.from_hf(folder)
    wq_b = params.layers["swa_learned"].attn.wq_b
    assert isinstance(wq_b, BlockFP8)
    assert (wq_b.block, wq_b.row_group) == (32, 32)
    np.testing.assert_array_equal(
        np.asarray(wq_b.decode()[0], np.float64), decode(tensors, "layers.0.attn.wq_b.weight")
    )
    experts = params.layers["swa_learned"].ffn.w1
    assert isinstance(experts, MXFP4)
    assert experts.row_group == 32
    rows = np.array([0, 5, config.engram.table_rows[1] - 1])
    np.testing.assert_array_equal(
        params.engram.tables[1].read(rows), decode(tensors, "layers.4.engram.embed.weight")[rows]
    )
    ds.save_checkpoint(config, params, tmp_path / "saved")
    convert_checkpoint(folder, tmp_path / "converted", weights="stored", progress=False)
    wanted = read_tensors(folder / "model.safetensors")
    for name in ("saved", "converted"):
        assert read_tensors(tmp_path / name / "model.safetensors") == wanted
        assert DSV4Config.from_hf(tmp_path / name) == config
        said = read_contents(tmp_path / name)[1]["quantization_config"]
        assert (said["weight_block_size"], said["expert_dtype"]) == ([32, 32], "fp4")
        again = ds.load_checkpoint(tmp_path / name, progress=False)[1]
        assert again.engram.tokenizer_json == params.engram.tokenizer_json
        same_tables = dataclasses.replace(params, engram=again.engram)
        jax.tree.map(np.testing.assert_array_equal, again, same_tables)


@pytest.mark.slow
def test_decoded_weights_are_those_of_the_formats(tmp_path):
    folder, tensors = v41.write_released(tmp_path / "released")
    _, params = ds.load_checkpoint(folder, weights="float32", progress=False)
    layer = params.layers["csa2_makes_selects_engram_learned"]
    for leaf, name in (
        (layer.attn.wo_a, "attn.wo_a"),
        (layer.engram.wkv, "engram.wkv"),
        (layer.attn.indexer.wq_b, "attn.indexer.wq_b"),
        (layer.ffn.w2[:, 3], "ffn.experts.3.w2"),
    ):
        np.testing.assert_array_equal(
            np.asarray(leaf[0], np.float64), decode(tensors, f"layers.4.{name}.weight")
        )
    convert_checkpoint(folder, tmp_path / "dense", weights="bfloat16", progress=False)
    config, dense = ds.load_checkpoint(tmp_path / "dense", progress=False)
    assert "quantization_config" not in read_contents(tmp_path / "dense")[1]
    assert dense.engram.tables[0].values.dtype == ml_dtypes.bfloat16
    rows = np.arange(9)
    np.testing.assert_array_equal(
        dense.engram.tables[0].read(rows), decode(tensors, "layers.1.engram.embed.weight")[rows]
    )
    convert_checkpoint(tmp_path / "dense", tmp_path / "back", weights="stored", progress=False)
    back = ds.load_checkpoint(tmp_path / "back", progress=False)[1]
    np.testing.assert_array_equal(
        back.engram.tables[0].read(rows), dense.engram.tables[0].read(rows)
    )
    ds.save_checkpoint(config, dense, tmp_path / "saved")
    assert ds.load_checkpoint(tmp_path / "saved", progress=False)[0] == config


def test_what_belongs_to_images_is_left_out_in_one_line(tmp_path):
    folder, tensors = v41.write_released(tmp_path, images=True)
    with pytest.warns(ds.checkpoint.LeftOutWarning) as caught:
        ds.load_checkpoint(folder, progress=False)
    assert [str(warning.message) for warning in caught] == [
        f"{folder}: what belongs to images (aligner, gate.bias_vl, image, vision) is left out; the "
        "text model is loaded"
    ]
    inventory = read_inventory(folder)
    extra = [n for n in tensors if n.endswith("bias_vl") or n.startswith(("vis", "ali", "image"))]
    assert inventory.left_out.image_names == set(extra)


def rewritten(folder, tensors, **changes):
    kept = {name: array for name, array in tensors.items() if changes.get(name, 1) is not None}
    kept |= {name: array for name, array in changes.items() if array is not None}
    write_tensors(folder / "model.safetensors", kept)
    return folder


def test_scales_of_other_blocks_and_tables_that_do_not_fit_are_refused(tmp_path):
    folder, tensors = v41.write_released(tmp_path)
    table, scale = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"
    per_block = tensors[scale][::32]  # as of a weight, a scale for 32 rows
    rewritten(
        folder,
        tensors,
        **{
            "layers.0.attn.wq_b.scale": tensors["layers.0.attn.wq_b.scale"][:1],
            scale: per_block,
            "layers.4.engram.embed.weight": tensors["layers.4.engram.embed.weight"][:-1],
        },
    )
    rows = len(tensors[table])
    other = len(tensors["layers.4.engram.embed.weight"])
    assert problems_of(folder) == [
        f"wrong shape: layers.4.engram.embed.weight must be [{other}, 32], is [{other - 1}, 32]",
        "wrong shape: scale of layers.0.attn.wq_b.weight must be [4, 1], is [1, 1]",
        f"wrong shape: scale of {table} must be [{rows}, 1], is [{len(per_block)}, 1]",
    ]
    rewritten(folder, tensors, **{table: None, scale: None})
    assert problems_of(folder) == [f"missing: {table} [{rows}, 32]"]
    rewritten(folder, tensors, **{scale: None})
    assert problems_of(folder) == [f"missing: scale of {table}, which is float8_e4m3fn"]
    rewritten(folder, tensors, **{table: np.zeros((rows, 32), np.int32), scale: None})
    assert problems_of(folder) == [f"wrong dtype: {table}, which is int32"]


@pytest.mark.slow
def test_tables_need_the_tokenizer_of_the_model(tmp_path):
    folder, _ = v41.write_released(tmp_path)
    (folder / "tokenizer.json").write_text(v41.tokenizer_json(120))
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*=124 normalised ids, got \d+; take"):
        ds.load_checkpoint(folder, progress=False)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a tokenizer's"):
        ds.load_checkpoint(folder, progress=False)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, by whose texts"):
        ds.load_checkpoint(folder, progress=False)


def test_parameters_without_their_tables_are_not_saved(tmp_path):
    folder, _ = v41.write_released(tmp_path / "released")
    config, params = ds.load_checkpoint(folder, progress=False)
    with pytest.raises(ValueError, match=r"params\.engram must be the Engram tables of config"):
        ds.save_checkpoint(config, dataclasses.replace(params, engram=None), tmp_path / "saved")


@pytest.mark.slow
def test_a_model_without_tables_needs_no_tokenizer(tmp_path):
    folder, _ = v41.write_released(tmp_path, engram_layer_ids=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config, params = ds.load_checkpoint(folder, progress=False)
    assert params.engram is None
    assert config.dspark.num_stages == 2
    assert ds.load_checkpoint(folder, progress=False, drafts=False)[1].mtp is None


def test_missing_memory_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    """Codes and scales of both tables count, and where they just fit nothing is said."""
    folder, _ = v41.write_released(tmp_path / "model")
    needed = sum(entry.num_bytes for entry in engram_tables.list_tables(DSV4Config.from_hf(folder)))

    def free(num_bytes):
        memory = Memory("this machine", num_bytes, 2**30)
        monkeypatch.setattr(engram_tables, "host_memory", lambda: memory)

    def load(*args):
        raise InterruptedError

    monkeypatch.setattr("dsv4_jax.checkpoint.load._stack_opener", load)
    wanted = pytest.warns(engram_tables.HostMemoryWarning, match=r"has 0\.0 GiB of 1\.0 free: rows")
    free(needed - 1)
    with wanted, pytest.raises(InterruptedError):
        ds.load_checkpoint(folder, progress=False)
    free(needed)  # a warning would be an error
    with pytest.raises(InterruptedError):
        ds.load_checkpoint(folder, progress=False)
    monkeypatch.setattr(engram_tables, "host_memory", lambda: None)
    with pytest.raises(InterruptedError):
        ds.load_checkpoint(folder, progress=False)
