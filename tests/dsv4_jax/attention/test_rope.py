import dataclasses

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.attention import rope
from dsv4_jax.config.layer_types import AttentionType
from helpers import slow
from pallas_kernels.common.norm_rope import rotate

FLASH = ds.DSV4Config.flash()
jit_rotate = jax.jit(rotate, static_argnames="inverse")
# deepseek_v4.md appendix A: the released code's tables, as bits of f32.
MAIN = """
    3f800000 3f3ff911 3f0ff59a 3ed7e89b 3ea1e89b 3e72d423 3e361887 3e088d77
    3dcccccd 3d99940d 3d6655c2 3d2cba15 3d0186e3 3cc2434f 3c91ad39 3c5a7bf2
    3c23d70a 3bf5b9b0 3bb8449c 3b8a2e77 3b4f3e38 3b1b690d 3ae91528 3aaec98e
    3a83126f 3a44948c 3a136a16 39dd1725 39a5cb60 3978a815 393a7753 390bd472
"""
COMPRESS = """
    3f800000 3f300a3a 3ef21c1f 3ea67d01 3e64f92e 3e1d7475 3dd88cb4 3d94e963
    3d4ccccd 3d0cd4fb 3cc1b019 3c8530ce 3c372dbf 3bfbed88 3bad3d5e 3b6e4237
    3b147ae1 3ab714e0 3a5ebdb6 3a0530ce 399bb3af 39305978 38be904d 383e9b5f
    37a3d70c 36b443d0 3677eba6 362a7be8 35ea77ff 35a13bdc 355dbf30 35187c4d
"""
POSITIONS = [0, 1, 2, 3, 127, 128, 4095, 65_535, 65_536, 524_287, 1_000_000, 1_048_575]


def rope_frequencies(config, attn):
    return np.asarray(rope.rope_frequencies(config, attn))


@pytest.mark.parametrize(
    ("attn", "bits"),
    [(AttentionType.SWA, MAIN), (AttentionType.CSA, COMPRESS), (AttentionType.HCA, COMPRESS)],
)
@pytest.mark.parametrize("config", [FLASH, ds.DSV4Config.pro()], ids=["flash", "pro"])
def test_tables_are_the_released_ones_bit_for_bit(config, attn, bits):
    table = rope_frequencies(config, attn)
    assert table.dtype == np.float32
    assert [f"{word:08x}" for word in table.view(np.uint32)] == bits.split()


def test_yarn_keeps_pairs_below_15_and_divides_those_from_25():
    yarn = rope_frequencies(FLASH, AttentionType.CSA)
    plain = rope_frequencies(dataclasses.replace(FLASH, rope_scaling=None), AttentionType.CSA)
    np.testing.assert_array_equal(yarn[:16], plain[:16])
    np.testing.assert_array_equal(yarn[25:], plain[25:] / 16)
    between = yarn[16:25] / plain[16:25]
    assert np.all(np.diff([1, *between, 1 / 16]) < 0)


def test_yarn_does_not_touch_the_main_table():
    plain = dataclasses.replace(FLASH, rope_scaling=None)
    np.testing.assert_array_equal(
        rope_frequencies(FLASH, AttentionType.SWA), rope_frequencies(plain, AttentionType.SWA)
    )


@pytest.mark.parametrize("attn", [AttentionType.SWA, AttentionType.CSA])
def test_cos_and_sin_are_those_of_the_f32_angle(attn):
    """At position 10**6 the f32 angle is up to 0.03 off the exact one, and is what counts."""
    table = rope_frequencies(FLASH, attn)
    positions = np.array(POSITIONS, np.int32)
    ones = np.tile(np.float32([1, 0]), (len(positions), 32))  # each pair (1, 0)
    pairs = np.asarray(jit_rotate(ones, positions, table)).reshape(-1, 32, 2)
    angle = (positions.astype(np.float32)[:, None] * table).astype(np.float64)
    # Half an ulp of a number below 1, and as much again for the function itself.
    ulp = 2.0**-24
    np.testing.assert_allclose(pairs[..., 0], np.cos(angle), rtol=0, atol=ulp)
    np.testing.assert_allclose(pairs[..., 1], np.sin(angle), rtol=0, atol=ulp)
    exact = positions.astype(np.float64)[:, None] * table
    assert np.max(np.abs(pairs[..., 0] - np.cos(exact))) > 1000 * ulp


@pytest.mark.parametrize("dim", slow.all_but([128], [64, 128, 512]))
def test_pairs_are_neighbours_among_the_last_dims(dim):
    table = rope_frequencies(FLASH, AttentionType.SWA)
    x = np.random.default_rng(0).standard_normal((5, dim), dtype=np.float32)
    positions = np.array([0, 1, 7, 1000, 99_999], np.int32)
    actual, nope = np.asarray(jit_rotate(x, positions, table)), dim - 64
    np.testing.assert_array_equal(actual[:, :nope], x[:, :nope])
    np.testing.assert_array_equal(actual[0], x[0])
    complex_in = x[:, nope::2] + 1j * x[:, nope + 1 :: 2]
    angle = positions.astype(np.float32)[:, None] * table
    expected = complex_in * np.exp(1j * angle.astype(np.float64))
    np.testing.assert_allclose(actual[:, nope::2], expected.real, rtol=0, atol=1e-6)
    np.testing.assert_allclose(actual[:, nope + 1 :: 2], expected.imag, rtol=0, atol=1e-6)
    halves = x[:, nope : nope + 32] + 1j * x[:, nope + 32 :]
    halves = halves * np.exp(1j * angle.astype(np.float64))
    assert np.max(np.abs(actual[:, nope : nope + 32] - halves.real)) > 0.1


@pytest.mark.parametrize("attn", [AttentionType.SWA, AttentionType.HCA])
def test_inverse_undoes_the_rotation(attn):
    table = rope_frequencies(FLASH, attn)
    x = np.random.default_rng(1).standard_normal((len(POSITIONS), 3, 512), dtype=np.float32)
    positions = np.array(POSITIONS, np.int32)[:, None]
    turned = jit_rotate(x, positions, table)
    back = jit_rotate(turned, positions, table, inverse=True)
    np.testing.assert_allclose(back, x, rtol=0, atol=2e-6)  # two products and a sum, twice
    assert np.max(np.abs(np.asarray(jit_rotate(turned, positions, table)) - x)) > 0.1
