"""The config of a model that reads images: its text part, flat or nested."""

import re

import pytest

from dsv4_jax.cli.presets import PRESETS
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.images import find_images
from helpers.released_configs import FLASH, FLASH_VISION, VISION_FIELDS


def test_the_text_part_is_that_of_the_text_model():
    assert DSV4Config.from_hf(FLASH_VISION, text_only=True) == PRESETS["flash-0731"]()
    with pytest.raises(ValueError, match=r"vision_n_layers=32 .*text_only=True"):
        DSV4Config.from_hf(FLASH_VISION)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v4_text", None])
def test_a_nested_text_model_is_found(model_type):
    text = {n: v for n, v in FLASH.items() if n not in ("quantization_config", "eos_token_id")}
    nested = {
        "model_type": "deepseek_v4" if model_type is None else "deepseek_v4_vl",
        "text_config": text | {"model_type": model_type},
        "vision_config": {"num_hidden_layers": 32},
        "quantization_config": FLASH["quantization_config"],
        "eos_token_id": 1,
    }
    assert DSV4Config.from_hf(nested, text_only=True) == DSV4Config.flash()
    with pytest.raises(ValueError, match=r"vision_config=.*text_only"):
        DSV4Config.from_hf(nested)
    nested["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(ValueError, match="awq"):
        DSV4Config.from_hf(nested, text_only=True)
    nested["text_config"] = FLASH  # as released, which the tool that quantised it left inside
    with pytest.raises(ValueError, match="awq"):
        DSV4Config.from_hf(nested, text_only=True)


def test_another_family_is_refused_however_it_nests():
    contents = {
        "model_type": "deepseek_v5",
        "text_config": FLASH | {"model_type": "deepseek_v5_text"},
    }
    with pytest.raises(ValueError, match=re.escape("model_type must be 'deepseek_v4'")):
        DSV4Config.from_hf(contents, text_only=True)
    with pytest.raises(ValueError, match="text_config must be an object"):
        DSV4Config.from_hf(FLASH | {"text_config": [1]})


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ({}, False),
        ({"vision_n_layers": 0}, False),
        (VISION_FIELDS | {"vision_n_layers": 0}, False),
        ({"vision_n_layers": None, "vision_config": None}, False),
        ({"vision_n_layers": 24}, True),
        ({"vision_dim": 1024}, True),
        ({"vision_config": {"depth": 24}}, True),
        (VISION_FIELDS, True),
    ],
)
def test_marks_of_images(changes, is_found):
    assert (find_images(FLASH | changes) is not None) == is_found
