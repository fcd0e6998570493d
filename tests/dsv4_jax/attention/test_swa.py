"""SWA layers: the window and the sink."""

import numpy as np
import pytest

from helpers import attention_layers, tolerance

ATOL = {"f32": tolerance.INTERMEDIATE, "fp8_ue8m0": 1e-2}
"""A code of E4M3 may round to its neighbour where two ways of summing differ in their last bit."""


@pytest.mark.parametrize("cache_format", ["f32", "fp8_ue8m0"])
def test_the_layer_on_a_cache_is_the_layer_over_the_sequence(cache_format):
    """Whatever the calls are: pieces of prompts, single tokens, windows cut by calls."""
    params, _, x = attention_layers.case("swa")
    expected = attention_layers.over_sequence(params, x, kind="swa", cache_format=cache_format)
    actual = attention_layers.on_cache("swa", cache_format)
    np.testing.assert_allclose(actual, expected, atol=ATOL[cache_format], rtol=0)


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
