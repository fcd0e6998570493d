import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.tokens import COMPILED_LIMITED, VOCAB
from helpers import slow
from helpers.arrays import ones, zeros
from pallas_kernels.limit_tokens import limit_tokens, reference, triton_gpu

pytestmark = pytest.mark.unoptimised

BACKENDS = ("reference", "triton_gpu")
INF, NAN = np.inf, np.nan
jit_limit = jax.jit(limit_tokens, static_argnames="backend")
jit_masses = jax.jit(reference.masses_of)

AOT_CASES = [
    (
        f"{num_rows} x {VOCAB}",
        functools.partial(limit_tokens, backend="triton_gpu"),
        [
            jax.ShapeDtypeStruct((num_rows, VOCAB), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ],
    )
    for num_rows in COMPILED_LIMITED
]


def patterns(num_tokens):
    """Rows of scaled logits, the largest 0."""
    rng = np.random.default_rng(num_tokens)
    token = np.arange(num_tokens)
    random = rng.normal(size=num_tokens)
    rows = {
        "flat": random / 100,
        "usual": random * 2,
        "steep": random * 30,
        "all equal": np.zeros(num_tokens),
        "one token": np.where(token == num_tokens // 3, 0.0, -200.0),
        "few values": np.round(random),
        "the last ones best": np.where(token > num_tokens * 7 // 8, 0.0, -1.0 + random / 100),
        "masked": np.where(token % 4, -INF, random),
        "all but one masked": np.where(token == num_tokens - 1, 0.0, -INF),
        "one bit apart": -(1 + token % 1000 * 2.0**-23),
        "denormal": -(token * 7919 % 8191) * 1e-42,
        "zeros of both signs": np.where(token % 3, 0.0, -0.0),
        "no mass beside the best": np.where(token == 5, 0.0, -30.0 + random / 100),
    }
    made = np.stack(list(rows.values())).astype(np.float32)
    return made - made.max(axis=1, keepdims=True)


def settings(num_rows, num_tokens):
    """[n, num_rows] top-k and top-p, so that each row meets all sorts of them."""
    top_k = [0, 1, 2, num_tokens // 2, num_tokens - 1, num_tokens, 2**31 - 1]
    top_p = [1.0, 0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, float(np.nextafter(np.float32(1), 0)), 2.0]
    pairs = [(k, p) for k in top_k for p in top_p]
    order = np.random.default_rng(0).permutation(len(pairs) * num_rows) % len(pairs)
    chosen = np.array(pairs)[order].reshape(-1, num_rows, 2)
    return chosen[..., 0].astype(np.int32), chosen[..., 1].astype(np.float32)


@functools.cache
def masses_of(row):
    """Those of a row, which is given as bytes: many settings share them."""
    return np.asarray(jit_masses(np.frombuffer(row, np.float32)[None]))[0].tolist()


def oracle(scaled, top_k, top_p):
    """bool[V], the tokens that are left, one after the other in whole numbers of any size."""
    num_tokens = len(scaled)
    masses = masses_of(scaled.tobytes())
    unit = 1 << reference.low_bits_of(num_tokens)
    high, low = divmod(sum(masses), unit)
    share = float((np.float32(high) * np.float32(unit) + np.float32(low)) * np.float32(top_p))
    left, before = np.zeros(num_tokens, bool), 0
    for place, token in enumerate(np.argsort(-scaled, kind="stable")):
        within = (top_k == 0 or place < top_k) and (top_p >= 1 or before < share)
        if place and not within:
            break
        left[token] = True
        before += masses[token]
    return left


def left_by(scaled, limits):
    """bool[T, V] from what `limit_tokens` gives."""
    least, last = (np.asarray(limit)[:, None] for limit in limits)
    return (scaled > least) | ((scaled == least) & (np.arange(scaled.shape[1]) <= last))


def check(scaled, top_k, top_p, backend):
    limits = jit_limit(jnp.asarray(scaled), jnp.asarray(top_k), jnp.asarray(top_p), backend=backend)
    expected = np.stack([oracle(*row) for row in zip(scaled, top_k, top_p, strict=True)])
    np.testing.assert_array_equal(left_by(scaled, limits), expected)
    assert [limit.dtype for limit in limits] == [jnp.float32, jnp.int32]
    return limits


@pytest.mark.parametrize("num_tokens", slow.all_but([1, 8], [1, 8, 600]))
def test_the_reference_leaves_what_a_sort_leaves(num_tokens):
    rows = patterns(num_tokens)
    for top_k, top_p in zip(*settings(len(rows), num_tokens), strict=True):
        check(rows, top_k, top_p, "reference")


def test_masses_are_the_softmax_in_whole_numbers():
    """Half a unit of rounding, and what `exp` is off, for which 2**-22 is room."""
    scaled = np.float32([0, -0.0, -1e-6, -0.5, -3, -15, -20.5, -25, -1e30, -INF, NAN])
    found = np.asarray(reference.masses_of(jnp.asarray(scaled)[None])[0], np.float64)
    exact = np.where(np.isnan(scaled), 0, 2.0**30 * np.exp(scaled.astype(np.float64)))
    assert np.all(np.abs(found - exact) <= 0.5 + exact * 2.0**-22)
    assert found[0] == found[1] == 2**30
    assert np.all(found[-4:] == 0)


@pytest.mark.parametrize("num_tokens", [8, 2**17 - 1, 2**17, 151_936, 2**24])
def test_sums_of_masses_fit_whatever_the_vocabulary(num_tokens):
    low_bits = reference.low_bits_of(num_tokens)
    assert num_tokens * 2**low_bits < 2**32
    assert low_bits == {8: 15, 2**17 - 1: 15, 2**17: 14, 151_936: 14, 2**24: 7}[num_tokens]


def test_half_of_a_large_vocabulary_of_equals_is_half():
    scaled = jnp.zeros((1, 2**17), jnp.float32)
    least, last = jit_limit(scaled, jnp.zeros(1, jnp.int32), jnp.float32([0.5]))
    assert (least.item(), last.item()) == (0.0, 2**16 - 1)


@pytest.fixture
def small_parts(monkeypatch):
    """Of 256 tokens, or of 512 where there are eight rows and more."""
    monkeypatch.setattr(triton_gpu, "PARTS", (256, 512))


@pytest.mark.parametrize("num_tokens", slow.all_but([1100], [100, 1024, 1100]))
def test_the_kernel_has_the_bits_of_the_reference(lane, small_parts, num_tokens):
    """In several parts, with ties across their boundaries."""
    rows = patterns(num_tokens)
    every = list(zip(*settings(len(rows), num_tokens), strict=True))
    for top_k, top_p in every if lane == "gpu" else every[::12]:
        limits = check(rows, top_k, top_p, "triton_gpu")
        given = jnp.asarray(rows), jnp.asarray(top_k), jnp.asarray(top_p)
        expected = jit_limit(*given, backend="reference")
        jax.tree.map(np.testing.assert_array_equal, limits, expected)


@pytest.mark.slow
def test_equal_tokens_end_within_any_part(lane, small_parts):
    """The number of the last one is found in the part that holds it."""
    ends = np.int32([1, 255, 256, 257, 511, 512, 700])
    scaled, no_share = np.zeros((len(ends), 700), np.float32), np.ones(len(ends), np.float32)
    least, last = jit_limit(scaled, ends, no_share, backend="triton_gpu")
    np.testing.assert_array_equal(last, ends - 1)
    np.testing.assert_array_equal(least, 0)


@pytest.mark.slow
def test_a_row_alone_and_beside_others_has_the_same_limits(lane):
    """In parts of 2,048 tokens, and of 4,096."""
    rows = patterns(5000)
    top_k, top_p = (each[3] for each in settings(len(rows), 5000))
    together = check(rows, top_k, top_p, "triton_gpu")
    for row in (1, 3, 7):
        own = slice(row, row + 1)
        alone = jit_limit(rows[own], top_k[own], top_p[own], backend="triton_gpu")
        assert [each.item() for each in alone] == [each[row].item() for each in together]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 8, 64])
def test_at_the_size_of_the_vocabulary(num_rows):
    """And twenty runs are equal."""
    rows = np.resize(patterns(VOCAB), (num_rows, VOCAB))
    every = settings(num_rows, VOCAB)
    for top_k, top_p in list(zip(*every, strict=True))[:6]:
        given = jnp.asarray(rows), jnp.asarray(top_k), jnp.asarray(top_p)
        first = jit_limit(*given, backend="triton_gpu")
        expected = jit_limit(*given, backend="reference")
        jax.tree.map(np.testing.assert_array_equal, first, expected)
        for _ in range(20):
            again = jit_limit(*given, backend="triton_gpu")
            jax.tree.map(np.testing.assert_array_equal, again, first)


@pytest.mark.gpu
def test_an_op_on_a_gpu_takes_the_kernel():
    scaled, none = jnp.asarray(patterns(600)[:2]), jnp.zeros(2, jnp.int32)
    lowered = jit_limit.lower(scaled, none, jnp.ones(2, jnp.float32)).as_text()
    assert lowered.count("limit_digit") >= len(triton_gpu.SHIFTS)


VALID = {
    "scaled": zeros((3, 8)),
    "top_k": zeros(3, jnp.int32),
    "top_p": ones(3, jnp.float32),
}
ERRORS = [
    ("scaled", zeros(3), "scaled must have rank 2"),
    ("scaled", zeros((3, 0)), r"V must be within 1 \.\. 16777216, got scaled\.shape=\(3, 0\)"),
    ("scaled", zeros((3, 8), jnp.bfloat16), "scaled must be float32, got bfloat16"),
    ("top_k", zeros(2, jnp.int32), "scaled, top_k, top_p must agree on T"),
    ("top_k", zeros(3, jnp.float32), "top_k must be int32"),
    ("top_p", ones(3, jnp.int32), "top_p must be float32, got int32"),
    ("top_p", ones((3, 1)), "top_p must have rank 1"),
    ("backend", "cuda", "backend must be one of"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), ERRORS)
def test_an_error_names_the_argument_that_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        limit_tokens(**VALID | {name: wrong})


def test_a_named_backend_runs_or_refuses():
    with pytest.raises(NotImplementedError, match="no 'mosaic_gpu' implementation"):
        limit_tokens(**VALID, backend="mosaic_gpu")
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(NotImplementedError, match="need an NVIDIA GPU"),
    ):
        limit_tokens(**VALID, backend="triton_gpu")


@pytest.mark.slow
def test_the_patterns_reject_other_rules():
    """Ties to the higher number, top-p of what top-k leaves, and one token more or less."""
    rows = patterns(100)
    seen = dict.fromkeys(("ties", "one after the other", "one more"), 0)
    for top_k, top_p in zip(*settings(len(rows), 100), strict=True):
        for row, k, p in zip(rows, top_k, top_p, strict=True):
            expected = oracle(row, k, p)
            seen["ties"] += not np.array_equal(oracle(row[::-1], k, p)[::-1], expected)
            among_k = np.where(oracle(row, k, 1.0), row, -INF).astype(np.float32)
            seen["one after the other"] += not np.array_equal(oracle(among_k, 0, p), expected)
            seen["one more"] += k > 0 and not np.array_equal(oracle(row, int(k) + 1, p), expected)
    assert min(seen.values()) > 10
