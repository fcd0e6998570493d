"""SWA layers: the window and the sink."""

import numpy as np
import pytest

from helpers import attention_layers, slow

pytestmark = pytest.mark.unoptimised


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", slow.all_but(["f32"], list(attention_layers.ATOL)))
def test_the_layer_on_a_cache_is_the_layer_over_the_sequence(cache_format):
    attention_layers.check_on_cache("swa", cache_format)


def test_tokens_beyond_the_window_are_not_seen():
    params, _, x = attention_layers.case("swa")
    far = x.at[:, :80].add(1.0)
    first, second = (
        attention_layers.over_sequence(params, given, kind="swa", cache_format="f32")
        for given in (x, far)
    )
    window = attention_layers.CONFIG.sliding_window
    np.testing.assert_array_equal(first[:, 80 + window :], second[:, 80 + window :])
    assert np.any(first[:, 80 + window - 2] != second[:, 80 + window - 2])
