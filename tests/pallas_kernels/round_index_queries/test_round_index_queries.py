"""Index queries, rotated and rounded as keys are: to the bit what the cache's formats say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from benchmarks.cases.cache import COMPILED_QUERIES, IC, INDEX_HEADS, ROPE
from helpers import inputs, slow
from helpers.arrays import ones, zeros
from helpers.layer_cases import KERNEL, assert_index_queries_alike
from pallas_kernels import CACHE_FORMATS
from pallas_kernels.common import numbers
from pallas_kernels.common.norm_rope import rotate

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
    pytest.mark.unoptimised,
]

FREQUENCIES = 160000.0 ** -(np.arange(ROPE // 2, dtype=np.float32) / np.float32(ROPE // 2))
POSITIONS = [0, 1, 7, 127, 65_535, 1_000_000]
KEYS = {"f32": "f32", "bf16": "bf16", "mxfp4": "fp8_ue8m0", "fp8": "fp8_ue8m0_fp8_index"}
KEYS["nvfp4"] = "fp8_per_entry"
KEYS["mxfp4 of V4.1"] = "fp4_e4m3"
each_key = pytest.mark.parametrize("key", KEYS)
each_key_and_dtype = pytest.mark.parametrize(
    ("key", "dtype"),
    slow.all_but(
        [("mxfp4", jnp.bfloat16)],
        [(key, dtype) for key in KEYS for dtype in (jnp.bfloat16, jnp.float32)],
    ),
)


def codec_of(key):
    return CACHE_FORMATS[KEYS[key]].index_key


@functools.partial(jax.jit, static_argnames=("codec", "backend"))
def round_queries(queries, frequencies, positions, *, codec, backend):
    return pk.round_index_queries(queries, frequencies, positions, codec=codec, backend=backend)


def both(queries, positions, codec, frequencies=FREQUENCIES):
    arguments = (queries, jnp.asarray(frequencies), jnp.asarray(positions, jnp.int32))
    return (
        np.asarray(round_queries(*arguments, codec=codec, backend=backend))
        for backend in (KERNEL, "reference")
    )


def assert_same_bits(actual, expected):
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def draw(num_tokens, num_heads, dtype, dim=IC, seed=0):
    rng = np.random.default_rng(seed)
    magnitude = 10.0 ** rng.integers(-3, 3, size=(num_tokens, num_heads, 1))
    return jnp.asarray(rng.normal(size=(num_tokens, num_heads, dim)) * magnitude, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "dtype"),
    [(key, dtype) for key in KEYS for dtype in (jnp.bfloat16, jnp.float32)],
)
def test_rotated_queries_are_rounded_as_the_reference_rounds_them(lane, key, dtype):
    """On a GPU sine and cosine may differ in their last bit; then a code may, by a step."""
    queries, codec = draw(len(POSITIONS), 11, dtype), codec_of(key)
    actual, expected = both(queries, POSITIONS, codec)
    if lane == "interpreter":
        assert_same_bits(actual, expected)
        return
    assert_index_queries_alike(actual, expected)


def midpoints(key):
    """f32[IC] with values halfway between codes of either sign, where every scale is 1."""
    step, largest = (2.0**-4, 448.0) if key == "fp8" else (0.25, 6.0)
    target = np.minimum(np.tile(np.arange(32) * step, 4), largest)
    target[::32] = largest
    return (target * np.where(np.arange(IC) % 3 == 0, -1, 1)).astype(np.float32)


def hadamard_rotate(x):
    return np.asarray(jax.jit(numbers.hadamard_rotate)(x))


@functools.partial(jax.jit, static_argnames="codec")
def stored_and_read(queries, *, codec):
    """What a key of these values would be read as."""
    return codec.decode(codec.encode(queries, 0), queries.shape[-1])


def adversarial(key):
    """f32[n, IC]; see the names."""
    zeros = np.zeros(IC, np.float32)
    signed = np.where(np.arange(IC) % 2, -0.0, 0.0).astype(np.float32)
    alone = np.eye(1, IC, 5, dtype=np.float32)[0]
    rows = {
        "zeros": zeros,
        "negative zeros": -zeros,
        "zeros of both signs": signed,
        "a group of zeros": np.where(np.arange(IC) < 32, 0.0, 1.0).astype(np.float32),
        "one value": alone,
        "one negative value": -3 * alone,
        "huge": np.full(IC, 2.0**110, np.float32),
        "huge and tiny": np.where(np.arange(IC) % 2, 1e30, 1e-30).astype(np.float32),
        "tiny": np.full(IC, 2.0**-120, np.float32),
        "powers of two": np.exp2(np.arange(IC) / 8 - 8).astype(np.float32),
    }
    ties = midpoints(key)
    if codec_of(key).rotated:  # which undoes itself, but for what rounding to bf16 takes away
        ties = hadamard_rotate(ties)
        again = hadamard_rotate(ties).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.float32(again), midpoints(key))
    rows |= {"ties": ties, "beside ties": ties * np.float32(1 + 2.0**-7)}
    return np.stack(list(rows.values()))


@pytest.mark.slow
@each_key_and_dtype
def test_ties_zeros_and_extremes_are_rounded_to_the_bit(lane, key, dtype):
    """At position 0 nothing rotates, so that a GPU has no sine to differ in."""
    codec, rows = codec_of(key), adversarial(key)
    queries = np.stack([rows, -rows, rows / 3], axis=1).astype(dtype)
    positions = np.zeros(len(rows), np.int32)
    actual, expected = both(queries, positions, codec)
    assert_same_bits(actual, expected)
    np.testing.assert_array_equal(expected, stored_and_read(queries, codec=codec))


@pytest.mark.parametrize("key", slow.all_but(["mxfp4"], list(KEYS)))
def test_the_reference_rotates_before_it_rounds(key):
    codec, frequencies = codec_of(key), jnp.asarray(FREQUENCIES)
    queries, positions = draw(len(POSITIONS), 3, jnp.float32), jnp.asarray(POSITIONS, jnp.int32)
    static = {"codec": codec, "backend": "reference"}
    found = round_queries(queries, frequencies, positions, **static)
    rotated = jax.jit(rotate)(queries, positions[:, None], frequencies)
    np.testing.assert_array_equal(found, stored_and_read(rotated, codec=codec))
    unrotated = round_queries(queries, frequencies, jnp.zeros_like(positions), **static)
    assert np.mean(np.asarray(unrotated)[1:] != np.asarray(found)[1:]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "dim"),
    slow.all_but([(9, 64)], [(1, 8), (8, 16), (9, 64), (16, 128), (3, 256)]),
)
@pytest.mark.parametrize("key", slow.all_but(["mxfp4"], list(KEYS)))
def test_any_number_of_heads_and_dims(lane, key, num_heads, dim):
    """Short vectors fill no group, and no tile; sixteen of 128 fill two tiles."""
    queries = draw(2, num_heads, jnp.bfloat16, dim)
    actual, expected = both(queries, [0, 0], codec_of(key), FREQUENCIES[: dim // 4])
    assert_same_bits(actual, expected)


@pytest.mark.gpu
@each_key
def test_twenty_runs_at_real_shapes_are_bitwise_equal(key):
    queries = draw(64, 64, jnp.bfloat16)
    first, expected = both(queries, np.arange(64) * 1000, codec_of(key))
    assert_index_queries_alike(first, expected)
    for _ in range(19):
        again, _ = both(queries, np.arange(64) * 1000, codec_of(key))
        assert_same_bits(again, first)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("queries", ones((3, 8)), "queries must have rank 3"),
        ("frequencies", ones((1, 2)), "frequencies must have rank 1"),
        ("frequencies", ones(5), "frequencies must have one for each pair of at most 8 dims"),
        ("frequencies", ones(0), "frequencies must have one for each pair"),
        ("positions", zeros(2, jnp.int32), "positions must agree on T"),
        ("positions", zeros(3), "positions must be int32"),
    ],
)
def test_an_error_names_the_argument_that_is_wrong(name, wrong, message):
    arguments = inputs.valid_arguments("round_index_queries") | {name: wrong}
    with pytest.raises(ValueError, match=message):
        pk.round_index_queries(**arguments)


def test_a_hadamard_rotation_needs_a_power_of_two():
    arguments = inputs.valid_arguments("round_index_queries") | {"queries": jnp.ones((3, 2, 12))}
    pk.round_index_queries(**arguments)
    with pytest.raises(ValueError, match=r"queries must have a power of two .*\(3, 2, 12\)"):
        pk.round_index_queries(**arguments | {"codec": codec_of("mxfp4")})


def aot_case(key, tokens, heads=INDEX_HEADS):
    def round_index_queries(*args):
        return pk.round_index_queries(*args, codec=codec_of(key), backend=KERNEL)

    specs = (
        jax.ShapeDtypeStruct((tokens, heads, IC), jnp.bfloat16),
        jax.ShapeDtypeStruct((ROPE // 2,), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    return f"{key} {tokens} tokens {heads} heads", round_index_queries, specs


AOT_CASES = [aot_case(*case) for case in COMPILED_QUERIES]
