"""The slim presets: every layer and shape of the released models, at the size of one GPU."""

import dataclasses

import pytest

import dsv4_jax as ds
from dsv4_jax.cache.model_cache import tree_bytes

SLIM = {"flash_slim": "flash", "pro_slim": "pro"}


@pytest.mark.parametrize(("slim", "full"), SLIM.items())
def test_only_the_number_of_experts_differs(slim, full):
    config = getattr(ds.DSV4Config, slim)()
    assert config.num_routed_experts == 8
    experts = getattr(ds.DSV4Config, full)().num_routed_experts
    assert dataclasses.replace(config, num_routed_experts=experts) == getattr(ds.DSV4Config, full)()


@pytest.mark.parametrize(
    ("name", "trunk_gb"),
    [("flash_slim", 31.92), ("pro_slim", 115.53)],
)
def test_weights_in_bf16(name, trunk_gb):
    """By deepseek_v4.md section 6 layer by layer: matrices in bf16, mHC, sinks and ape in f32."""
    config = dataclasses.replace(getattr(ds.DSV4Config, name)(), num_mtp_layers=0)
    total = tree_bytes(ds.model.param_shapes(config, "bfloat16"))
    assert total / 1e9 == pytest.approx(trunk_gb, abs=0.005)
    assert total == sum(count for count in _bytes_by_hand(config))


def _bytes_by_hand(config):
    d, c, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    ql, groups, rank = config.q_lora_rank, config.o_groups, config.o_lora_rank
    width, experts, vocab = config.moe_intermediate_size, config.num_routed_experts, 129_280
    yield 2 * (2 * vocab * d + d)  # embedding, head, final norm
    yield 4 * (4 * 4 * d + 4 + 1)  # the collapse before the head
    for number, attn in enumerate(config.layer_types):
        attention = d * ql + ql + ql * heads * c + d * c + c
        attention += groups * rank * (heads // groups * c) + d * groups * rank
        experts_of = (experts + 1) * 3 * d * width + experts * d
        yield 2 * (attention + experts_of + 2 * d) + 4 * heads
        yield 2 * 4 * (24 * 4 * d + 24 + 3)  # two hyper-connections
        yield 4 * vocab * 6 if number < 3 else 4 * experts  # hash table, or router bias
        if attn == "csa":
            yield 2 * (2 * 2 * c * d + c) + 4 * 4 * 2 * c
            yield 2 * (64 * 128 * ql + 64 * d + 2 * 2 * 128 * d + 128) + 4 * 4 * 2 * 128
        elif attn == "hca":
            yield 2 * (2 * c * d + c) + 4 * 128 * c
