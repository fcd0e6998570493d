"""Rungs 2 and 4 of attention to entries apart from the window, and what rung 3 compiles."""

import dataclasses

import numpy as np
import pytest

from benchmarks.cases.sparse_attention import COMPILED_APART_TRITON, SCALE
from helpers import attention_cases, slow
from helpers.inputs import LAYER
from pallas_kernels import Backend, get_cache_format, sparse_attention
from pallas_kernels.gpu.devices import H200
from pallas_kernels.sparse_attention import call_shapes, op, triton_few, triton_turns
from pallas_kernels.sparse_attention.reference import Arguments
from pallas_kernels.sparse_attention.triton_keys import KEYS

pytestmark = pytest.mark.unoptimised

SIZES = attention_cases.SMALLEST_FOR_A_KERNEL
TOKENS = ((300, 9, 0), (1, 1, 2))
FORMATS = ["fp4_e4m3", "bf16", "fp8_ue8m0"]
ENTRY_LAYER = LAYER + 1
"""Whose ring is poison, as the window's layer has poison for entries."""


def draw(name="fp4_e4m3", *, sizes=SIZES, **options):
    fmt = get_cache_format(name)
    apart = {"entry_codec": fmt.entry, "entry_layer": ENTRY_LAYER} | options
    return attention_cases.draw_case(sizes, fmt.ring, *TOKENS, **apart)


@pytest.fixture(params=["few", pytest.param("turns", marks=pytest.mark.slow)])
def splits(request, monkeypatch):
    """The kernel of few tokens, or that of more, whose keys are in two splits."""
    is_few = request.param == "few"
    monkeypatch.setattr(op, "_is_few", lambda _: is_few)
    choose_splits(2, monkeypatch)
    return request.param


def choose_splits(count, monkeypatch):
    monkeypatch.setattr(triton_turns, "choose_splits", lambda *_, **__: count)
    attention_cases._program.cache_clear()


def attend(case, *arguments, **changes):
    return case.attend(*arguments, backend="triton_gpu", apart=True, **changes)


@pytest.mark.parametrize("name", slow.all_but(["fp4_e4m3"], FORMATS))
@pytest.mark.usefixtures("splits")
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
@pytest.mark.parametrize("count", slow.all_but([1], [1, 3, 7]))
def test_splits_of_any_number(lane, monkeypatch, count):
    """Seven tiles: all of a program, some with one fewer, and one each.

    The first two tiles of entries name nothing: those after them are found while they are read.
    """
    monkeypatch.setattr(op, "_is_few", lambda _: False)
    choose_splits(count, monkeypatch)
    case = draw()
    nothing = np.full((SIZES.num_tokens, 2 * KEYS), -1, np.int32)
    selected = np.concatenate([nothing, case.arguments["selected"]], axis=1)
    assert case.error(attend(case, selected=selected, visible=None)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [8, 16, 24, 128])
@pytest.mark.usefixtures("splits")
def test_heads_that_do_not_fill_a_program(lane, num_heads):
    case = draw(sizes=dataclasses.replace(SIZES, num_heads=num_heads))
    assert case.error(attend(case)) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("splits")
def test_entries_beyond_what_a_token_sees_are_not_looked_at(lane):
    case = draw()
    selected = case.arguments["selected"]
    nothing = np.full((SIZES.num_tokens, 6 * triton_few.KEYS - SIZES.top_k), -1, np.int32)
    wide = np.concatenate([selected, nothing], axis=1)
    looked = attend(case, selected=wide, visible=None)
    assert case.error(looked) < 1
    wide[:, -SIZES.top_k :] = np.roll(selected, 1, axis=1)
    assert case.error(attend(case, selected=wide, visible=None)) > 3
    np.testing.assert_array_equal(attend(case, selected=wide), looked)


@pytest.mark.slow
@pytest.mark.usefixtures("splits")
def test_nothing_visible_gives_zeros_and_the_window_alone_is_enough(lane):
    case = draw()
    nobody = np.full(SIZES.num_tokens, -1, np.int32)
    no_sink = np.full(SIZES.num_heads, -np.inf, np.float32)
    out = attend(case, no_sink, slots=nobody, segment_ids=nobody)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    alone = attend(case, pool=None, selected=None)
    assert case.error(alone, selected=slice(0)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_inverse_rope_follows(lane, monkeypatch, count):
    monkeypatch.setattr(op, "_is_few", lambda _: False)
    choose_splits(count, monkeypatch)
    case = draw()
    frequencies = np.float32(100.0 ** -np.linspace(0, 1, SIZES.rope_dim // 2))
    turned = attend(case, frequencies=frequencies)
    expected = case.attend(backend="reference", apart=True, frequencies=frequencies)
    allowed = 2 * attention_cases.TOLERANCE * case.expected(absolute=True)
    neighbours = np.roll(allowed, 1, axis=-1) + np.roll(allowed, -1, axis=-1)
    assert np.all(np.abs(turned - expected) <= np.maximum(allowed, neighbours))
    assert np.mean(np.abs(turned - attend(case))[..., -SIZES.rope_dim :] > 0.1) > 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("splits")
def test_a_request_gets_the_same_bits_in_any_row_and_any_blocks(lane):
    cases = [draw(packing=i) for i in range(2)]
    out = [attend(case) for case in cases]
    for request in range(3):
        first, second = (out[i][case.call.request_ids == request] for i, case in enumerate(cases))
        np.testing.assert_array_equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 64])
def test_a_gpu_takes_these_kernels_by_itself(monkeypatch, num_heads):
    monkeypatch.setattr(call_shapes, "SERVES_ENTRIES_APART", False)
    attention_cases._program.cache_clear()  # it may have another test's number of splits
    case = draw(sizes=dataclasses.replace(SIZES, num_heads=num_heads))
    np.testing.assert_array_equal(case.attend(apart=True), attend(case))


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "splits"), [(4, 64, 10), (8, 16, 10), (32, 64, 2), (256, 64, 1)]
)
def test_programs_fill_the_card_once(num_tokens, num_heads, splits):
    specs = attention_cases.flash_specs(num_tokens, num_heads, 512, "fp4_e4m3")
    arguments = Arguments(**specs, scale=1.0, apart=True)
    assert triton_turns.choose_splits(arguments, num_sms=H200.num_sms) == splits


def test_what_no_kernel_reads_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"FP4 ones beside its windows"):
        attend(draw(entry_codec=get_cache_format("bf16").entry))


def test_mosaic_leaves_entries_apart_to_these_kernels_when_told(monkeypatch):
    monkeypatch.setattr(call_shapes, "SERVES_ENTRIES_APART", False)
    attention_cases._program.cache_clear()
    with pytest.raises(NotImplementedError, match=r"got a pool that is apart"):
        draw().attend(backend="mosaic_gpu", apart=True)


def _at_flash_sizes(arguments):
    return sparse_attention(**arguments, scale=SCALE, apart=True, backend=Backend.TRITON_GPU)


AOT_CASES = [
    (
        f"{name}_{tokens}x{heads}x{top_k}",
        _at_flash_sizes,
        [attention_cases.flash_specs(tokens, heads, top_k, name)],
    )
    for name, tokens, heads, top_k in COMPILED_APART_TRITON
]
