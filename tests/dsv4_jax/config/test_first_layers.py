"""The first layers of a model are what they are in the whole of it."""

import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.first_layers import first_layers
from dsv4_jax.config.layer_schedule import layer_schedule

FLASH = DSV4Config.v41_flash().without_draft()


@pytest.mark.parametrize("layers", [1, 2, 10, 15, 21, 25, 40])
def test_layers_of_v41_make_and_read_what_they_do_in_the_whole(layers):
    found = layer_schedule(first_layers(FLASH, layers))
    assert found == layer_schedule(FLASH)[:layers]


def test_tables_are_those_of_layers_that_are_left():
    assert first_layers(FLASH, 1).engram is None
    assert first_layers(FLASH, 2).engram.layers == (1,)
    assert first_layers(FLASH, 15).engram == FLASH.engram


def test_candidates_need_the_layer_that_leaves_them():
    assert first_layers(FLASH, 20).sources.candidates is None
    assert first_layers(FLASH, 21).sources.candidates == FLASH.sources.candidates


@pytest.mark.parametrize("layers", [0, 41])
def test_other_numbers_are_refused(layers):
    with pytest.raises(ValueError, match=f"layers must be in 1..40, got {layers}"):
        first_layers(FLASH, layers)


def test_a_draft_that_reads_layers_that_are_gone_is_refused():
    with pytest.raises(ValueError, match="target_layers"):
        first_layers(DSV4Config.v41_flash(), 38)
