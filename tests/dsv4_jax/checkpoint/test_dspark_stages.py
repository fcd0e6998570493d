"""DSpark stages of a checkpoint: each tensor has its place, and is written back as it was."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint import convert_checkpoint
from helpers import slow
from helpers.checkpoints import problems_of, read_tensors, released_tensors
from helpers.dspark import (
    DRAFT,
    TRUNK,
    dspark_config,
    dspark_tensors,
    stage_table,
    write_checkpoint,
    write_dspark,
)
from helpers.released_configs import RELEASED
from pallas_kernels.common.weights import MXFP4, BlockFP8, Weight

pytestmark = pytest.mark.unoptimised

CONFIG = dataclasses.replace(TRUNK, dspark=DRAFT)
LAST = f"mtp.{DRAFT.num_stages - 1}."
ONCE = {
    "mtp.0.main_proj.weight": "main_proj",
    "mtp.0.main_norm.weight": "main_norm",
    f"{LAST}norm.weight": "norm",
    f"{LAST}hc_head_fn": "hc_head.fn",
    f"{LAST}hc_head_base": "hc_head.base",
    f"{LAST}hc_head_scale": "hc_head.scale",
    f"{LAST}markov_head.markov_w1.weight": "markov_w1",
    f"{LAST}markov_head.markov_w2.weight": "markov_w2",
    f"{LAST}confidence_head.proj.weight": "confidence",
}
STAGE = {
    "attn_norm.weight": "attn_norm",
    "ffn_norm.weight": "ffn_norm",
    "attn.attn_sink": "attn.attn_sink",
    **{
        f"attn.{leaf}.weight": f"attn.{leaf}"
        for leaf in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")
    },
    "ffn.gate.weight": "ffn.gate",
    "ffn.gate.bias": "ffn.bias",
    **{f"ffn.shared_experts.w{i}.weight": f"ffn.shared_w{i}" for i in (1, 2, 3)},
    **{f"hc_{sub}_{leaf}": f"hc_{sub}.{leaf}" for sub in ("attn", "ffn")
       for leaf in ("fn", "base", "scale")},
}  # fmt: skip


def load(folder, **options):
    return ds.load_checkpoint(folder, progress=False, **options)


def leaf_of(draft, name):
    """Where a tensor has to lie: a leaf of its own, or a part of one."""

    def attribute(tree, path):
        for part in path.split("."):
            tree = getattr(tree, part)
        return tree

    if name in ONCE:
        return np.asarray(attribute(draft, ONCE[name]))
    _, stage, rest = name.split(".", 2)
    if rest.startswith("ffn.experts."):
        expert, w = rest.split(".")[2:4]
        return np.asarray(getattr(draft.stages.ffn, w))[int(stage), int(expert)]
    return np.asarray(attribute(draft.stages, STAGE[rest]))[int(stage)]


def decoded(tensors, name):
    """f32 values of a stored tensor, by the description of its format."""
    array = tensors[name]
    scale = tensors.get(f"{name.removesuffix('.weight')}.scale")
    if scale is None:
        return array.astype(np.float32)
    scale = scale.astype(np.float32)
    if array.dtype != np.int8:
        scale = np.repeat(np.repeat(scale, 128, 0), 128, 1)
        return array.astype(np.float32) * scale[: array.shape[0], : array.shape[1]]
    pairs = array.view(np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(array.shape[0], -1)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7]
    signed = np.where(codes & 8, -magnitudes, magnitudes)
    return signed * np.repeat(scale, 32, 1)[:, : signed.shape[1]]


def test_every_tensor_has_its_place(tmp_path):
    """Decoded, each leaf holds what the files have by these names; nothing is in two places."""
    stored = dspark_tensors()
    folder = write_checkpoint(tmp_path, dspark_config(), released_tensors(TRUNK) | stored)
    config, params = load(folder, weights="float32")
    assert config == CONFIG
    table = stage_table(TRUNK, DRAFT)
    assert len(table) == len(ONCE) + 3 * (len(STAGE) + 3 * TRUNK.num_routed_experts)
    for name, (_, shape) in table.items():
        expected = decoded(stored, name)
        assert expected.shape == shape
        found = leaf_of(params.mtp, name)
        if name.endswith("confidence_head.proj.weight"):
            found = found[None]
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_quantised_stages_stay_as_they_are_stored(tmp_path):
    """Three stages in one leaf of the format that the files have, and small parts in f32."""
    stored = dspark_tensors()
    folder = write_checkpoint(tmp_path, dspark_config(), released_tensors(TRUNK) | stored)
    _, params = load(folder)
    draft = params.mtp
    assert isinstance(draft.main_proj, BlockFP8)
    assert isinstance(draft.stages.attn.wq_b, BlockFP8)
    assert isinstance(draft.stages.ffn.w1, MXFP4)
    np.testing.assert_array_equal(
        np.asarray(draft.main_proj.codes).view(np.uint8),
        stored["mtp.0.main_proj.weight"].view(np.uint8),
    )
    assert draft.num_stages == 3
    for leaf in (draft.hc_head.fn, draft.stages.hc_attn.base, draft.stages.attn.attn_sink):
        assert leaf.dtype == np.float32
    assert draft.stages.ffn.bias.dtype == np.float32
    assert draft.markov_w1.dtype == draft.confidence.dtype == ml_dtypes.bfloat16
    assert draft.confidence.shape == (TRUNK.hidden_size + DRAFT.markov_rank,)


@pytest.mark.parametrize("max_shard_bytes", [2**30, 100_000])
def test_what_is_saved_is_what_was_loaded(tmp_path, max_shard_bytes):
    """Names, dtypes, shapes and bytes of all tensors; the config announces the stages again."""
    folder = write_dspark(tmp_path / "x")
    config, params = load(folder)
    ds.save_checkpoint(config, params, tmp_path / "made", max_shard_bytes=max_shard_bytes)
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert len(files) == 1 or max_shard_bytes < 2**30
    assert read_tensors(*files) == read_tensors(folder / "model.safetensors")
    contents = json.loads((tmp_path / "made" / "config.json").read_text())
    told = dspark_config()
    names = [n for n in told if n.startswith(("dspark", "num_nextn", "compress_ratios"))]
    assert len(names) == 6
    assert {name: contents[name] for name in names} == {name: told[name] for name in names}
    assert load(tmp_path / "made")[0] == config


def test_a_conversion_of_a_release_has_its_bytes(tmp_path):
    folder = write_dspark(tmp_path / "x")
    convert_checkpoint(folder, tmp_path / "made", weights="stored", progress=False)
    stored = read_tensors(folder / "model.safetensors")
    assert read_tensors(tmp_path / "made" / "model.safetensors") == stored
    assert json.loads((tmp_path / "made" / "config.json").read_text()) == (
        json.loads((folder / "config.json").read_text())
        | {"dtype": "bfloat16", "expert_dtype": "fp4"}
        | {"quantization_config": RELEASED["quantization_config"]}
    )


@pytest.mark.slow
def test_stages_are_decoded_and_quantised_again(tmp_path):
    folder = write_dspark(tmp_path / "x")
    convert_checkpoint(folder, tmp_path / "made", weights="bfloat16", progress=False)
    made = read_tensors(tmp_path / "made" / "model.safetensors")
    assert {n for n in made if n.startswith("mtp.")} == set(stage_table(TRUNK, DRAFT))
    assert {kind for kind, _, _ in made.values()} == {"BF16", "F32", "I64"}
    config, params = load(tmp_path / "made")
    assert config == CONFIG
    _, whole = load(folder, weights="bfloat16")
    for name in stage_table(TRUNK, DRAFT):
        np.testing.assert_array_equal(leaf_of(params.mtp, name), leaf_of(whole.mtp, name))
    convert_checkpoint(tmp_path / "made", tmp_path / "again", weights="stored", progress=False)
    again = read_tensors(tmp_path / "again" / "model.safetensors")
    stored = read_tensors(folder / "model.safetensors")
    assert {n: entry[:2] for n, entry in again.items()} == {
        n: entry[:2] for n, entry in stored.items()
    }
    for name in (f"{LAST}hc_head_fn", f"{LAST}markov_head.markov_w2.weight"):
        assert again[name] == stored[name]


def test_a_conversion_without_the_draft_is_another_one(tmp_path):
    """What was begun with the draft does not go on without it."""
    folder = write_dspark(tmp_path / "x")
    made = tmp_path / "made"
    convert_checkpoint(folder, made, weights="stored", progress=False)
    with pytest.raises(ValueError, match="holds a model already"):
        convert_checkpoint(folder, made, weights="stored", progress=False, drafts=False)


@pytest.mark.parametrize("listed", [True, False])
def test_the_files_say_how_many_stages_there_are(tmp_path, listed):
    two = dataclasses.replace(DRAFT, num_stages=2)
    contents = dspark_config(draft=two)
    if not listed:
        contents["compress_ratios"] = contents["compress_ratios"][: TRUNK.num_layers]
        assert ds.DSV4Config.from_hf(contents).dspark.num_stages is None
    tensors = released_tensors(TRUNK) | dspark_tensors(draft=two)
    config, params = load(write_checkpoint(tmp_path, contents, tensors))
    assert config.dspark == two
    assert params.mtp.num_stages == 2


def test_dense_stages_load_too(tmp_path):
    """As tools that take quantisation away write them."""
    stored = released_tensors(TRUNK) | dspark_tensors()
    dense = {
        name: array if array.dtype == np.int64 else decoded(stored, name)
        for name, array in stored.items()
        if not name.endswith(".scale")
    }
    contents = dspark_config() | {"quantization_config": None, "expert_dtype": None}
    config, params = load(write_checkpoint(tmp_path, contents, dense), dtype="float32")
    assert config == CONFIG
    assert not any(isinstance(w, BlockFP8 | MXFP4) for w in _weights_of(params.mtp))
    for name in ("mtp.1.attn.wq_b.weight", "mtp.2.ffn.experts.3.w2.weight"):
        np.testing.assert_array_equal(leaf_of(params.mtp, name), dense[name])


def _weights_of(draft) -> list[Weight]:
    return [draft.main_proj, draft.stages.attn.wq_a, draft.stages.ffn.w1]


@pytest.mark.parametrize("name", [*ONCE, "mtp.1.ffn.shared_experts.w1.weight"])
def test_a_tensor_that_is_missing_is_named(tmp_path, name):
    """By a mark of the kind, or in the list of what does not fit."""
    tensors = released_tensors(TRUNK) | dspark_tensors()
    shape = stage_table(TRUNK, DRAFT)[name][1]
    for gone in (name, f"{name.removesuffix('.weight')}.scale"):
        tensors.pop(gone, None)
    folder = write_checkpoint(tmp_path, dspark_config(), tensors)
    if name == "mtp.0.main_proj.weight":
        with pytest.raises(ValueError, match=r"without mtp\.0\.main_proj\.weight"):
            load(folder)
        return
    assert problems_of(folder) == [f"missing: {name} {list(shape)}"]


ELSEWHERE = [
    "mtp.0.norm.weight",  # the last stage's alone
    "mtp.1.main_norm.weight",  # the first stage's alone
    "mtp.1.enorm.weight",
    "mtp.1.attn.compressor.norm.weight",
    "mtp.2.ffn.gate.tid2eid",
    "mtp.2.markov_head.markov_w3.weight",
    "mtp.2.confidence_head.proj.bias",
    "mtp.2.ffn.experts.8.w1.weight",
]


@pytest.mark.parametrize("name", slow.all_but(ELSEWHERE[:4], ELSEWHERE))
def test_a_tensor_that_has_no_place_is_refused(tmp_path, name):
    extra = {name: np.zeros(TRUNK.hidden_size, np.float32)}
    tensors = released_tensors(TRUNK) | dspark_tensors() | extra
    folder = write_checkpoint(tmp_path, dspark_config(), tensors)
    assert problems_of(folder) == [f"unexpected: {name} [{TRUNK.hidden_size}]"]
    assert load(folder, drafts=False)[0] == TRUNK


def test_a_wrong_size_is_refused(tmp_path):
    """A rank or a number of target layers that the files do not have."""
    changes = {"dspark_markov_rank": 8, "dspark_target_layer_ids": [2, 3]}
    assert problems_of(write_dspark(tmp_path, **changes)) == [
        "wrong shape: mtp.0.main_proj.weight must be [64, 128], is [64, 192]",
        f"wrong shape: {LAST}confidence_head.proj.weight must be [1, 72], is [1, 80]",
        f"wrong shape: {LAST}markov_head.markov_w1.weight must be [96, 8], is [96, 16]",
        f"wrong shape: {LAST}markov_head.markov_w2.weight must be [96, 8], is [96, 16]",
    ]


def test_stages_in_two_formats_are_decoded_or_refused(tmp_path):
    stored = released_tensors(TRUNK) | dspark_tensors()
    stored["mtp.1.attn.wkv.weight"] = decoded(stored, "mtp.1.attn.wkv.weight")
    del stored["mtp.1.attn.wkv.scale"]
    folder = write_checkpoint(tmp_path, dspark_config(), stored)
    (problem,) = problems_of(folder)
    assert problem.startswith(
        "mixed formats: layers of a kind must store mtp.stages.attn.wkv alike"
    )
    _, params = load(folder, weights="float32")
    np.testing.assert_array_equal(
        leaf_of(params.mtp, "mtp.1.attn.wkv.weight"), stored["mtp.1.attn.wkv.weight"]
    )


def test_damage_of_a_stage_is_found(tmp_path):
    stored = released_tensors(TRUNK) | dspark_tensors()
    for name in ("mtp.0.main_proj.scale", "mtp.2.ffn.experts.1.w3.scale"):
        stored[name].view(np.uint8)[0, 0] = 255
    stored[f"{LAST}hc_head_base"][1] = np.nan
    problems = problems_of(write_checkpoint(tmp_path, dspark_config(), stored))
    assert [problem.split(" has ")[0] for problem in problems] == [
        "damaged: scale of mtp.0.main_proj.weight",
        "damaged: scale of mtp.2.ffn.experts.1.w3.weight",
        f"not finite: {LAST}hc_head_base",
    ]
