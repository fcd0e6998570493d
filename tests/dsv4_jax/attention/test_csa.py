"""CSA layers: the window, and the entries that the indexer selects."""

import dataclasses

import numpy as np
import pytest

from helpers import attention_layers

pytestmark = pytest.mark.unoptimised


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", attention_layers.ATOL)
def test_the_layer_on_a_cache_is_the_layer_over_the_sequence(cache_format):
    attention_layers.check_on_cache("csa", cache_format)


@pytest.mark.slow
def test_what_the_indexer_selects_decides_the_result():
    """With other weights of index heads, other entries are attended to, on both ways alike."""
    params, _, x = attention_layers.case("csa")
    indexer = params.indexer
    turned = dataclasses.replace(indexer, weights_proj=-indexer.weights_proj)
    other = dataclasses.replace(params, indexer=turned)
    first, second = (
        attention_layers.over_sequence(given, x, kind="csa", cache_format="f32")
        for given in (params, other)
    )
    window, top_k = attention_layers.CONFIG.sliding_window, attention_layers.CONFIG.indexer_top_k
    early = 4 * top_k  # until then every visible entry is selected
    assert early > window
    np.testing.assert_array_equal(first[:, :early], second[:, :early])
    assert np.any(first[:, early + 16 :] != second[:, early + 16 :])
    actual = attention_layers.on_cache("csa", "f32", params=other)
    np.testing.assert_allclose(actual, second, atol=attention_layers.ATOL["f32"], rtol=0)
