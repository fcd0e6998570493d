"""HCA layers: the window, and every entry of 32 tokens."""

import numpy as np
import pytest

from helpers import attention_layers, tolerance

ATOL = {"f32": tolerance.INTERMEDIATE, "fp8_ue8m0": 1e-2}
"""A code of E4M3 may round to its neighbour where two ways of summing differ in their last bit."""


@pytest.mark.parametrize("cache_format", ["f32", "fp8_ue8m0"])
def test_the_layer_on_a_cache_is_the_layer_over_the_sequence(cache_format):
    """Whatever the calls are: pieces of prompts, single tokens, windows cut by calls."""
    params, _, x = attention_layers.case("hca")
    expected = attention_layers.over_sequence(params, x, kind="hca", cache_format=cache_format)
    actual = attention_layers.on_cache("hca", cache_format)
    np.testing.assert_allclose(actual, expected, atol=ATOL[cache_format], rtol=0)


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
