"""DeepSeek-V4.1's DSpark stages against what an oracle in NumPy and float64 proposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.model import dspark, dspark_sequence
from helpers.v41_cache import model, recorded
from pallas_kernels import CACHE_FORMATS

pytestmark = pytest.mark.unoptimised

jit_entries = jax.jit(dspark_sequence.context_entries, static_argnames=("config", "fmt"))
jit_guess = jax.jit(dspark_sequence.guess_block, static_argnames=("config", "fmt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache_format"),
    [("tiny", "f32"), pytest.param("tiny_cache", "fp4_e4m3", marks=pytest.mark.slow)],
)
def test_guesses_are_those_of_the_oracle(name, cache_format):
    """Of anchors in the first window, at its end and after it has wrapped: the ring has W tokens.

    Stages collapse streams with the weights of the sublayer before, beginning anew with the first
    stream, norm no queries, and pick 2 of 4 experts where the trunk picks 3 of 8.
    """
    config, params = model()
    fmt, wanted, drafts = CACHE_FORMATS[cache_format], recorded(name), recorded(f"{name}_drafts")
    means = wanted["main_hidden"]
    means = means.reshape(*means.shape[:2], len(config.dspark.target_layers), -1)
    positions = np.broadcast_to(np.arange(means.shape[1], dtype=np.int32), means.shape[:2])
    entries = jit_entries(params, jnp.asarray(means), positions, config=config, fmt=fmt)
    places = sorted({int(key.split("/")[0]) for key in drafts})
    assert places[-1] > config.sliding_window
    for place in places:
        anchors = jnp.asarray(wanted["token_ids"][:, place])
        at = jnp.full(len(anchors), place, jnp.int32)
        guesses = jit_guess(params, anchors, at, entries, config=config, fmt=fmt)
        found = dspark.chain(params, anchors, guesses, dspark.choose_likeliest)
        np.testing.assert_array_equal(found.token_ids, drafts[f"{place}/tokens"][:, 1:])
        for values, kind in ((found.logits, "logits"), (found.confidence, "confidence")):
            np.testing.assert_allclose(values, drafts[f"{place}/{kind}"], rtol=0, atol=1e-3)


def test_a_stage_has_experts_of_its_own():
    config, _ = model()
    assert (config.num_routed_experts, config.num_experts_per_token) == (8, 3)
    staged = dspark.stage_config(config)
    assert (staged.num_routed_experts, staged.num_experts_per_token) == (4, 2)
