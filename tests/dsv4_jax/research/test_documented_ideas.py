"""The ideas of docs/research.md: they run, and do what their sentences say."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers import slow

pytestmark = pytest.mark.unoptimised

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "research.md"


@pytest.fixture(scope="module")
def page():
    """What the page's examples define, run from the first to the last as a reader would."""
    namespace = {}
    for example in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(example, "research.md", "exec"), namespace)
    return namespace


def selection(scores, visible):
    scores = jnp.asarray(scores, jnp.float32)[None, None]
    blank = jnp.zeros((1, scores.shape[-1], 8))
    return ds.research.Selection(
        scores=scores,
        visible=jnp.array([[visible]]),
        positions=jnp.array([[4 * visible]]),
        top_k=2,
        queries=jnp.zeros((1, 1, 2, 8)),
        entries=blank,
    )


@pytest.mark.slow
def test_entries_above_the_mean_of_those_that_are_visible(page):
    given = selection([1, 5, 3, 4, 900, jnp.nan], visible=4)
    assert page["above_the_mean"](given)[0, 0].tolist() == [False, True, False, True, False, False]
    assert not page["above_the_mean"](selection([1, 2], visible=0)).any()


def test_a_plain_mean_is_that_of_a_window(page):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 1, 8)).astype(np.float32)
    tokens = ds.research.WindowTokens(
        values=jnp.asarray(values),
        scores=jnp.asarray(rng.normal(size=(4, 1, 8)), jnp.float32),
        offsets=jnp.arange(4),
        window_tokens=4,
    )
    pooled = page["unweighted"](tokens)
    weights = jax.nn.softmax(pooled.scores, axis=0)
    np.testing.assert_allclose((weights * pooled.values).sum(0), values.mean(0), rtol=1e-6)


@pytest.mark.slow
def test_a_sampler_draws_within_one_standard_deviation(page):
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, 50)), jnp.float32)
    sampling = ds.make_sampling(64, temperature=50.0)
    drawn = page["within_one_sigma"](logits, sampling, jnp.arange(64))
    gap = logits.max(-1) - jnp.take_along_axis(logits, drawn[:, None], -1)[:, 0]
    assert jnp.all(gap <= logits.std(-1))
    assert jnp.any(gap > 0)  # it is not greedy


@pytest.mark.parametrize(
    "name", slow.all_but(["idea"], ["idea", "by_mean", "plain_mean", "near_the_best"])
)
def test_the_examples_are_traced_in_the_shipped_model(page, name):
    config = page[name].applied_to(page["config"])
    rows = jax.ShapeDtypeStruct((1, 300), jnp.int32)
    with jax.numpy_rank_promotion("allow"):  # as users have it
        logits = jax.eval_shape(lambda p, t: ds.forward(p, t, config=config), page["params"], rows)
    assert logits.shape == (1, 300, config.vocab_size)
