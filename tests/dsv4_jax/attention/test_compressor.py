"""The compressor: projections, the pooling of a window, entries of whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.attention.compressor import compress_sequence, pool_windows, project
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.config.layer_types import AttentionType
from helpers import attention_layers
from pallas_kernels.compressor.pooling import empty_pool, fold

CONFIG = attention_layers.CONFIG


def test_pooling_a_window_is_folding_its_tokens():
    rng = np.random.default_rng(0)
    values, scores = rng.normal(size=(2, 5, 8, 16)).astype(np.float32)
    values, scores = jnp.asarray(values), jnp.asarray(3 * scores)
    pool, all_valid = empty_pool(5, 16), jnp.ones(5, bool)
    for token in range(8):
        pool = fold(pool, values[:, token], scores[:, token], all_valid)
    pooled = pool_windows(values[None], scores[None])[0]
    np.testing.assert_allclose(pooled, pool[:, 2] / pool[:, 1], rtol=2e-6)


def test_a_token_without_a_score_has_no_part_in_its_window():
    rng = np.random.default_rng(1)
    values, scores = jnp.asarray(rng.normal(size=(2, 1, 1, 4, 16)), jnp.float32)
    masked = scores.at[:, :, 0].set(-jnp.inf)
    expected = pool_windows(values[:, :, 1:], scores[:, :, 1:])
    np.testing.assert_allclose(pool_windows(values, masked), expected, rtol=2e-6)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_scores_have_the_bias_of_the_place_in_the_window(kind):
    params, _, x = attention_layers.case(kind)
    compressor, positions = params.compressor, jnp.arange(x.shape[1])
    new = project(compressor, x[0], positions)
    alone = project(compressor, x[0], jnp.zeros_like(positions))
    size = compressor.ape.shape[0]
    np.testing.assert_array_equal(new.values, alone.values)
    np.testing.assert_allclose(
        new.scores - alone.scores,
        np.asarray(compressor.ape)[np.arange(x.shape[1]) % size] - np.asarray(compressor.ape[0]),
        atol=1e-5,
    )


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_an_entry_depends_on_its_windows_alone(kind):
    """An HCA entry on its own window, a CSA entry on the window before it too."""
    params, spec, x = attention_layers.case(kind)
    frequencies = rope_frequencies(CONFIG, AttentionType(kind))
    ratio = CONFIG.compression_ratio(spec.attn)

    @jax.jit
    def compress(x):
        return compress_sequence(params.compressor, x, frequencies, spec.attn, CONFIG)

    entries = compress(x)
    assert entries.shape == (2, x.shape[1] // ratio, CONFIG.head_dim)
    changed = compress(x.at[:, ratio + 1].add(1.0))  # a token of the second window
    differs = np.any(entries != changed, axis=(0, 2))
    reach = {"csa": [1, 2], "hca": [1]}[kind]
    np.testing.assert_array_equal(np.flatnonzero(differs), reach)
