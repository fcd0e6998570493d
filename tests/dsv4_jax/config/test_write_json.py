"""A config that is written reads back."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_jax.config import DSV4Config, YarnScaling
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.write_json import write_config
from helpers.released_configs import FLASH, FLASH_0731, NESTED_CONFIG, PRO, PRO_0813


def through_json(config):
    return DSV4Config.from_hf(json.loads(json.dumps(write_config(config))))


@pytest.mark.parametrize(
    "config", [DSV4Config.flash(), DSV4Config.pro(), DSV4Config.tiny(), NESTED_CONFIG]
)
def test_written_presets_read_back(config):
    assert through_json(config) == config


@pytest.mark.parametrize("released", [FLASH, PRO, FLASH_0731, PRO_0813])
def test_readers_of_the_releases_find_every_field_that_they_have(released):
    """vLLM looks for `topk_method`, and others for ratios, hash layers and `rope_scaling`."""
    written = write_config(DSV4Config.from_hf(released))
    of_files = {"expert_dtype", "quantization_config", "torch_dtype"}  # `save_checkpoint` says them
    for name in released.keys() - of_files - {"use_cache"}:
        assert written[name] == released[name], name


@st.composite
def configs(draw):
    size = st.integers(1, 300)
    positive = st.floats(1e-7, 1e6)
    vocab_size = draw(size)
    token = st.integers(0, vocab_size - 1)
    rope_dim = 2 * draw(st.integers(1, 150))
    groups = draw(st.integers(1, 16))
    experts = draw(size)
    layers = draw(
        st.lists(
            st.tuples(st.sampled_from(AttentionType), st.sampled_from(RouterType)),
            min_size=1,
            max_size=12,
        )
    )
    sizes = (
        "hidden_size",
        "q_lora_rank",
        "o_lora_rank",
        "sliding_window",
        "csa_compression_ratio",
        "hca_compression_ratio",
        "indexer_num_heads",
        "indexer_top_k",
        "moe_intermediate_size",
        "hc_mult",
        "hc_sinkhorn_iters",
        "max_position_embeddings",
    )
    floats = (
        "routed_scaling_factor",
        "swiglu_limit",
        "hc_eps",
        "rms_norm_eps",
        "rope_theta",
    )
    scaling = st.builds(
        YarnScaling,
        factor=positive,
        original_max_positions=size,
        beta_fast=positive,
        beta_slow=positive,
    )
    return DSV4Config(
        layer_types=tuple(attn for attn, _ in layers),
        router_types=tuple(router for _, router in layers),
        rope_dim=rope_dim,
        head_dim=rope_dim + draw(st.integers(1, 300)),
        indexer_head_dim=rope_dim + draw(st.integers(0, 300)),
        o_groups=groups,
        num_attention_heads=groups * draw(st.integers(1, 8)),
        num_routed_experts=experts,
        num_experts_per_token=draw(st.integers(1, experts)),
        num_mtp_layers=draw(st.integers(0, 1)),
        rope_scaling=draw(st.none() | scaling),
        compress_rope_theta=draw(st.floats(1.5, 1e6)),
        vocab_size=vocab_size,
        bos_token_id=draw(st.none() | token),
        eos_token_ids=tuple(draw(st.lists(token, max_size=3))),
        **{name: draw(size) for name in sizes},
        **{name: draw(positive) for name in floats},
    )


@given(config=configs())
def test_written_config_reads_back(config):
    assert through_json(config) == config


@pytest.mark.slow
def test_every_rope_dim_reads_back():
    """Readers truncate head_dim * partial_rotary_factor, and 44 * (30 / 44) is below 30."""
    for head_dim in range(3, 260):
        for rope_dim in range(2, head_dim, 2):
            config = dataclasses.replace(
                NESTED_CONFIG, head_dim=head_dim, rope_dim=rope_dim, indexer_head_dim=512
            )
            written = write_config(config)
            assert int(head_dim * written["partial_rotary_factor"]) == rope_dim
