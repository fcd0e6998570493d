"""Which draft a config announces, and what is refused of one with DSpark stages."""

import json

import pytest

from dsv4_jax.cli.presets import DSPARK, PRESETS
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DraftKind, draft_kind, read_dspark, without_draft
from helpers.released_configs import DELETE, FLASH, FLASH_0731, PRO_0813, edited

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


def test_a_config_without_its_draft_says_so():
    contents = without_draft(json.loads(json.dumps(FLASH_0731)))
    assert not any(name.startswith("dspark") for name in contents)
    assert contents["num_nextn_predict_layers"] == 0
    assert len(contents["compress_ratios"]) == 43
    assert DSV4Config.from_hf(contents) == PRESETS["flash-0731"]().without_draft()
