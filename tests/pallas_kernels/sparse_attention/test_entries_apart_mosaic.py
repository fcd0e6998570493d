"""Rungs 2 and 4 of Mosaic's kernels with entries apart from the window; what rung 3 compiles."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.product import BOTH
from benchmarks.cases.sparse_attention import COMPILED_APART, SCALE
from helpers import attention_cases, slow
from helpers.inputs import LAYER
from pallas_kernels import Backend, attend_in_part, get_cache_format, join_parts, sparse_attention
from pallas_kernels.sparse_attention import call_shapes, mosaic_blackwell, mosaic_hopper, op

pytestmark = pytest.mark.unoptimised

SIZES = attention_cases.SMALLEST_FOR_A_KERNEL
TOKENS = ((300, 9, 0), (1, 1, 2))
FORMATS = ["fp4_e4m3", "bf16", "fp8_ue8m0"]
_KERNELS = {"hopper": mosaic_hopper, "blackwell": mosaic_blackwell}


@pytest.fixture(params=["hopper", pytest.param("blackwell", marks=pytest.mark.slow)])
def kernel(request, lane, monkeypatch):
    """The kernel for a kind of GPU: in the interpreter, or on a GPU of that kind."""
    module = _KERNELS[request.param]
    if lane == "gpu" and op.choose_kernel() is not module:
        pytest.skip("is for another kind of GPU")
    monkeypatch.setattr(op, "choose_kernel", lambda: module)


@pytest.fixture
def split_into(monkeypatch):
    def choose(splits):
        tiling = call_shapes.Tiling(splits=splits)
        monkeypatch.setattr(call_shapes, "choose_tiling", lambda *_: tiling)

    return choose


def draw(name="fp4_e4m3", *, sizes=SIZES, **options):
    fmt = get_cache_format(name)
    apart = {"entry_codec": fmt.entry, "entry_layer": LAYER + 1} | options
    return attention_cases.draw_case(sizes, fmt.ring, *TOKENS, **apart)


def attend(case, *arguments, **changes):
    return case.attend(*arguments, backend="mosaic_gpu", apart=True, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow.all_but(["fp4_e4m3"], FORMATS))
@pytest.mark.usefixtures("kernel")
def test_the_kernel_is_the_oracle_in_every_format(split_into, name):
    split_into(1)
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
@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.usefixtures("kernel")
def test_splits_of_any_number(split_into, splits):
    """Five tiles; the first two of entries name nothing, and those after them run ahead."""
    split_into(splits)
    case = draw()
    nothing = np.full((SIZES.num_tokens, 2 * call_shapes.TILE), -1, np.int32)
    selected = np.concatenate([nothing, case.arguments["selected"]], axis=1)
    assert case.error(attend(case, selected=selected, visible=None)) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_the_largest_heads_and_two_programs_of_them():
    case = draw(sizes=dataclasses.replace(SIZES, dim=512, num_heads=128))
    assert case.error(attend(case)) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_nothing_visible_gives_zeros_and_the_window_alone_is_enough():
    case = draw()
    nobody = np.full(SIZES.num_tokens, -1, np.int32)
    no_sink = np.full(SIZES.num_heads, -np.inf, np.float32)
    out = attend(case, no_sink, slots=nobody, segment_ids=nobody)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    alone = attend(case, pool=None, selected=None)
    assert case.error(alone, selected=slice(0)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.usefixtures("kernel")
def test_inverse_rope_follows(split_into, splits):
    split_into(splits)
    case = draw()
    frequencies = np.float32(100.0 ** -np.linspace(0, 1, SIZES.rope_dim // 2))
    turned = attend(case, frequencies=frequencies)
    expected = case.attend(backend="reference", apart=True, frequencies=frequencies)
    allowed = 2 * attention_cases.TOLERANCE * case.expected(absolute=True)
    neighbours = np.roll(allowed, 1, axis=-1) + np.roll(allowed, -1, axis=-1)
    assert np.all(np.abs(turned - expected) <= np.maximum(allowed, neighbours))
    assert np.mean(np.abs(turned - attend(case))[..., -SIZES.rope_dim :] > 0.1) > 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_a_request_gets_the_same_bits_in_any_row_and_any_blocks():
    cases = [draw(packing=i) for i in range(2)]
    out = [attend(case) for case in cases]
    for request in range(3):
        first, second = (out[i][case.call.request_ids == request] for i, case in enumerate(cases))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_parts_join_to_the_whole():
    case = draw()
    given = dict(case.arguments, scale=SIZES.scale, apart=True)
    part = attend_in_part(**given, backend=Backend.MOSAIC_GPU)
    joined = join_parts(
        *(part._replace(sums=part.sums[None], statistics=part.statistics[None]), SIZES.sink()),
        case.arguments["call"].positions,
        dtype=jnp.bfloat16,
    )
    assert case.error(np.float32(joined)) < 1


@pytest.mark.gpu
def test_a_gpu_takes_this_kernel_by_itself_and_leaves_it_when_told(monkeypatch):
    case = draw()
    monkeypatch.setattr(op, "_is_few", lambda _: False)
    for serves, backend in ((True, "mosaic_gpu"), (False, "triton_gpu")):
        monkeypatch.setattr(call_shapes, "SERVES_ENTRIES_APART", serves)
        attention_cases._program.cache_clear()
        expected = case.attend(apart=True, backend=backend)
        attention_cases._program.cache_clear()
        np.testing.assert_array_equal(case.attend(apart=True), expected)
    attention_cases._program.cache_clear()


@pytest.mark.gpu
def test_twenty_runs_give_the_same_bits():
    case = draw()
    expected = attend(case)
    for _ in range(20):
        np.testing.assert_array_equal(attend(case), expected)


def _at_flash_sizes(arguments):
    return sparse_attention(**arguments, scale=SCALE, apart=True, backend=Backend.MOSAIC_GPU)


AOT_CASES = [
    (
        f"{name}_{tokens}x{heads}x{top_k}@{target}",
        _at_flash_sizes,
        [attention_cases.flash_specs(tokens, heads, top_k, name)],
    )
    for name, tokens, heads, top_k in COMPILED_APART
    for target in BOTH
]
