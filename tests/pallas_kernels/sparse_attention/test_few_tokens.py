"""Rungs 2 and 4 of sparse attention of few tokens, and what rung 3 compiles."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.sparse_attention import COMPILED_FEW_TOKENS, SCALE
from helpers import attention_cases, slow
from pallas_kernels import Backend, get_cache_format, sparse_attention
from pallas_kernels.gpu.devices import H200
from pallas_kernels.sparse_attention import triton_few
from pallas_kernels.sparse_attention.reference import Arguments

pytestmark = pytest.mark.unoptimised

SIZES = attention_cases.SMALLEST_FOR_A_KERNEL
TOKENS = ((300, 9, 0), (1, 1, 2))
FORMATS = ["fp8_ue8m0", "fp8_per_entry", "bf16"]


def draw(name="fp8_ue8m0", *, sizes=SIZES, **options):
    return attention_cases.draw_case(sizes, get_cache_format(name).entry, *TOKENS, **options)


def attend(case, *arguments, **changes):
    return case.attend(*arguments, backend="triton_gpu", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow.all_but(["fp8_per_entry"], FORMATS))
def test_the_kernel_is_the_oracle_in_every_format(lane, name):
    case = draw(name)
    actual = attend(case)
    assert case.error(actual) < 1
    no_sink = np.full(SIZES.num_heads, -np.inf, np.float32)
    broken = [
        {"sink": no_sink},
        {"window": SIZES.window - 1},
        {"window": SIZES.window + 1},
        {"selected": slice(1, None)},
    ]
    assert min(case.error(actual, **variant) for variant in broken) > 3


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", slow.all_but([24], [8, 16, 24, 128]))
def test_heads_that_do_not_fill_a_program(lane, num_heads):
    """A device's share of a model's heads, and Pro's."""
    case = draw(sizes=dataclasses.replace(SIZES, num_heads=num_heads))
    assert case.error(attend(case)) < 1


@pytest.mark.slow
def test_indices_that_name_nothing_are_not_read(lane):
    """-1 between real ones, and beyond the table; the pools are poison there."""
    case = draw()
    outside = np.full((SIZES.num_tokens, 3), 10**6, np.int32)
    scattered = np.insert(case.arguments["selected"], [1, 5], -1, axis=1)
    selected = np.concatenate([outside, scattered], axis=1)
    assert case.error(attend(case, selected=selected, visible=None)) < 1


@pytest.mark.slow
def test_entries_beyond_what_a_token_sees_are_not_looked_at(lane):
    case = draw()
    selected = case.arguments["selected"]
    nothing = np.full((SIZES.num_tokens, 6 * triton_few.KEYS - SIZES.top_k), -1, np.int32)
    wide = np.concatenate([selected, nothing], axis=1)
    looked = attend(case, selected=wide, visible=None)
    wide[:, -SIZES.top_k :] = np.roll(selected, 1, axis=1)
    assert case.error(attend(case, selected=wide, visible=None)) > 3
    np.testing.assert_array_equal(attend(case, selected=wide), looked)


@pytest.mark.slow
def test_nothing_visible_gives_zeros_and_the_window_alone_is_enough(lane):
    case = draw()
    nobody = np.full(SIZES.num_tokens, -1, np.int32)
    no_sink = np.full(SIZES.num_heads, -np.inf, np.float32)
    out = attend(case, no_sink, slots=nobody, segment_ids=nobody)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    alone = attend(case, pool=None, selected=None)
    assert case.error(alone, selected=slice(0)) < 1


@pytest.mark.slow
def test_inverse_rope_follows(lane):
    """As in the other kernels, whose sums are combined by the same launch."""
    case = draw()
    frequencies = np.float32(100.0 ** -np.linspace(0, 1, SIZES.rope_dim // 2))
    turned = attend(case, frequencies=frequencies)
    expected = case.attend(backend="reference", frequencies=frequencies)
    allowed = 2 * attention_cases.TOLERANCE * case.expected(absolute=True)
    neighbours = np.roll(allowed, 1, axis=-1) + np.roll(allowed, -1, axis=-1)
    assert np.all(np.abs(turned - expected) <= np.maximum(allowed, neighbours))
    assert np.mean(np.abs(turned - attend(case))[..., -SIZES.rope_dim :] > 0.1) > 0.2


@pytest.mark.slow
def test_a_request_gets_the_same_bits_in_any_row_and_any_blocks(lane):
    cases = [draw(packing=i) for i in range(2)]
    out = [attend(case) for case in cases]
    for request in range(3):
        first, second = (out[i][case.call.request_ids == request] for i, case in enumerate(cases))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", [2.0**-6, 2.0**13])
def test_small_keys_and_large_ones(lane, magnitude):
    """Largest ones of 0.06 and of 37,000: f16 holds no more than 65,504, and steps of 2^-24."""
    case = draw(magnitude=magnitude)
    queries = case.arguments["queries"] * np.asarray(1 / magnitude, jnp.bfloat16)
    case = dataclasses.replace(case, arguments=case.arguments | {"queries": queries})
    assert case.error(attend(case)) < 1


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "top_k", "is_few"),
    [
        (1, 64, 512, True),
        (2, 64, 512, True),
        (3, 64, 512, False),
        (8, 16, 512, True),
        (8, 64, 32, True),
        (1, 64, 1024, True),
        (1, 128, 1024, False),
        (1, 64, 8192, False),
    ],
)
def test_calls_of_few_programs_are_this_kernel_s(num_tokens, num_heads, top_k, is_few):
    """One request of Flash's, and 8 of a fourth of its heads or with few entries."""
    specs = attention_cases.flash_specs(num_tokens, num_heads, top_k, "fp8_ue8m0")
    arguments = Arguments(**specs, scale=1.0)
    assert triton_few.is_fastest(arguments, num_sms=H200.num_sms) == is_few
    projected = arguments._replace(query_eps=1e-6)
    assert not triton_few.is_fastest(projected, num_sms=H200.num_sms)


@pytest.mark.gpu
def test_a_gpu_takes_this_kernel_by_itself():
    case = draw(sizes=dataclasses.replace(SIZES, num_heads=8))
    np.testing.assert_array_equal(case.attend(), attend(case))


def test_queries_as_projected_are_refused():
    frequencies = np.ones(SIZES.rope_dim // 2, np.float32)
    with pytest.raises(
        NotImplementedError, match=r"queries that are normed and rotated, got query_eps=1e-06"
    ):
        attend(draw(), frequencies=frequencies, query_eps=1e-6)


def _at_flash_sizes(arguments):
    return sparse_attention(**arguments, scale=SCALE, backend=Backend.TRITON_GPU)


AOT_CASES = [
    (
        f"{name}_{tokens}x{heads}x{top_k}",
        _at_flash_sizes,
        [attention_cases.flash_specs(tokens, heads, top_k, name)],
    )
    for name, tokens, heads, top_k in COMPILED_FEW_TOKENS
]
