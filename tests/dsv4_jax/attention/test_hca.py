"""HCA layers: the window, and every entry of 32 tokens."""

import numpy as np
import pytest

from helpers import attention_layers, slow

pytestmark = pytest.mark.unoptimised


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", slow.all_but(["f32"], list(attention_layers.ATOL)))
def test_the_layer_on_a_cache_is_the_layer_over_the_sequence(cache_format):
    attention_layers.check_on_cache("hca", cache_format)


def test_every_token_of_closed_windows_is_seen():
    """A change in the first window reaches the last token; the layer's input is not causal else."""
    params, _, x = attention_layers.case("hca")
    changed = x.at[:, 3].add(1.0)
    first, second = (
        attention_layers.over_sequence(params, given, kind="hca", cache_format="f32")
        for given in (x, changed)
    )
    assert np.all(np.any(first[:, -1] != second[:, -1], axis=-1))
    np.testing.assert_array_equal(first[:, :3], second[:, :3])
