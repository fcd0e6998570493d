"""Sizes of the presets."""

import dataclasses
import math

import jax
import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import param_shapes
from helpers.released_configs import (
    CSA,
    FLASH,
    HCA,
    NESTED_CONFIG,
    SWA,
)


@pytest.mark.parametrize(
    ("preset", "billions", "without_draft"),
    [(DSV4Config.flash, 290.9, 284.3), (DSV4Config.pro, 1599, 1573)],
)
def test_number_of_parameters(preset, billions, without_draft):
    def count(config):
        leaves = jax.tree_util.tree_flatten_with_path(param_shapes(config))[0]
        return sum(math.prod(leaf.shape) for path, leaf in leaves if "tid2eid" not in str(path[-1]))

    config = preset()
    precision = 0.05e9 if billions < 1000 else 0.5e9
    assert abs(count(config) - billions * 1e9) < precision
    trunk = count(dataclasses.replace(config, num_mtp_layers=0))
    assert abs(trunk - without_draft * 1e9) < precision


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DSV4Config.flash(), 128),
        (DSV4Config.pro(), 128),
        (DSV4Config.tiny(), 128),
        (NESTED_CONFIG, 1920),  # lcm(128, 3, 20)
        (dataclasses.replace(NESTED_CONFIG, layer_types=(SWA, CSA, CSA, SWA)), 384),
        (dataclasses.replace(NESTED_CONFIG, layer_types=(HCA,) * 4), 640),
        (dataclasses.replace(NESTED_CONFIG, layer_types=(SWA,) * 4), 128),
        (dataclasses.replace(NESTED_CONFIG, hca_compression_ratio=256), 768),
    ],
)
def test_block_tokens(config, expected):
    assert config.block_tokens == expected


def test_a_config_is_a_value():
    assert hash(DSV4Config.from_hf(FLASH)) == hash(DSV4Config.flash())
    assert DSV4Config.flash().nope_dim == 448
    with pytest.raises(dataclasses.FrozenInstanceError):
        DSV4Config.flash().head_dim = 8
