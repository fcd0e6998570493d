"""The compressor: projections, the pooling of a window, entries of whole sequences."""

import jax
import numpy as np
import pytest

from dsv4_jax.attention.compressor import compress_sequence, pool_windows, project
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.config.layer_types import AttentionType
from helpers import attention_layers
from pallas_kernels.compressor.pooling import empty_pool, fold

CONFIG = attention_layers.CONFIG
jit_project, jit_pool_windows = jax.jit(project), jax.jit(pool_windows)


def test_pooling_a_window_is_folding_its_tokens():
    rng = np.random.default_rng(0)
    values, scores = rng.normal(size=(2, 5, 8, 16)).astype(np.float32)
    scores *= 3
    pool, all_valid = empty_pool(5, 16), np.ones(5, bool)
    folded = jax.jit(fold)
    for token in range(8):
        pool = folded(pool, values[:, token], scores[:, token], all_valid)
    pooled, pool = np.asarray(jit_pool_windows(values[None], scores[None]))[0], np.asarray(pool)
    np.testing.assert_allclose(pooled, pool[:, 2] / pool[:, 1], rtol=2e-6)


def test_a_token_without_a_score_has_no_part_in_its_window():
    rng = np.random.default_rng(1)
    values, scores = rng.normal(size=(2, 1, 1, 4, 16)).astype(np.float32)
    expected = jit_pool_windows(values[:, :, 1:], scores[:, :, 1:])
    scores[:, :, 0] = -np.inf
    np.testing.assert_allclose(jit_pool_windows(values, scores), expected, rtol=2e-6)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_scores_have_the_bias_of_the_place_in_the_window(kind):
    params, _, x = attention_layers.case(kind)
    compressor, x = params.compressor, np.asarray(x)
    positions = np.arange(x.shape[1], dtype=np.int32)
    new, alone = (
        jax.tree.map(np.asarray, jit_project(compressor, x[0], places))
        for places in (positions, positions * 0)
    )
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

    x = np.array(x)
    entries = np.asarray(compress(x))
    assert entries.shape == (2, x.shape[1] // ratio, CONFIG.head_dim)
    x[:, ratio + 1] += 1.0  # a token of the second window
    changed = np.asarray(compress(x))
    differs = np.any(entries != changed, axis=(0, 2))
    reach = {"csa": [1, 2], "hca": [1]}[kind]
    np.testing.assert_array_equal(np.flatnonzero(differs), reach)
