"""Logits to tokens: which tokens may be drawn, how often, and what the noise depends on."""

import dataclasses
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.step.sampling import SamplingFields

pytestmark = pytest.mark.unoptimised

V = 8
LOGITS = np.array([0.3, 2.0, -1.0, 1.1, 2.5, 0.0, -3.0, 1.7], np.float32)
NUM_DRAWS = 4000
# Chi-square of 7 degrees of freedom exceeds this once in 10,000 times; seeds are fixed.
CHI_SQUARE_LIMIT = 29.9

jit_sample = jax.jit(ds.sample)


def softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def draws(logits=LOGITS, *, seed=0, positions=None, **settings):
    """i32[NUM_DRAWS], one row of logits drawn from at that many positions."""
    sampling = ds.make_sampling(NUM_DRAWS, seed=seed, **({"temperature": 1.0} | settings))
    positions = np.arange(NUM_DRAWS) if positions is None else positions
    rows = jnp.broadcast_to(jnp.asarray(logits)[None], (NUM_DRAWS, len(logits)))
    return np.asarray(jit_sample(rows, sampling, jnp.asarray(positions, jnp.int32)))


def chi_square(tokens, probabilities):
    expected = len(tokens) * probabilities
    return np.sum((np.bincount(tokens, minlength=len(expected)) - expected) ** 2 / expected)


def test_greedy_takes_the_largest_and_of_equals_the_lower_id():
    logits = np.random.default_rng(0).standard_normal((5, V)).astype(np.float32)
    logits[1] = 0.0
    logits[2, [3, 6]] = 9.0
    logits[3] = -np.inf
    logits[3, 5] = -1e30
    tokens = jit_sample(logits, ds.make_sampling(5), np.arange(5, dtype=np.int32))
    chex.assert_shape(tokens, (5,))
    chex.assert_type(tokens, jnp.int32)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(np.asarray(tokens)[1:4], [0, 3, 5])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature):
    tokens = draws(temperature=temperature)
    assert chi_square(tokens, softmax(LOGITS / temperature)) < CHI_SQUARE_LIMIT
    # A slip in the temperature would show.
    assert chi_square(tokens, softmax(LOGITS / (1.5 * temperature))) > 2 * CHI_SQUARE_LIMIT


def test_seeds_are_as_good_a_source_of_noise_as_positions():
    tokens = draws(seed=list(range(NUM_DRAWS)), positions=np.full(NUM_DRAWS, 17))
    assert chi_square(tokens, softmax(LOGITS)) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("temperature", [1e-6, 1e-37])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = np.float32([50, 100, 70, 99, 0, 0, 0, 0])
    assert set(draws(logits, temperature=temperature)) == {1}


@pytest.mark.parametrize("top_k", [1, 2, 5, V, V + 7])
def test_top_k_draws_among_that_many(top_k):
    best = np.argsort(-LOGITS, kind="stable")[:top_k]
    tokens = draws(top_k=top_k, temperature=2.0)
    assert set(tokens) == set(best)
    ranks = np.argsort(-LOGITS, kind="stable").argsort()[tokens]
    assert chi_square(ranks, softmax(LOGITS[best] / 2)) < CHI_SQUARE_LIMIT


def test_top_k_of_equal_logits_takes_the_lower_ids():
    assert set(draws(np.zeros(V, np.float32), top_k=3)) == {0, 1, 2}


def smallest_set(probabilities, top_p):
    """The most likely tokens, one after another, until they together have that probability."""
    chosen, total = [], 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        if total >= top_p:
            break
        chosen.append(int(token))
        total += probabilities[token]
    return set(chosen)


@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.45, 0.7, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_top_p_draws_from_the_smallest_set_that_reaches_it(top_p, temperature):
    probabilities = softmax(LOGITS / temperature)
    expected = smallest_set(probabilities, top_p)
    tokens = set(draws(top_p=top_p, temperature=temperature))
    common = {token for token in expected if probabilities[token] * NUM_DRAWS > 12}
    assert common
    assert common <= tokens <= expected


def test_a_set_whose_probability_is_p_itself_is_enough():
    """Four equal tokens, a quarter each to the bit."""
    above = float(np.nextafter(np.float32(0.5), np.float32(1)))
    logits = np.where(np.arange(V) < 4, 0, -np.inf).astype(np.float32)
    for top_p, count in ((0.25, 1), (0.5, 2), (above, 3), (0.75, 3), (1.0, 4)):
        assert set(draws(logits, top_p=top_p)) == set(range(count))


def test_top_k_and_top_p_both_hold():
    assert set(draws(top_k=2, top_p=0.99)) == {4, 1}
    assert set(draws(top_k=7, top_p=0.3)) == {4}


def test_one_token_is_always_left():
    spread = np.zeros(V, np.float32)
    assert set(draws(spread, top_p=1e-30)) == {0}
    assert set(draws(top_k=1, top_p=1e-30)) == {4}
    assert set(draws(top_p=1e-46)) == {4}  # 0 in float32


@pytest.mark.slow
def test_noise_comes_from_seed_and_position_alone():
    """The same row elsewhere in a batch, beside other rows with other settings."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 64)).astype(np.float32)
    sampling = ds.make_sampling(6, temperature=1.0, seed=[3, 1, 4, 1, 5, 9])
    sampling = dataclasses.replace(
        sampling.completed(),
        temperature=jnp.float32([1, 0, 2, 0.5, 1, 0]),
        top_k=jnp.int32([0, 0, 9, 0, 3, 0]),
        top_p=jnp.float32([1, 1, 0.9, 0.5, 1, 0.1]),
    )
    positions = np.array([0, 7, 7, 100_000, 2, 1], np.int32)
    given = logits, jax.tree.map(np.asarray, sampling), positions
    tokens = np.asarray(jit_sample(*given))
    order = rng.permutation(6)
    moved = jax.tree.map(lambda leaf: leaf[order], given)
    np.testing.assert_array_equal(jit_sample(*moved), tokens[order])
    for row in range(6):
        alone = jax.tree.map(lambda leaf, i=row: leaf[i : i + 1], given)
        assert np.asarray(jit_sample(*alone))[0] == tokens[row]
    # Rows of temperature 0 are greedy beside warm ones.
    np.testing.assert_array_equal(tokens[[1, 5]], np.argmax(logits[[1, 5]], axis=-1))


def test_another_seed_or_position_is_another_draw():
    base = draws()
    np.testing.assert_array_equal(base, draws())
    repeat = np.sum(softmax(LOGITS) ** 2)  # how often independent draws agree
    for other in (draws(seed=1), draws(positions=np.arange(NUM_DRAWS) + NUM_DRAWS)):
        assert np.mean(other == base) == pytest.approx(repeat, abs=0.04)
    assert np.mean(base[1:] == base[:-1]) == pytest.approx(repeat, abs=0.04)
    shifted = draws(positions=np.arange(NUM_DRAWS) + 1)
    np.testing.assert_array_equal(shifted[:-1], base[1:])


def test_settings_are_given_to_every_row():
    sampling = ds.make_sampling(
        3, temperature=0.5, top_k=4, top_p=0.9, seed=[1, 2**32 + 5, -1], stop_token_ids=(7, 9)
    )
    np.testing.assert_array_equal(sampling.temperature, np.float32([0.5] * 3))
    np.testing.assert_array_equal(sampling.top_k, [4] * 3)
    np.testing.assert_array_equal(sampling.top_p, np.float32([0.9] * 3))
    np.testing.assert_array_equal(sampling.seed, [1, 5, 2**32 - 1])
    np.testing.assert_array_equal(sampling.stop_token_ids, [[7, 9]] * 3)
    np.testing.assert_array_equal(ds.make_sampling(2).stop_token_ids, [[-1]] * 2)
    dtypes = {f.name: getattr(sampling, f.name).dtype for f in dataclasses.fields(sampling)}
    assert dtypes == {
        "temperature": jnp.float32,
        "top_k": jnp.int32,
        "top_p": jnp.float32,
        "min_p": jnp.float32,
        "seed": jnp.uint32,
        "bias_token_ids": jnp.int32,
        "bias": jnp.float32,
        "presence_penalty": jnp.float32,
        "frequency_penalty": jnp.float32,
        "wants_logprobs": jnp.bool,
        "stop_token_ids": jnp.int32,
    }


def test_a_value_and_keywords_say_the_same():
    """Keywords replace fields of the value, for all rows; a value may be one per row."""
    params = ds.SamplingParams(temperature=0.5, top_k=4, seed=7, stop_token_ids=[9])
    chex.assert_trees_all_equal(
        ds.make_sampling(2, params), ds.make_sampling(2, temperature=0.5, top_k=4, seed=7,
                                                      stop_token_ids=(9,))
    )  # fmt: skip
    other = ds.SamplingParams(seed=8, stop_token_ids=(1, 2))
    mixed = ds.make_sampling(2, [params, other], top_k=3)
    np.testing.assert_array_equal(mixed.temperature, np.float32([0.5, 0]))
    np.testing.assert_array_equal(mixed.top_k, [3, 3])
    np.testing.assert_array_equal(mixed.seed, [7, 8])
    np.testing.assert_array_equal(mixed.stop_token_ids, [[9, -1], [1, 2]])
    with pytest.raises(ValueError, match=r"sampling must be one, or one per row \(3\), got 2"):
        ds.make_sampling(3, [params, other])


def test_sampling_params_are_values():
    """Equal where they mean the same, usable as keys, and checked when a field is replaced."""
    params = ds.SamplingParams(
        seed=2**32 + 5, stop_token_ids=[3], stop_texts=["end"], logit_bias={7: 1, 2: -0.5}
    )
    assert params == ds.SamplingParams(
        seed=5, stop_token_ids=(3,), stop_texts=("end",), logit_bias=[(2, -0.5), (7, 1.0)]
    )
    assert dataclasses.replace(params, seed=6).logit_bias == ((2, -0.5), (7, 1.0))
    assert {params: 1}[params] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1
    with pytest.raises(ValueError, match="top_k must be 0"):
        dataclasses.replace(params, top_k=-1)
    with pytest.raises(TypeError, match="temprature"):
        ds.make_sampling(1, temprature=1.0)


def test_keyword_arguments_are_the_fields_of_sampling_params():
    fields = {field.name for field in dataclasses.fields(ds.SamplingParams)}
    assert set(typing.get_type_hints(SamplingFields)) == fields


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_texts": "end"}, "stop_texts must be a list of texts, none empty, got 'end'"),
        ({"stop_texts": ["end"]}, "stop_texts must be left out here, .* an Engine, got .'end'"),
        ({"presence_penalty": 0.5}, "presence_penalty must be left out here, .* got 0.5"),
        ({"frequency_penalty": -1}, "frequency_penalty must be left out here, .* got -1.0"),
        ({"logprobs": 0}, "logprobs must be left out here, .* got 0; take jax.nn.log_softmax"),
        ({"logprobs": 21}, "logprobs must be 0 to 20, or None, got 21"),
        ({"logprobs": True}, "logprobs must be an integer, got True"),
        ({"min_p": 1.1}, r"min_p must be 0 \(no limit\) to 1, got 1.1"),
        ({"presence_penalty": -2.5}, "presence_penalty must be -2 to 2, got -2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be -2 to 2, got nan"),
        ({"logit_bias": {3: 101}}, "logit_bias must be -100 to 100, got 101"),
        ({"logit_bias": {-1: 1}}, "logit_bias must be at least 0, got -1"),
        ({"logit_bias": {"3": 1}}, "logit_bias must be an integer, got '3'"),
        ({"logit_bias": [3, 1]}, "logit_bias must be a mapping of token ids to numbers"),
        ({"logit_bias": 3}, "logit_bias must be a mapping of token ids to numbers, got 3"),
        ({"logit_bias": [(3, 1), (3, 2)]}, "logit_bias must be one number for each token id"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias must hold at most 300 tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 .* got nan"),
        ({"top_k": -1}, r"top_k must be 0 \(no limit\) or more, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_p": float("nan")}, "top_p must be above 0 and at most 1, got nan"),
        ({"seed": [1, 2, 3, 4]}, r"seed must be one, or one per row \(3\), got 4"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ds.make_sampling(3, **settings)
