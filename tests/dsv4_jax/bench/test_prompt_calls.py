"""How many calls of a timed prompt all layers run, and what it needs."""

import pytest

from dsv4_jax.bench.prompt_calls import PromptPlan
from dsv4_jax.bench.prompt_flops import prefill_flops
from dsv4_jax.config import DSV4Config

FLASH = DSV4Config.v41_flash().without_draft()


def plan(num_tokens, chunk_tokens, config=FLASH, **options):
    return PromptPlan.of(config, num_tokens=num_tokens, chunk_tokens=chunk_tokens, **options)


def test_upper_layers_rest_up_to_what_the_last_boundary_looks_back_to():
    """R is 2,541, and the last boundary lies 128 tokens before the end."""
    assert plan(32_768, 4096).resting == 7
    assert plan(32_768, 2048).resting == 14
    assert plan(4096, 128).resting == (4096 - 128 - 2541) // 128 == 11
    assert plan(2048, 128).resting == 0


def test_layer_rows_count_room_for_tokens_that_do_not_rest():
    found = plan(32_768, 4096)
    assert found.upper_tokens == 264  # 4096 / 16 and one that decodes, in eights
    assert found.layer_rows == 32_768 * 20 + (4096 + 7 * 264) * 20
    assert found.row()["all_layer_rows"] == 32_768 * 40
    assert found.layer_rows / found.row()["all_layer_rows"] == pytest.approx(0.59, abs=0.005)


@pytest.mark.parametrize(
    ("config", "options"), [(DSV4Config.flash(), {}), (FLASH, {"rests": False})]
)
def test_all_layers_run_where_a_model_needs_them_or_that_is_asked_for(config, options):
    found = plan(32_768, 4096, config, **options)
    assert (found.resting, found.upper_tokens, found.awake_tokens) == (0, 0, 32_768)
    assert found.layer_rows == 32_768 * config.num_layers


def test_operations_of_upper_layers_are_those_of_the_last_tokens():
    whole, few = (prefill_flops(FLASH, 32_768, count) for count in (None, 4096))
    assert prefill_flops(FLASH, 32_768, 32_768) == whole
    assert few / whole == pytest.approx(0.56, abs=0.02)
    assert whole == pytest.approx(2 * 32_768 * active_parameters(), rel=0.25)  # without attention


def active_parameters():
    """Of a token in the trunk: projections, six experts of 384 and the shared one, and no more."""
    experts = 7 * 3 * FLASH.hidden_size * FLASH.moe_intermediate_size
    heads = FLASH.num_attention_heads * FLASH.head_dim
    attention = FLASH.q_lora_rank * (FLASH.hidden_size + heads) + heads * FLASH.o_lora_rank
    attention += FLASH.hidden_size * (FLASH.head_dim + FLASH.o_groups * FLASH.o_lora_rank)
    return 40 * (experts + attention)
