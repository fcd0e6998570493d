import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from helpers.page_reader import E2M1, E4M3
from pallas_kernels.common import numbers

both_modes = pytest.mark.parametrize(
    "mode", [pytest.param(lambda f: f, marks=pytest.mark.slow), jax.jit], ids=["eager", "jit"]
)
both_signs = pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])


def around_midpoints(values, sign):
    """Every midpoint of adjacent values with its f32 neighbours, and the codes they must get.

    `values` are the non-negative ones in code order, so that the code is the index.
    """
    codes = np.arange(len(values) - 1)
    midpoint = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    below, above = np.nextafter(midpoint, np.float32(0)), np.nextafter(midpoint, np.float32(1e9))
    even = codes + codes % 2
    x = np.concatenate([below, midpoint, above])
    expected = np.concatenate([codes, even, codes + 1])
    return sign * x, expected


@both_modes
def test_every_e4m3_code_decodes_to_its_definition(mode):
    decoded = mode(numbers.decode_e4m3)(jnp.asarray(np.arange(256, dtype=np.uint8)))
    decoded = np.asarray(decoded)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, E4M3)
    np.testing.assert_array_equal(np.signbit(decoded[128]), True)


@both_modes
def test_every_e4m3_value_encodes_to_its_own_code(mode):
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    encoded = mode(numbers.encode_e4m3)(jnp.asarray(E4M3[codes], jnp.float32))
    assert encoded.dtype == jnp.uint8
    np.testing.assert_array_equal(encoded, codes)


@pytest.mark.parametrize(
    ("encode", "values", "sign_bit"),
    [(numbers.encode_e4m3, E4M3[:0x7F], 0x80), (numbers.encode_e2m1, E2M1[:8], 8)],
    ids=["e4m3", "e2m1"],
)
@both_signs
@both_modes
def test_b6_ties_go_to_the_even_code_and_neighbours_to_the_nearest(
    mode, sign, encode, values, sign_bit
):
    x, expected = around_midpoints(values, sign)
    assert x.shape == (3 * (len(values) - 1),)
    encoded = mode(encode)(jnp.asarray(x))
    np.testing.assert_array_equal(encoded, expected | (sign_bit if sign < 0 else 0))


@both_signs
@both_modes
def test_e4m3_saturates_above_448_instead_of_becoming_nan(mode, sign):
    x = sign * np.float32([448.0001, 456, 463.99, 464, 464.01, 480, 512, 1e5, 3.4e38, np.inf])
    encoded = mode(numbers.encode_e4m3)(jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(encoded, np.full(x.shape, 0x7E if sign > 0 else 0xFE))


@both_modes
def test_e4m3_underflows_to_a_zero_of_the_same_sign(mode):
    x = np.float32([0.0, -0.0, 2**-11, -(2**-11), 1e-30, -1e-30])
    encoded = mode(numbers.encode_e4m3)(jnp.asarray(x))
    np.testing.assert_array_equal(encoded, [0, 0x80] * 3)


@both_modes
def test_e4m3_keeps_nan(mode):
    encoded = mode(numbers.encode_e4m3)(jnp.asarray([np.nan], jnp.float32))
    assert int(encoded[0]) & 0x7F == 0x7F


@both_modes
def test_every_e2m1_code_decodes_and_encodes_back(mode):
    codes = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(E2M1[:8], [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    decoded = mode(numbers.decode_e2m1)(jnp.asarray(codes))
    np.testing.assert_array_equal(decoded, E2M1)
    np.testing.assert_array_equal(np.signbit(decoded), codes >= 8)
    np.testing.assert_array_equal(mode(numbers.encode_e2m1)(decoded), codes)


@both_signs
@both_modes
def test_e2m1_saturates_at_6_and_keeps_the_sign_of_zero(mode, sign):
    x = np.float32([6.0001, 7, 1e30, np.inf, np.nan, 0.0, 1e-30, 0.25])
    x = np.copysign(x, np.float32(sign))
    encoded = mode(numbers.encode_e2m1)(jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(encoded, np.uint8([7, 7, 7, 7, 7, 0, 0, 0]) | (8 * (sign < 0)))


@both_modes
def test_ue8m0_is_the_smallest_power_of_two_at_or_above_every_power_and_its_neighbours(mode):
    code = np.arange(1, 255)
    power = (2.0 ** (code - 127.0)).astype(np.float32)
    below, above = np.nextafter(power, np.float32(0)), np.nextafter(power, np.float32(np.inf))
    encode = mode(numbers.encode_ue8m0)
    np.testing.assert_array_equal(encode(jnp.asarray(power)), code)
    np.testing.assert_array_equal(encode(jnp.asarray(above)), code + 1)
    np.testing.assert_array_equal(encode(jnp.asarray(below)), code)  # itself a ceiling, not nearest


@both_modes
def test_ue8m0_decodes_every_code_from_1_to_254(mode):
    code = np.arange(1, 255, dtype=np.uint8)
    decoded = mode(numbers.decode_ue8m0)(jnp.asarray(code))
    assert decoded.dtype == jnp.float32
    np.testing.assert_array_equal(decoded, 2.0 ** (code - 127.0))


@both_modes
def test_even_index_lies_in_the_low_nibble(mode):
    packed = mode(numbers.pack_nibbles)(jnp.asarray([[0x1, 0x2, 0xF, 0x0]], jnp.uint8))
    np.testing.assert_array_equal(packed, [[0x21, 0x0F]])


@pytest.mark.parametrize("length", slow.all_but([0, 3, 16], [0, 1, 2, 3, 15, 16, 128]))
@both_modes
def test_nibbles_come_back_and_an_odd_one_is_filled_with_zero(mode, length):
    code = np.random.default_rng(length).integers(0, 16, (3, length), dtype=np.uint8)
    packed = mode(numbers.pack_nibbles)(jnp.asarray(code))
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, -(-length // 2))
    unpacked = np.asarray(mode(numbers.unpack_nibbles)(packed))
    np.testing.assert_array_equal(unpacked[:, :length], code)
    np.testing.assert_array_equal(unpacked[:, length:], 0)


@both_modes
def test_every_sign_of_a_word_goes_to_its_bit_and_comes_back(mode):
    for code in range(8):
        alone = np.array([8 << (4 * code)], np.uint32)
        expected = 8 * code + 7 if code < 4 else 8 * (code - 4) + 3
        moved = np.asarray(mode(numbers.interleave_signs)(jnp.asarray(alone)))
        assert (moved.dtype, int(moved[0])) == (jnp.uint32, 1 << expected)
        assert np.asarray(mode(numbers.restore_signs)(moved))[0] == alone[0]


@both_modes
def test_magnitudes_stay_where_they_are_and_signs_lie_where_two_masks_give_them(mode):
    code = np.random.default_rng(0).integers(0, 16, (1000, 8), dtype=np.uint32)
    words = np.sum(code << (4 * np.arange(8, dtype=np.uint32)), axis=1, dtype=np.uint32)
    moved = np.asarray(mode(numbers.interleave_signs)(jnp.asarray(words)))
    np.testing.assert_array_equal(moved & 0x77777777, words & 0x77777777)
    for half, word in ((code[:, :4], moved), (code[:, 4:], moved << 4)):
        top = (word & 0x80808080).astype("<u4").view(np.uint8).reshape(-1, 4)
        np.testing.assert_array_equal(top, (half & 8) << 4)
    np.testing.assert_array_equal(mode(numbers.restore_signs)(jnp.asarray(moved)), words)


@pytest.mark.parametrize(("length", "size"), [(448, 64), (24, 64), (48, 64), (100, 64), (16, 16)])
def test_groups_come_back_and_a_short_one_is_filled_with_zeros(length, size):
    x = np.arange(1, 2 * length + 1, dtype=np.float32).reshape(2, length)
    groups = np.asarray(jax.jit(numbers.split_groups, static_argnums=1)(x, size))
    assert groups.shape == (2, -(-length // size), size)
    np.testing.assert_array_equal(groups.reshape(2, -1)[:, length:], 0)
    joined = jax.jit(numbers.join_groups, static_argnums=1)(groups, length)
    np.testing.assert_array_equal(joined, x)


def sylvester(n):
    """H_1 = [1]; H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix


@pytest.mark.parametrize("n", slow.all_but([2, 128], [1, 2, 16, 64, 128]))
def test_hadamard_is_sylvesters_matrix_over_root_n_in_natural_order(n):
    rotate = jax.jit(numbers.hadamard_rotate)
    # Columns of the identity give the matrix itself, each element rounded once.
    rotated = rotate(np.eye(n, dtype=np.float32))
    np.testing.assert_array_equal(rotated, sylvester(n).astype(np.float32) * np.float32(n**-0.5))
    # Whole numbers below 2**17 are summed exactly, so that again one product rounds.
    x = np.random.default_rng(n).integers(-1000, 1000, (2, 5, n)).astype(np.float32)
    expected = (x @ sylvester(n)).astype(np.float32) * np.float32(n**-0.5)
    np.testing.assert_array_equal(rotate(jnp.asarray(x)), expected)


@pytest.mark.parametrize("n", slow.all_but([16, 128], [1, 16, 64, 128]))
def test_hadamard_twice_is_the_identity(n):
    x = np.random.default_rng(n).integers(-1000, 1000, (7, n)).astype(np.float32)
    twice = jax.jit(lambda x: numbers.hadamard_rotate(numbers.hadamard_rotate(x)))(jnp.asarray(x))
    # A tree of log2(n) sums is off by at most log2(n) half ulps of sum|y| <= root n * |y|_2 <=
    # n * 1000; two products and the inexact 1 / root n, used twice, add four. All / root n.
    # Where n is a power of four nothing rounds.
    bound = 0.0 if n in (1, 16, 64) else (np.log2(n) + 4) * 2.0**-24 * 1000 * n**0.5
    np.testing.assert_allclose(twice, x, rtol=0, atol=bound)
    assert bound < 0.1, "the bound must reject an unnormalised or permuted matrix"


@pytest.mark.parametrize("n", [3, 12, 96, 127])
def test_hadamard_of_another_length_names_the_way_out(n):
    with pytest.raises(ValueError, match=rf"power of two.*{n}.*'f32' or 'bf16'"):
        numbers.hadamard_rotate(jnp.zeros((2, n)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow.all_but(
        ["encode_e4m3", "encode_e2m1", "encode_ue8m0"],
        ["encode_e4m3", "encode_e2m1", "encode_ue8m0", "hadamard_rotate"],
    ),
)
def test_jit_and_eager_give_the_same_bits(name):
    rng = np.random.default_rng(0)
    x = np.ldexp(rng.normal(size=(64, 128)), rng.integers(-12, 10, (64, 128))).astype(np.float32)
    function = getattr(numbers, name)
    x = jnp.abs(x) if name == "encode_ue8m0" else jnp.asarray(x)
    eager, jitted = np.asarray(function(x)), np.asarray(jax.jit(function)(x))
    assert eager.tobytes() == jitted.tobytes()
