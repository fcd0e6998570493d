"""Both forms of `config.json` are read alike: fields, rates, schedules and the draft layer."""

import copy
import dataclasses

import pytest

from dsv4_jax.config import DSV4Config, YarnScaling
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.model.params import param_shapes
from helpers.released_configs import (
    CSA,
    DELETE,
    FLASH,
    FLASH_RATIOS,
    HASH,
    HCA,
    HEAVY,
    LEARNED,
    NESTED,
    NESTED_CONFIG,
    PRO,
    PRO_RATIOS,
    SAVED,
    SPARSE,
    SWA,
    WINDOW,
    edited,
)


def test_released_form_is_the_preset():
    assert (len(FLASH_RATIOS), len(PRO_RATIOS)) == (44, 62)
    assert DSV4Config.from_hf(FLASH) == DSV4Config.flash()
    assert DSV4Config.from_hf(PRO) == DSV4Config.pro()


def test_flash_and_pro_have_the_published_schedule():
    flash, pro = DSV4Config.flash(), DSV4Config.pro()
    assert [i for i, attn in enumerate(flash.layer_types) if attn == SWA] == [0, 1]
    assert [i for i, attn in enumerate(flash.layer_types) if attn == CSA] == list(range(2, 43, 2))
    assert [i for i, attn in enumerate(flash.layer_types) if attn == HCA] == list(range(3, 42, 2))
    assert SWA not in pro.layer_types
    assert [i for i, attn in enumerate(pro.layer_types) if attn == CSA] == list(range(2, 61, 2))
    assert pro.layer_types.count(HCA) == 31
    for config in (flash, pro):
        assert [i for i, router in enumerate(config.router_types) if router == HASH] == [0, 1, 2]


def test_transformers_form():
    assert DSV4Config.from_hf(NESTED) == NESTED_CONFIG


def test_a_config_saved_by_transformers():
    config = DSV4Config.from_hf(SAVED)
    assert config.layer_types == (SWA, CSA, HCA)
    assert config.router_types == (HASH, LEARNED, LEARNED)
    assert (config.csa_compression_ratio, config.hca_compression_ratio) == (4, 8)
    assert (config.head_dim, config.rope_dim, config.hc_mult) == (16, 4, 2)
    assert config.rope_scaling == YarnScaling(factor=16.0, original_max_positions=65_536)
    assert (config.rope_theta, config.compress_rope_theta) == (10_000.0, 160_000.0)
    assert config.eos_token_ids == (1, 5)
    assert config == DSV4Config.from_hf(SAVED / "config.json")
    assert config == DSV4Config.from_hf(str(SAVED))


def test_flat_rope_parameters_belong_to_the_compress_table():
    flat = edited(
        NESTED,
        qk_rope_head_dim=DELETE,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 512,
        },
    )
    assert DSV4Config.from_hf(flat) == NESTED_CONFIG


def test_no_scaling():
    plain = {"rope_type": "default", "rope_theta": 40000.0}
    config = DSV4Config.from_hf(edited(NESTED, rope_parameters__compress=plain))
    assert config == dataclasses.replace(NESTED_CONFIG, rope_scaling=None)
    assert DSV4Config.from_hf(edited(FLASH, rope_scaling=None)).rope_scaling is None


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, ()), (1, (1,)), (0, (0,)), ([1, 5], (1, 5)), ([], ())]
)
def test_tokens_that_end_a_text(eos, expected):
    assert DSV4Config.from_hf(edited(NESTED, eos_token_id=eos)).eos_token_ids == expected


def test_optional_fields_have_the_releases_values():
    without = edited(
        FLASH,
        hc_mult=DELETE,
        hc_sinkhorn_iters=DELETE,
        hc_eps=DELETE,
        rms_norm_eps=None,
        bos_token_id=DELETE,
        model_type=DELETE,
    )
    expected = dataclasses.replace(DSV4Config.flash(), bos_token_id=None)
    assert DSV4Config.from_hf(without) == expected


def test_reading_changes_nothing():
    data = copy.deepcopy(FLASH)
    DSV4Config.from_hf(data)
    assert data == FLASH


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"compress_ratios": [0, 3, 20, 3]}, (3, 20)),  # two unknown: the smaller one is CSA
        ({"compress_ratios": [0, 3, 20, 3], "compress_rates": {SPARSE: 3, HEAVY: 20}}, (3, 20)),
        # The rates say which is which, and the larger one may be CSA.
        ({"compress_ratios": [0, 20, 3, 20], "compress_rates": {SPARSE: 20, HEAVY: 3}}, (20, 3)),
        ({"compress_ratios": [0, 4, 128, 4]}, (4, 128)),
        ({"compress_ratios": [0, 4, 20, 4]}, (4, 20)),
        ({"compress_ratios": [0, 20, 128, 20]}, (20, 128)),
        ({"layer_types": NESTED["layer_types"]}, (4, 128)),
        (
            {
                "layer_types": NESTED["layer_types"],
                "compress_rate_csa": 3,
                "compress_rate_hca": 20,
            },
            (3, 20),
        ),
        (
            {"compress_ratios": [0, 3, 20, 3], "compress_rate_csa": 3, "compress_rate_hca": 20},
            (3, 20),
        ),
        (
            {
                "layer_types": NESTED["layer_types"],
                "compress_ratios": [0, 3, 20, 3],
                "compress_rates": {SPARSE: 3, HEAVY: 20},
            },
            (3, 20),
        ),
    ],
)
def test_rates(changes, rates):
    data = edited(NESTED, layer_types=DELETE, compress_rates=DELETE)
    config = DSV4Config.from_hf(data | changes)
    assert (config.csa_compression_ratio, config.hca_compression_ratio) == rates
    assert config.layer_types == (SWA, CSA, HCA, CSA)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([0, 4, 4, 0], (SWA, CSA, CSA, SWA)), ([128] * 4, (HCA,) * 4), ([0] * 4, (SWA,) * 4)],
)
def test_schedules_without_a_type(ratios, expected):
    data = edited(NESTED, layer_types=DELETE, compress_rates=DELETE, compress_ratios=ratios)
    config = DSV4Config.from_hf(data)
    assert config.layer_types == expected
    assert (config.csa_compression_ratio, config.hca_compression_ratio) == (4, 128)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compress_ratios": [0, 20, 20, 0]}, "one unknown rate may be either's"),
        ({"compress_ratios": [0, 3, 20, 128]}, "three rates"),
        ({"compress_ratios": [0, 3, 20, 3], "compress_rates": {SPARSE: 3}}, "half of the rates"),
        (
            {"compress_ratios": [0, 8, 8, 8], "compress_rates": {SPARSE: 8, HEAVY: 8}},
            "both types have the rate",
        ),
    ],
)
def test_rates_that_do_not_tell_csa_from_hca(changes, why):
    data = edited(NESTED, layer_types=DELETE, compress_rates=DELETE) | changes
    with pytest.raises(ValueError, match=r"compress_ratios.*compress_rates"):
        DSV4Config.from_hf(data)


@pytest.mark.parametrize("preset", [DSV4Config.flash, DSV4Config.pro])
def test_draft_layer_is_swa_with_learned_routing(preset):
    """Known bug B16: a draft layer that borrows a trunk layer's ratio and RoPE base (on Pro, whose
    trunk has no window layer to borrow from)."""
    config = preset()
    (draft,) = draft_layers(config)
    assert config.num_mtp_layers == 1
    assert (draft.attn, draft.router) == (SWA, LEARNED)
    assert config.compression_ratio(draft.attn) == 1
    assert draft.layer_idx == config.num_layers == len(config.layer_types)
    assert draft.family_idx == config.layer_types.count(SWA)
    block = param_shapes(config).mtp.block
    assert block.attn.compressor is None
    assert block.attn.indexer is None
    assert block.ffn.tid2eid is None


@pytest.mark.parametrize("released", [FLASH, PRO])
def test_lists_may_name_the_trunk_alone(released):
    short = edited(released, compress_ratios=released["compress_ratios"][:-1])
    assert DSV4Config.from_hf(short) == DSV4Config.from_hf(released)


@pytest.mark.parametrize(("num_nextn", "num_mtp"), [(3, 0), (0, 0), (None, 0), (1, 1)])
def test_several_draft_stages_leave_the_trunk(num_nextn, num_mtp):
    staged = edited(PRO, compress_ratios=[*PRO_RATIOS, 0, 0], num_nextn_predict_layers=num_nextn)
    expected = dataclasses.replace(DSV4Config.pro(), num_mtp_layers=num_mtp)
    assert DSV4Config.from_hf(staged) == expected


def test_draft_entries_in_lists_of_names():
    data = edited(
        NESTED,
        layer_types=[*NESTED["layer_types"], WINDOW],
        mlp_layer_types=[*NESTED["mlp_layer_types"], "moe"],
        num_nextn_predict_layers=1,
    )
    assert DSV4Config.from_hf(data) == dataclasses.replace(NESTED_CONFIG, num_mtp_layers=1)


@pytest.mark.parametrize("num_layers", [1, 2, 4, 42])
@pytest.mark.parametrize("names", [("compress_ratios",), ("layer_types", "mlp_layer_types")])
def test_a_cut_number_of_layers_takes_the_first_of_each_list(num_layers, names):
    """As small copies of a model are made, whose lists name all layers that there were."""
    whole = DSV4Config.flash()
    types = [{SWA: WINDOW, CSA: SPARSE, HCA: HEAVY}[attn] for attn in whole.layer_types]
    lists = {
        "compress_ratios": FLASH_RATIOS,
        "layer_types": types,
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
    }
    cut = edited(FLASH, compress_ratios=DELETE) | {name: lists[name] for name in names}
    assert DSV4Config.from_hf(cut | {"num_hidden_layers": num_layers}) == dataclasses.replace(
        whole,
        layer_types=whole.layer_types[:num_layers],
        router_types=whole.router_types[:num_layers],
    )


def test_ratios_beyond_a_cut_trunk_tell_csa_from_hca():
    data = edited(NESTED, layer_types=DELETE, compress_rates=DELETE)
    data |= {"compress_ratios": [0, 20, 3, 20, 0], "num_hidden_layers": 2, "num_hash_layers": 1}
    data["mlp_layer_types"] = None
    config = DSV4Config.from_hf(data)
    assert config.layer_types == (SWA, HCA)
    assert (config.csa_compression_ratio, config.hca_compression_ratio) == (3, 20)
