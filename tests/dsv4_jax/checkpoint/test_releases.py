"""The tensor tables of the releases: how many there are, of what dtypes, and their bytes."""

import collections
import dataclasses

import pytest

from dsv4_jax.checkpoint.inventory import list_release, size_of
from dsv4_jax.checkpoint.left_out import find_left_out
from dsv4_jax.cli.presets import DSPARK, PRESETS
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DraftKind
from helpers.dspark import DRAFT, TRUNK, stage_table
from helpers.released_configs import FLASH_0731, FLASH_VISION

PUBLISHED = {
    "flash": (69_187, 159_609_485_896),
    "pro": (145_116, 864_704_792_696),
    "flash-0731": (72_317, 166_878_536_440),
    "pro-0813": (149_782, 892_727_580_904),
}
STAGES = {"flash-0731": (4_705, 10_862_838_300), "pro-0813": (7_009, 41_979_375_900)}


def table(preset):
    """All tensors of a release, by name."""
    entries = list(list_release(PRESETS[preset]()))
    assert len({entry.name for entry in entries}) == len(entries)
    return entries


def three_layers(config):
    """Its draft in full, behind a trunk of three layers, which is quick to list."""
    draft = dataclasses.replace(config.dspark, target_layers=(0, 1, 2))
    layers = {"layer_types": config.layer_types[:3], "router_types": config.router_types[:3]}
    return dataclasses.replace(config, dspark=draft, **layers)


@pytest.fixture(scope="module")
def flash_0731():
    return table("flash-0731")


@pytest.mark.parametrize(
    "preset",
    [
        "flash",
        "flash-0731",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("pro", "pro-0813")),
    ],
)
def test_the_published_counts_and_bytes(preset, request):
    entries = request.getfixturevalue("flash_0731") if preset == "flash-0731" else table(preset)
    assert size_of(entries) == PUBLISHED[preset]


@pytest.mark.parametrize("preset", STAGES)
def test_the_stages_of_a_draft(preset):
    config = three_layers(PRESETS[preset]())
    entries = [entry for entry in list_release(config) if entry.name.startswith("mtp.")]
    assert size_of(entries) == STAGES[preset]
    by_stage = collections.Counter(entry.name.split(".")[1] for entry in entries)
    if preset == "flash-0731":
        for stage, rest in enumerate((187_735_384, 137_392_472, 270_054_252)):
            of_stage = [e for e in entries if e.name.startswith(f"mtp.{stage}.")]
            routed = [e for e in of_stage if ".ffn.experts." in e.name]
            assert size_of(routed).num_bytes == 3_422_552_064
            assert size_of(of_stage).num_bytes == 3_422_552_064 + rest
        assert by_stage == {"0": 1568, "1": 1565, "2": 1572}
        dtypes = collections.Counter(entry.dtype.name for entry in entries)
        assert dtypes == {
            "int8": 2304,
            "float8_e8m0fnu": 2329,
            "float8_e4m3fn": 25,
            "bfloat16": 20,
            "float32": 27,
        }
    shapes = {entry.name: entry.shape for entry in entries}
    width = PRESETS[preset]().hidden_size
    assert shapes["mtp.0.main_proj.weight"] == (width, 3 * width)
    assert shapes["mtp.2.markov_head.markov_w1.weight"] == (129_280, DSPARK[preset].markov_rank)
    assert not any("tid2eid" in name or "compressor" in name for name in shapes)
    assert shapes["mtp.2.confidence_head.proj.weight"] == (1, width + config.dspark.markov_rank)
    table = stage_table(config, config.dspark)
    assert {n: s for n, s in shapes.items() if n in table and table[n][0] != "FP4"} == {
        name: shape for name, (form, shape) in table.items() if form != "FP4"
    }
    scaled = {name.removesuffix(".weight") for name, (form, _) in table.items() if "FP" in form}
    assert shapes.keys() == table.keys() | {f"{name}.scale" for name in scaled}


def test_stages_must_be_known():
    draft = dataclasses.replace(DRAFT, num_stages=None)
    with pytest.raises(ValueError, match=r"dspark\.num_stages must be known"):
        list(list_release(dataclasses.replace(TRUNK, dspark=draft)))


def test_what_is_left_out_of_the_releases(flash_0731):
    """Nothing of 0731; of Vision-Exp its 72,633 names less what belongs to images."""
    names = {entry.name for entry in flash_0731}
    config = DSV4Config.from_hf(FLASH_0731, drafts=False)
    assert not config.has_draft
    loaded, left_out = find_left_out(FLASH_0731, config, names)
    assert loaded == PRESETS["flash-0731"]()
    assert not left_out.names
    trunk, left_out = find_left_out(FLASH_0731, config, names, drafts=False)
    assert trunk == config
    assert (left_out.draft, left_out.stages) == (DraftKind.DSPARK, 3)
    assert len(left_out.draft_names) == 4_705
    assert not left_out.image_names
    assert left_out.describe("here") == ""

    blocks = ("attn.wo", "attn.wqkv", "mlp.w1", "mlp.w2", "norm1", "norm2")
    tower = {f"vision.blocks.{b}.{n}.weight" for b in range(32) for n in blocks}
    tower |= {f"vision.blocks.{b}.attn.{n}.bias" for b in range(32) for n in ("wo", "wqkv")}
    tower |= {
        "vision.norm.weight",
        "vision.patch_embed.proj.weight",
        "vision.patch_embed.proj.bias",
    }
    tower |= {f"aligner.{w}.{part}" for w in ("w1", "w2") for part in ("weight", "bias")}
    tower |= {f"image_{kind}" for kind in ("start", "end", "newline", "pad")}
    routing = {f"layers.{layer}.ffn.gate.bias_vl" for layer in range(43)}
    unused = {f"layers.{layer}.ffn.gate.bias" for layer in range(3)}
    stages = {f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(3)}
    vision = names | tower | routing | unused | stages
    assert len(vision) == 72_633
    loaded, left_out = find_left_out(FLASH_VISION, config, vision)
    assert loaded == PRESETS["flash-0731"]()
    assert left_out.image_names == tower | routing | unused | stages
    assert vision - left_out.names == names
    _, left_out = find_left_out(FLASH_VISION, config, vision, drafts=False)
    assert left_out.image_names == tower | routing | unused
    assert len(left_out.draft_names) == 4_708
    assert len(vision - left_out.names) == 72_317 - 4_705
    # A text model has no selection bias beside a table of experts: that is no part of images.
    _, left_out = find_left_out(FLASH_0731, config, names | routing | unused)
    assert not left_out.image_names
