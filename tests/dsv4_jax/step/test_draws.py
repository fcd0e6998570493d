"""Bias, penalties, min-p and log-probabilities, against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.step import draws as draws_module
from dsv4_jax.step.draws import DrawnCounts, TokenMasks, draw
from dsv4_jax.step.sampling import FullSampling, Sampling, SamplingParams, stack_sampling
from pallas_kernels import limit_tokens, select_top_k

pytestmark = pytest.mark.unoptimised

V, NUM_ROWS, WIDTH = 50, 16, 4
program_of_draw = jax.jit(draw)
jit_sample = jax.jit(ds.sample)


def jit_draw(*arguments, **masks):
    """What `draw` gives, on the host."""
    return jax.tree.map(np.asarray, program_of_draw(*arguments, **masks))


def sampling_of(rows):
    return jax.tree.map(jnp.asarray, stack_sampling(rows, with_stops=False, bias_width=6))


def counts_of(histories, size=64):
    """Entries of what rows have drawn, shuffled, among entries of nobody."""
    entries = [
        (row, token, history.count(token))
        for row, history in enumerate(histories)
        for token in set(history)
    ]
    entries += [(-1, 3, 5)] * (size - len(entries))
    np.random.default_rng(0).shuffle(entries)
    rows, tokens, counts = np.asarray(entries, np.int32).T
    return DrawnCounts(rows=rows, token_ids=tokens, counts=counts)


def changed(logits, params, history):
    """f32[V], logits of one draw as OpenAI's documentation says."""
    result = np.array(logits, np.float32)
    for token, bias in params.logit_bias:
        result[token] += np.float32(bias)
    for token in set(history):
        result[token] -= np.float32(params.presence_penalty)
        result[token] -= np.float32(params.frequency_penalty) * history.count(token)
    return result


@pytest.fixture(scope="module")
def case():
    """Rows that ask for all sorts of things, their logits, histories and drafts."""
    rng = np.random.default_rng(1)
    rows = [SamplingParams()]
    for n in range(1, NUM_ROWS):
        tokens = rng.permutation(V)[: n % 7].tolist()
        rows.append(
            SamplingParams(
                temperature=[0.0, 0.7, 1.5][n % 3],
                min_p=[0.0, 0.1][n % 2],
                top_k=[0, 9][n // 2 % 2],
                top_p=[1.0, 0.8][n // 4 % 2],
                seed=n,
                logit_bias=dict(zip(tokens, rng.uniform(-8, 8, 7), strict=False)),
                presence_penalty=[0.0, 1.5, -2.0][n // 3 % 3],
                frequency_penalty=[0.0, 2.0, -0.25][n // 2 % 3],
                logprobs=[None, 0, 20][n // 5 % 3],
            )
        )
    logits = rng.normal(0, 2, (NUM_ROWS, WIDTH, V)).astype(np.float32)
    histories = [rng.integers(0, V, n % 6).tolist() * (n % 3) for n in range(NUM_ROWS)]
    # What would be drawn next, so that a draft that is not counted shows.
    drafts = np.argmax(logits, axis=-1)[:, 1:].astype(np.int32)
    positions = rng.integers(0, 1000, (NUM_ROWS, WIDTH)).astype(np.int32)
    return rows, logits, histories, drafts, positions


def run(rows, logits, histories, drafts, positions):
    return jit_draw(
        jnp.asarray(logits), sampling_of(rows), jnp.asarray(positions), counts_of(histories),
        jnp.asarray(drafts),
    )  # fmt: skip


def test_greedy_rows_take_the_best_of_the_changed_logits(case):
    """Each draw as if the drafts before it had been drawn."""
    rows, logits, histories, drafts, _ = case
    drawn, _ = run(*case)
    moved = 0
    for row, params in enumerate(rows):
        for place in range(WIDTH):
            history = histories[row] + drafts[row, :place].tolist()
            best = np.argmax(changed(logits[row, place], params, history))
            if params.temperature == 0:
                assert drawn[row, place] == best
                moved += best != np.argmax(logits[row, place])
    assert moved > 3


def test_a_draw_is_the_plain_draw_of_changed_logits(case):
    """What bias and penalties do is done before temperature and limits."""
    rows, logits, histories, drafts, positions = case
    drawn, _ = run(*case)
    for place in range(WIDTH):
        alone = [
            changed(logits[row, place], params, histories[row] + drafts[row, :place].tolist())
            for row, params in enumerate(rows)
        ]
        plain = [
            dataclasses.replace(
                params, logit_bias={}, presence_penalty=0, frequency_penalty=0, logprobs=None
            )
            for params in rows
        ]
        expected = jit_sample(np.stack(alone), sampling_of(plain), positions[:, place])
        np.testing.assert_array_equal(drawn[:, place], expected)


def masks_for(allowed, is_masked):
    """bool[B, n, V] as `TokenMasks`."""
    words = np.zeros((*allowed.shape[:-1], 64), bool)
    words[..., :V] = allowed
    bits = np.packbits(words, axis=-1, bitorder="little").view(np.uint32)
    return TokenMasks(is_masked=jnp.asarray(is_masked), bits=jnp.asarray(bits))


def test_a_masked_row_draws_what_it_may_and_others_what_they_did(case):
    """The plain draw of logits of which the others are minus infinity; word ends included."""
    rows, logits, histories, drafts, positions = case
    rng = np.random.default_rng(6)
    allowed = rng.random(logits.shape) < 0.2
    allowed[..., [0, 31, 32, V - 1]] |= rng.random((NUM_ROWS, WIDTH, 4)) < 0.5
    allowed[..., 7] |= ~allowed.any(axis=-1)
    is_masked = np.arange(NUM_ROWS) % 4 > 0
    free, _ = run(*case)

    def masked(logits, masks):
        return jit_draw(
            jnp.asarray(logits), sampling_of(rows), jnp.asarray(positions), counts_of(histories),
            jnp.asarray(drafts), None, masks,
        )[0]  # fmt: skip

    drawn = masked(logits, masks_for(allowed, is_masked))
    np.testing.assert_array_equal(drawn[~is_masked], free[~is_masked])
    assert np.take_along_axis(allowed, drawn[..., None], axis=-1)[is_masked].all()
    cut = np.where(allowed | ~is_masked[:, None, None], logits, -np.inf)
    np.testing.assert_array_equal(drawn, masked(cut, masks_for(allowed, is_masked & False)))
    assert (drawn != free)[is_masked].mean() > 0.5


def test_simple_rows_draw_the_same_of_what_they_may_by_both_programs(case):
    _, logits, histories, drafts, positions = case
    allowed = np.random.default_rng(7).random(logits.shape) < 0.3
    allowed[..., 7] |= ~allowed.any(axis=-1)
    masks = masks_for(allowed, np.arange(NUM_ROWS) % 4 > 0)
    settings = sampling_of(warm_rows())
    arguments = jnp.asarray(positions), counts_of(histories), jnp.asarray(drafts), None, masks
    drawn, _ = jit_draw(jnp.asarray(logits), settings.simplified(), *arguments)
    np.testing.assert_array_equal(drawn, jit_draw(jnp.asarray(logits), settings, *arguments)[0])


def test_a_row_gets_the_same_bits_beside_any_others(case):
    drawn, logprobs = run(*case)
    order = np.random.default_rng(2).permutation(NUM_ROWS)
    rows, logits, histories, drafts, positions = case
    moved = run(
        [rows[n] for n in order], logits[order], [histories[n] for n in order], drafts[order],
        positions[order],
    )  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[order]), moved, (drawn, logprobs))
    for row in range(NUM_ROWS):  # beside rows that ask for nothing
        others = [SamplingParams(logprobs=1)] * NUM_ROWS
        others[row] = rows[row]
        alone, its_logprobs = run(others, *case[1:])
        np.testing.assert_array_equal(alone[row], drawn[row])
        jax.tree.map(
            lambda a, b, n=row: np.testing.assert_array_equal(a[n], b[n]), its_logprobs, logprobs
        )


def test_logprobs_are_those_of_the_logits_as_they_came(case):
    drawn, logprobs = run(*case)
    logits = case[1].astype(np.float64)
    expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    own = np.take_along_axis(expected, drawn[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(logprobs.drawn, own, rtol=2e-6, atol=2e-6)
    best = np.argsort(-case[1], axis=-1, kind="stable")[..., :20]
    np.testing.assert_array_equal(logprobs.token_ids, best)
    top = np.take_along_axis(expected, best, axis=-1)
    np.testing.assert_allclose(logprobs.top, top, rtol=2e-6, atol=2e-6)


def test_equal_logits_and_small_vocabularies():
    ask = sampling_of([SamplingParams(logprobs=5)])
    none, logits = np.zeros((1, 0), np.int32), np.zeros((1, 1, 8), np.float32)
    drawn, logprobs = jit_draw(logits, ask, np.zeros((1, 1), np.int32), None, none)
    assert drawn.tolist() == [[0]]
    np.testing.assert_array_equal(logprobs.token_ids[0, 0], np.arange(8))
    np.testing.assert_allclose(logprobs.top, -np.log(8), rtol=1e-6)


def test_who_asks_for_nothing_gets_zeros(case):
    plain = [SamplingParams(temperature=1.0), SamplingParams()] * (NUM_ROWS // 2)
    _, logprobs = run(plain, *case[1:])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(logprobs))


@pytest.mark.parametrize("min_p", [0.0, 1e-30, 0.05, 0.3, 1.0])
def test_min_p_leaves_what_is_likely_enough_after_the_temperature(min_p):
    logits = np.array([2.0, 2.0, 1.5, 0.0, -1.0, -60.0], np.float32)
    weights = np.exp((logits - 2.0) / 0.8)
    sampling = ds.make_sampling(3000, temperature=0.8, min_p=min_p)
    rows = np.broadcast_to(logits, (3000, 6))
    tokens = set(np.asarray(jit_sample(rows, sampling, np.arange(3000, dtype=np.int32))).tolist())
    assert tokens == {n for n in range(6) if weights[n] >= min_p and weights[n] > 1e-3}


def warm_rows():
    """Rows that ask for a temperature and min-p alone, and greedy ones."""
    return [
        SamplingParams(temperature=[0.0, 0.7, 1.5][n % 3], min_p=[0.0, 0.1][n % 2], seed=n)
        for n in range(NUM_ROWS)
    ]


def test_simple_draws_are_those_of_the_general_step(case):
    _, logits, histories, drafts, positions = case
    settings = sampling_of(warm_rows())
    arguments = jnp.asarray(positions), counts_of(histories), jnp.asarray(drafts)
    general, _ = jit_draw(jnp.asarray(logits), settings, *arguments)
    simple, logprobs = jit_draw(jnp.asarray(logits), settings.simplified(), *arguments)
    np.testing.assert_array_equal(simple, general)
    assert np.any(simple != np.argmax(logits, axis=-1))
    assert not np.any(logprobs.top)


@pytest.mark.parametrize("is_simple", [False, True])
def test_on_a_gpu_nothing_is_decided_at_run_time(case, is_simple, monkeypatch):
    """The host would wait for it. Loops have a number of rounds that is known."""
    monkeypatch.setattr(draws_module.backend, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(
        draws_module, "limit_tokens", functools.partial(limit_tokens, backend="reference")
    )
    monkeypatch.setattr(
        draws_module, "select_top_k", functools.partial(select_top_k, backend="reference")
    )
    rows, logits, histories, drafts, positions = case
    settings = sampling_of(rows).simplified() if is_simple else sampling_of(rows)
    allowed = np.ones(logits.shape, bool)
    masks = None if is_simple else masks_for(allowed, np.arange(NUM_ROWS) % 2 > 0)
    arguments = jnp.asarray(positions), counts_of(histories), jnp.asarray(drafts), None, masks
    # Of a function that no other test has traced.
    traced = jax.make_jaxpr(lambda *given: draw(*given))(jnp.asarray(logits), settings, *arguments)
    shown = str(traced)
    assert "cond[" not in shown
    assert "while[" not in shown
    assert ("scan[" in shown) != is_simple


@pytest.fixture(scope="module")
def noting_draw():
    """A program of `draw`, and which of the three costly parts it has run: a set of their names."""
    ran = set()

    def noting(name, compute):
        def noted(*arguments):
            jax.debug.callback(lambda: ran.add(name))
            return compute(*arguments)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_noise", "limit_tokens", "_logprobs"):
            patch.setattr(draws_module, name, noting(name, getattr(draws_module, name)))
        yield jax.jit(lambda *given: draw(*given)), ran


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, set()),
        ({"logit_bias": {3: 1.0}, "frequency_penalty": 1.0, "top_k": 3}, set()),
        ({"temperature": 1.0}, {"_noise"}),
        ({"temperature": 1.0, "top_p": 0.9}, {"_noise", "limit_tokens"}),
        ({"temperature": 1.0, "top_k": 3}, {"_noise", "limit_tokens"}),
        ({"logprobs": 0}, {"_logprobs"}),
    ],
)
def test_a_cpu_computes_what_some_row_asks_for(case, asked, expected, noting_draw):
    """Each of the three takes tens of milliseconds a row, of V4's vocabulary."""
    noted, ran = noting_draw
    ran.clear()
    _, logits, histories, drafts, positions = case
    settings = sampling_of([SamplingParams()] * (NUM_ROWS - 1) + [SamplingParams(**asked)])
    masks = masks_for(np.ones(logits.shape, bool), np.ones(NUM_ROWS, bool))
    arguments = jnp.asarray(positions), counts_of(histories), jnp.asarray(drafts), None, masks
    jax.block_until_ready(noted(logits, settings, *arguments))
    jax.effects_barrier()
    assert ran == expected


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_on_a_gpu_the_program_is_not_seen(num_rows):
    """Simple rows draw the same by both programs, and all rows beside any others, of V4's size."""
    vocab, kinds = 129_280, ({}, {"top_p": 0.9}, {"top_k": 40, "logit_bias": {7: 9.0}})
    rows = [
        SamplingParams(temperature=[0.7, 1.0, 1.6, 0.0][n % 4], seed=n, **kinds[n % 3])
        for n in range(num_rows)
    ]
    rng = np.random.default_rng(num_rows)
    logits = jnp.asarray(rng.normal(0, 2.5, (num_rows, 1, vocab)).astype(np.float32))
    positions = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    none = jnp.zeros((num_rows, 0), jnp.int32)

    def drawn(rows, settings=None):
        settings = sampling_of(rows) if settings is None else settings
        return jit_draw(logits, settings, positions, None, none)[0]

    together = drawn(rows)
    for other in (SamplingParams(temperature=1.0), SamplingParams(top_p=0.5, logprobs=3)):
        for kind in range(3):
            beside = [row if n % 3 == kind else other for n, row in enumerate(rows)]
            own = slice(kind, None, 3)
            np.testing.assert_array_equal(drawn(beside)[own], together[own])
    plain = [dataclasses.replace(row, top_p=1, top_k=0, logit_bias={}) for row in rows]
    general = drawn(plain)
    np.testing.assert_array_equal(drawn(plain, sampling_of(plain).simplified()), general)
    np.testing.assert_array_equal(general[::3], together[::3])


@pytest.mark.slow
def test_masks_and_one_more_field_are_obeyed_beside_simple_settings(case):
    _, logits, histories, drafts, positions = case
    settings = sampling_of(warm_rows()).simplified()
    arguments = jnp.asarray(positions), counts_of(histories), jnp.asarray(drafts)
    bits = jnp.zeros((NUM_ROWS, WIDTH, 2), jnp.uint32).at[..., 0].set(1 << 7)
    masks = TokenMasks(is_masked=jnp.ones(NUM_ROWS, bool), bits=bits)
    drawn, _ = jit_draw(jnp.asarray(logits), settings, *arguments, masks=masks)
    np.testing.assert_array_equal(drawn, 7)
    first = dataclasses.replace(settings.completed(), top_k=jnp.ones(NUM_ROWS, jnp.int32))
    drawn, _ = jit_draw(jnp.asarray(logits), first, *arguments)
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=-1))


def test_settings_are_simple_where_no_row_asks_for_more():
    rows = warm_rows()
    assert all(row.is_simple for row in rows)
    assert type(ds.make_sampling(NUM_ROWS, rows)) is Sampling
    for more in (
        {"top_k": 1},
        {"top_p": 0.5},
        {"logit_bias": {3: 1.0}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logprobs": 0},
        {"grammar": ds.serving.Grammar("regex", "a")},
    ):
        assert not SamplingParams(**more).is_simple
    one = [*rows[1:], SamplingParams(top_k=3)]
    assert type(ds.make_sampling(NUM_ROWS, one)) is FullSampling
    completed = sampling_of(rows).simplified().completed()
    for name, value in vars(stack_sampling(rows, with_stops=False)).items():
        np.testing.assert_array_equal(getattr(completed, name), value, err_msg=name)
