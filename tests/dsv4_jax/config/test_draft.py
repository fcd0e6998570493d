"""Which draft a config announces, and what is refused of one with DSpark stages."""

import dataclasses
import json

import pytest

from dsv4_jax.cli.presets import DSPARK, PRESETS
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DraftKind, draft_kind, read_dspark, without_draft
from dsv4_jax.config.write_json import write_config
from helpers.dspark import DRAFT, TRUNK
from helpers.released_configs import (
    DELETE,
    FLASH,
    FLASH_0731,
    HEAVY,
    PRO_0813,
    SPARSE,
    WINDOW,
    edited,
)

DSPARK_FIELDS = (
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
)


@pytest.mark.parametrize(
    ("contents", "preset"), [(FLASH_0731, "flash-0731"), (PRO_0813, "pro-0813")]
)
def test_the_released_configs_are_the_presets(contents, preset):
    assert len(contents) == 48
    assert contents["num_nextn_predict_layers"] == 1
    assert DSV4Config.from_hf(contents) == PRESETS[preset]()
    assert PRESETS[preset]().num_mtp_layers == 0
    assert read_dspark(contents) == DSPARK[preset]
    assert draft_kind(contents) == DraftKind.DSPARK


def test_other_drafts_are_no_dspark():
    assert draft_kind(FLASH) == DraftKind.MTP
    assert draft_kind(FLASH | {"num_nextn_predict_layers": 0}) is None
    assert draft_kind(FLASH | {"num_nextn_predict_layers": 3}) is None
    assert read_dspark(FLASH) is None
    nothing = dict.fromkeys(DSPARK_FIELDS)
    assert draft_kind(FLASH | nothing) == DraftKind.MTP
    assert DSV4Config.from_hf(FLASH | nothing) == DSV4Config.flash()


@pytest.mark.parametrize("field", DSPARK_FIELDS)
@pytest.mark.parametrize("value", [DELETE, None])
def test_a_missing_field_is_named(field, value):
    contents = edited(FLASH_0731, **{field: value})
    with pytest.raises(ValueError, match=f"^{field} is missing beside dspark_"):
        read_dspark(contents)
    with pytest.raises(ValueError, match=rf"^config\.json: {field} is missing beside dspark_"):
        DSV4Config.from_hf(contents)
    assert DSV4Config.from_hf(contents, drafts=False) == DSV4Config.flash().without_draft()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dspark_block_size", 0),
        ("dspark_block_size", 17),
        ("dspark_block_size", "5"),
        ("dspark_markov_rank", 0),
        ("dspark_markov_rank", 4097),
        ("dspark_noise_token_id", -1),
        ("dspark_noise_token_id", 129_280),
        ("dspark_target_layer_ids", []),
        ("dspark_target_layer_ids", [42, 41, 40]),
        ("dspark_target_layer_ids", [40, 40, 41]),
        ("dspark_target_layer_ids", [40, 41, 43]),
        ("dspark_target_layer_ids", [40, 41, 90]),
        ("dspark_target_layer_ids", 42),
        ("n_mtp_layers", 2),
        ("num_nextn_predict_layers", 2),
        ("compress_ratios", [*FLASH_0731["compress_ratios"][:43], 0, 4, 0]),
    ],
)
def test_a_wrong_value_is_named(field, value):
    contents = FLASH_0731 | {field: value}
    with pytest.raises(ValueError, match=field):
        read_dspark(contents)
    with pytest.raises(ValueError, match=field):
        DSV4Config.from_hf(contents)
    assert DSV4Config.from_hf(contents, drafts=False) == DSV4Config.flash().without_draft()


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, 3),
        ({"num_nextn_predict_layers": 0}, 3),
        ({"num_nextn_predict_layers": 3}, 3),
        ({"num_nextn_predict_layers": None}, 3),
        ({"compress_ratios": FLASH_0731["compress_ratios"][:43]}, None),
        ({"compress_ratios": FLASH_0731["compress_ratios"][:43], "n_mtp_layers": 3}, 3),
        ({"compress_ratios": [*FLASH_0731["compress_ratios"][:43], 0, 0]}, 2),
        ({"num_hidden_layers": 4}, None),  # small copies, whose draft does not fit
    ],
)
def test_the_number_of_stages(changes, stages):
    draft = read_dspark(FLASH_0731 | changes)
    assert draft.num_stages == stages
    assert draft.target_layers == (40, 41, 42)
    is_cut = "num_hidden_layers" in changes
    assert DSV4Config.from_hf(FLASH_0731 | changes).dspark == (None if is_cut else draft)


@pytest.mark.parametrize(
    ("contents", "preset"), [(FLASH_0731, "flash-0731"), (PRO_0813, "pro-0813")]
)
def test_what_is_written_announces_the_draft_as_the_release_does(contents, preset):
    config = PRESETS[preset]()
    written = json.loads(json.dumps(write_config(config)))
    assert DSV4Config.from_hf(written) == config
    names = (*DSPARK_FIELDS, "num_nextn_predict_layers", "compress_ratios", "num_hidden_layers")
    assert {name: written[name] for name in names} == {name: contents[name] for name in names}
    assert written["n_mtp_layers"] == 3
    assert len(written["layer_types"]) == config.num_layers  # or transformers refuses it


@pytest.mark.parametrize(
    ("changes", "num_stages"),
    [
        ({}, None),
        ({}, 1),
        ({"csa_compression_ratio": 32}, 2),  # where ratios do not tell types apart
        ({"csa_compression_ratio": 8, "hca_compression_ratio": 4}, 2),
    ],
)
def test_what_is_written_is_read_again(changes, num_stages):
    dspark = dataclasses.replace(DRAFT, num_stages=num_stages)
    config = dataclasses.replace(TRUNK, dspark=dspark, **changes)
    assert DSV4Config.from_hf(write_config(config)) == config


@pytest.mark.slow
def test_transformers_reads_what_is_written():
    transformers = pytest.importorskip("transformers")
    config = PRESETS["flash-0731"]()
    read = transformers.DeepseekV4Config(**write_config(config)).to_dict()
    assert read["layer_types"][:4] == [WINDOW, WINDOW, SPARSE, HEAVY]
    assert len(read["layer_types"]) == config.num_layers
    assert {name: read[name] for name in DSPARK_FIELDS} == {
        name: FLASH_0731[name] for name in DSPARK_FIELDS
    }


def test_a_config_without_its_draft_says_so():
    contents = without_draft(json.loads(json.dumps(FLASH_0731)))
    assert not any(name.startswith("dspark") for name in contents)
    assert contents["num_nextn_predict_layers"] == 0
    assert len(contents["compress_ratios"]) == 43
    assert DSV4Config.from_hf(contents) == PRESETS["flash-0731"]().without_draft()
