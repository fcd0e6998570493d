import functools

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import attention_cases, inputs, slow
from helpers.arrays import ones, zeros
from helpers.attention_cases import Sizes
from pallas_kernels import CACHE_FORMATS, get_cache_format, sparse_attention

pytestmark = pytest.mark.unoptimised

C, ROPE, HEADS, W, M, K = 16, 4, 3, 8, 4, 6
NUM_TOKENS = 32
SINK = np.array([0.5, 2.0, -1.0], np.float32)
NO_SINK = np.full(HEADS, -np.inf, np.float32)
MANY_TOKENS = ((300, 9, 0), (7, W + 3, 9))
ONE_TOKEN = ((M - 1, W, 2 * W - 1), (1, 1, 1))
F32 = get_cache_format("f32").entry
MAX_ULPS = 1.0
"""Between outputs and float64, times the square root of C products in a logit and W + K terms in
the sums; the unit is an f32 ulp of the largest key. Measured: at most 0.21."""

SIZES = Sizes(
    dim=C,
    rope_dim=ROPE,
    num_heads=HEADS,
    window=W,
    compression_ratio=M,
    top_k=K,
    num_tokens=NUM_TOKENS,
)
draw_case = functools.partial(attention_cases.draw_case, SIZES)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(MANY_TOKENS, id="many tokens"),
        pytest.param(ONE_TOKEN, id="one token", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", slow.all_but(["fp8_ue8m0", "f32"], list(CACHE_FORMATS)))
def test_window_and_entries_share_one_softmax_in_every_format(name, tokens):
    case = draw_case(get_cache_format(name).entry, *tokens)
    assert case.ulps(case.attend(), case.expected()) < MAX_ULPS


@pytest.mark.parametrize("length", [0, 1, M - 1, M, W - 1, W, W + 1, 16 * W - 1])
def test_every_length_round_a_boundary(length):
    case = draw_case(F32, (length, length + 2, 3 * W), (2, W + 1, 1))
    assert case.ulps(case.attend(), case.expected()) < MAX_ULPS


@pytest.mark.parametrize("entries_per_block", slow.all_but([53], [1, 53, 61, 69]))
def test_b2_blocks_of_any_size_are_addressed_by_their_own_stride(entries_per_block):
    case = draw_case(F32, *MANY_TOKENS, entries_per_block=entries_per_block)
    assert case.ulps(case.attend(), case.expected()) < MAX_ULPS


def test_the_sink_may_be_off_or_outweigh_everything():
    case = draw_case(F32, *MANY_TOKENS)
    live = case.call.request_ids >= 0
    for sink in (NO_SINK, np.array([-np.inf, 80, -80], np.float32)):
        assert case.ulps(case.attend(sink)[live], case.expected(sink)[live]) < MAX_ULPS


def test_the_bound_rejects_other_definitions():
    case = draw_case(F32, *MANY_TOKENS)
    actual = case.attend()
    rejected = [
        case.expected(NO_SINK),
        case.expected(window=W - 1),
        case.expected(window=W + 1),
        case.expected(selected=slice(1, None)),
        case.expected(np.roll(SINK, 1)),
    ]
    assert min(case.ulps(actual, expected) for expected in rejected) > 1000 * MAX_ULPS


def test_b21_no_selected_entry_is_the_window_alone():
    """HCA before its first window closes, and CSA likewise: finite, and as without a pool."""
    case = draw_case(F32, *MANY_TOKENS)
    nothing = np.full((NUM_TOKENS, K), -1, np.int32)
    actual = case.attend(selected=nothing)
    assert case.ulps(actual, case.expected(selected=slice(0))) < MAX_ULPS
    alone = case.attend(pool=None, selected=None)
    assert case.ulps(actual, alone) < MAX_ULPS


@pytest.mark.parametrize("sink", [SINK, NO_SINK], ids=["sink", "no sink"])
def test_b21_a_query_without_visible_keys_gives_zeros(sink):
    """Known bug B5 too: nothing but padding, some of whose queries are NaN."""
    case = draw_case(F32, *MANY_TOKENS)
    nobody = np.full(NUM_TOKENS, -1, np.int32)
    nothing = np.full((NUM_TOKENS, K), -1, np.int32)
    actual = case.attend(sink, slots=nobody, segment_ids=nobody, selected=nothing)
    np.testing.assert_array_equal(actual, np.zeros_like(actual))


@pytest.mark.parametrize("name", slow.all_but(["fp8_ue8m0"], ["f32", "fp8_ue8m0"]))
def test_b1_a_request_gets_the_same_bits_in_any_row_and_any_blocks(name):
    """Other rows, physical blocks and padding; then with the other requests turned to padding."""
    codec = get_cache_format(name).entry
    cases = [draw_case(codec, *MANY_TOKENS, packing=i) for i in range(3)]
    whole = [case.attend() for case in cases]
    tokens = [[np.flatnonzero(case.call.request_ids == r) for r in range(3)] for case in cases]
    for request in range(3):
        expected = whole[0][tokens[0][request]]
        for out, place in zip(whole[1:], tokens[1:], strict=True):
            np.testing.assert_array_equal(out[place[request]], expected)
        mine = cases[0].call.request_ids == request
        indices = cases[0].arguments["call"]
        alone = {
            name: np.where(mine, getattr(indices, name), -1) for name in ("slots", "segment_ids")
        }
        np.testing.assert_array_equal(cases[0].attend(**alone)[mine], expected)


def test_the_order_of_selected_entries_does_not_matter():
    case = draw_case(F32, *MANY_TOKENS)
    shuffled = np.random.default_rng(0).permuted(case.arguments["selected"], axis=1)
    actual = case.attend(selected=shuffled, visible=None)
    assert case.ulps(actual, case.expected()) < MAX_ULPS


def test_places_beyond_what_is_visible_are_not_looked_at():
    case = draw_case(F32, *MANY_TOKENS)
    selected, visible = case.arguments["selected"], np.arange(NUM_TOKENS, dtype=np.int32) % (K + 2)
    first = np.where(np.arange(K) < visible[:, None], selected, -1)
    assert (first != selected).any()
    np.testing.assert_array_equal(case.attend(visible=visible), case.attend(selected=first))


def test_bf16_queries_are_widened_and_only_the_output_rounded():
    case = draw_case(F32, *ONE_TOKEN)
    queries = case.arguments["queries"].astype(jnp.bfloat16)
    wide = case.attend(queries=queries.astype(np.float32))
    np.testing.assert_array_equal(case.attend(queries=queries), wide.astype(jnp.bfloat16))


ERRORS = [
    ("queries", ones((3, 8)), "queries must have rank 3"),
    ("queries", ones((2, 2, 8)), "queries.* must agree on T"),
    ("rows", {"other": ones((3, 8))}, "rows must have the planes of ring"),
    ("rows", {"values": ones((3, 7))}, r"rows\['values'\] must hold rows of float32\[8\]"),
    ("selected", zeros((3, 3)), "selected must be int32"),
    ("selected", zeros((2, 3), jnp.int32), "selected must agree on T"),
    ("selected", None, "pool and selected go together"),
    ("pool", None, "pool and selected go together"),
    ("call.visible", zeros(3), "visible must be int32"),
    ("call.visible", zeros(2, jnp.int32), "visible must agree on T"),
    ("call.block_table", zeros((2, 3)), "block_table must be int32"),
    ("call.segment_ids", zeros(3, jnp.int8), "segment_ids must be int32"),
    ("call.slots", zeros(2, jnp.int32), "slots.* must agree on T"),
    ("call.positions", zeros(3), "positions must be int32"),
    ("call.lengths", zeros(4, jnp.int32), "lengths.* must agree on T"),
    ("frequencies", ones((2, 2)), "frequencies must have rank 1"),
    ("frequencies", ones(5), "frequencies must rotate at most C dims"),
    ("query_eps", 1e-6, "query_eps wants the frequencies"),
    ("pool.layer", zeros((), jnp.int32), "pool must be of the ring's layer, 1, got 0"),
    ("pool.codec", get_cache_format("bf16").entry, "pool must"),
]
SILENT = [
    ("rows", {"values": ones((2, 8))}),
    ("sink", ones(1)),
    ("queries", ones((3, 1, 8))),
    ("call.block_table", zeros(3, jnp.int32)),
    ("pool.planes", {"values": ones((3, 4, 2, 7))}),
]


@pytest.mark.parametrize(("name", "wrong", "message"), ERRORS)
def test_an_error_names_the_argument_that_is_wrong(name, wrong, message):
    arguments = inputs.valid_arguments("sparse_attention")
    with pytest.raises(ValueError, match=message):
        sparse_attention(**inputs.replace_argument(arguments, name, wrong))


@pytest.mark.parametrize(("name", "wrong"), SILENT)
def test_a_shape_that_would_broadcast_or_clamp_is_refused(name, wrong):
    arguments = inputs.valid_arguments("sparse_attention")
    with pytest.raises(ValueError, match=name.split(".")[0 if "pool" in name else -1]):
        sparse_attention(**inputs.replace_argument(arguments, name, wrong))
