"""Rungs 2 and 4 of sparse attention, and what rung 3 compiles."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import sparse_attention as cases
from benchmarks.cases.product import BOTH
from helpers import attention_cases, inputs, slow
from pallas_kernels import Backend, get_cache_format, sparse_attention
from pallas_kernels.common.norm_rope import rms_norm_by_pairs, rotate
from pallas_kernels.sparse_attention import (
    call_shapes,
    combine_triton,
    mosaic_blackwell,
    mosaic_hopper,
    op,
)
from pallas_kernels.sparse_attention.reference import AttentionPart, JoinArguments

pytestmark = pytest.mark.unoptimised

SIZES = attention_cases.SMALLEST_FOR_A_KERNEL
M, W = SIZES.compression_ratio, SIZES.window
FEW_TOKENS = ((300, 9, 0), (1, 1, 2))
ONE_TOKEN = ((M - 1, W, 3 * W), (1, 1, 1))
FORMATS = ["bf16", "fp8_ue8m0", "fp8_per_entry"]

_KERNELS = {"hopper": mosaic_hopper, "blackwell": mosaic_blackwell}


@pytest.fixture(params=list(_KERNELS))
def kernel(request, lane, monkeypatch):
    """The kernel for a kind of GPU: in the interpreter, or on a GPU of that kind.

    Tests that take `lane` alone are of what both share.
    """
    return _choose(_KERNELS[request.param], lane, monkeypatch)


@pytest.fixture(params=["hopper", pytest.param("blackwell", marks=pytest.mark.slow)])
def usual_kernel(request, lane, monkeypatch):
    """As `kernel`, for what is hardly different on a Blackwell GPU."""
    return _choose(_KERNELS[request.param], lane, monkeypatch)


def _choose(module, lane, monkeypatch):
    if lane == "gpu" and op.choose_kernel() is not module:
        pytest.skip("is for another kind of GPU")
    monkeypatch.setattr(op, "choose_kernel", lambda: module)
    return module


def draw(name="fp8_ue8m0", tokens=FEW_TOKENS, *, sizes=SIZES, **options):
    return attention_cases.draw_case(sizes, get_cache_format(name).entry, *tokens, **options)


@pytest.mark.parametrize("name", slow.all_but(["fp8_ue8m0"], FORMATS))
def test_the_kernel_is_the_oracle_in_every_format(usual_kernel, name):
    case = draw(name)
    assert case.error(case.attend(backend="mosaic_gpu")) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("usual_kernel")
def test_one_token_of_each_request():
    case = draw(tokens=ONE_TOKEN)
    assert case.error(case.attend(backend="mosaic_gpu")) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("usual_kernel")
def test_the_largest_heads_and_two_programs_of_them():
    sizes = dataclasses.replace(SIZES, dim=512, num_heads=128, num_tokens=1)
    case = draw(tokens=((300, 9, 0), (1, 0, 0)), sizes=sizes)
    assert case.error(case.attend(backend="mosaic_gpu")) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("usual_kernel")
@pytest.mark.parametrize(
    ("num_heads", "splits"), slow.all_but([(8, 1)], [(8, 1), (8, 3), (16, 1), (32, 2)])
)
def test_fewer_heads_than_a_tile_has(monkeypatch, num_heads, splits):
    """A device's share of a model's heads."""
    split_into(splits, monkeypatch)
    case = draw(sizes=dataclasses.replace(SIZES, num_heads=num_heads))
    assert case.error(case.attend(backend="mosaic_gpu")) < 1


def split_into(splits, monkeypatch):
    tiling = call_shapes.Tiling(splits=splits)
    monkeypatch.setattr(call_shapes, "choose_tiling", lambda *_: tiling)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_splits_are_combined(monkeypatch, splits):
    """Three tiles, so that two splits leave the second one short."""
    split_into(splits, monkeypatch)
    case = draw()
    assert case.error(case.attend(backend="mosaic_gpu")) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("usual_kernel")
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_tiles_without_an_entry_that_is_seen_are_not_looked_at(monkeypatch, splits):
    """Five tiles, of which tokens see two, three or four.

    Bits are those of looking, and entries in the last tile, against the rules, change nothing.
    """
    split_into(splits, monkeypatch)
    case = draw()
    selected = case.arguments["selected"]
    nothing = np.full((SIZES.num_tokens, 3 * call_shapes.TILE - SIZES.top_k), -1, np.int32)
    wide = np.concatenate([selected, nothing], axis=1)
    looked = case.attend(backend="mosaic_gpu", selected=wide, visible=None)
    assert case.error(looked) < 1
    wide[:, -SIZES.top_k :] = np.roll(selected, 1, axis=1)
    assert case.error(case.attend(backend="mosaic_gpu", selected=wide, visible=None)) > 3
    bounded = case.attend(backend="mosaic_gpu", selected=wide)
    np.testing.assert_array_equal(bounded, looked)


def test_more_splits_than_tiles_are_refused(lane, monkeypatch):
    """The last would have no tile of its own, and read another's again."""
    split_into(4, monkeypatch)
    with pytest.raises(ValueError, match=r"the keys' 3 tiles of 64 .*tiling.splits=4"):
        draw().attend(backend="mosaic_gpu")


def test_splits_take_the_tiles_to_look_at_in_turn():
    sizes = dict.fromkeys((f.name for f in dataclasses.fields(call_shapes.Shapes)), 1)
    sizes |= {"window": 70, "num_entries": 1024}
    for splits, visible in itertools.product((1, 2, 3, 7, 18), (-1, 0, 1, 64, 65, 500, 1024, 9999)):
        shapes = call_shapes.Shapes(**sizes | {"splits": splits})
        wanted = 2 + -(-min(max(visible, 0), 1024) // call_shapes.TILE)
        for split in range(splits):
            tiles = shapes.tiles_to_look_at(jnp.int32(split), jnp.int32(visible))
            assert tiles == max(1, len(range(split, wanted, splits)))


@pytest.mark.parametrize("splits", slow.all_but([5], [5, 8, 70]))
def test_splits_of_any_size_add_up_and_empty_ones_count_for_nothing(lane, splits):
    """Logits apart by more than f32's exponents, splits and whole rows without a key, no sink."""
    rng = np.random.default_rng(splits)
    tokens, heads, dim = 4, 3, 16
    largest = rng.normal(size=(splits, tokens, heads)) * [[1], [40], [400], [0]]
    total = rng.uniform(1, 9, largest.shape)
    sums = rng.normal(size=(*largest.shape, dim)) * total[..., None]
    is_empty = rng.random(largest.shape) < 0.4
    is_empty[:, 3] = True
    largest[is_empty], total[is_empty], sums[is_empty] = call_shapes.FLOOR, 0, 0
    hidden = largest < largest.max(axis=0) - 300
    assert hidden.any()
    sink = np.array([0.5, -np.inf, 30.0])
    statistics = np.stack([largest, total], axis=2).astype(np.float32)
    unseen = np.where(hidden[..., None], np.inf, sums)
    unseen, statistics, sink32 = map(jnp.float32, (unseen, statistics, sink))
    positions = jnp.zeros(tokens, jnp.int32)
    actual = combine_triton.combine(
        JoinArguments(AttentionPart(unseen, statistics), sink32, positions, None, jnp.float32)
    )
    base2 = sink * call_shapes.LOG2_E
    top = np.maximum(largest.max(axis=0), base2)
    scale = np.exp2(largest - top)
    whole = (total * scale).sum(axis=0) + np.exp2(base2 - top)
    factor = np.where(whole > 0, scale / np.where(whole > 0, whole, 1), 0)
    expected = (sums * factor[..., None]).sum(axis=0)
    assert np.abs(expected[:3]).max() > 0.1
    assert not expected[3].any()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("usual_kernel")
@pytest.mark.parametrize("splits", [1, 3])
def test_inverse_rope_follows(monkeypatch, splits):
    """Sines and cosines of kernels and of XLA differ in a last bit, and a rounding to bf16 then."""
    split_into(splits, monkeypatch)
    case, rope = draw(), SIZES.rope_dim
    frequencies = np.float32(100.0 ** -np.linspace(0, 1, rope // 2))
    plain = case.attend(backend="mosaic_gpu")
    assert case.error(plain) < 1
    turned = case.attend(backend="mosaic_gpu", frequencies=frequencies)
    np.testing.assert_array_equal(turned[..., :-rope], plain[..., :-rope])
    pairs = plain[..., -rope:].reshape(*plain.shape[:2], -1, 2)
    length = np.repeat(np.linalg.norm(pairs, axis=-1), 2, axis=-1)

    def deviation(inverse):
        positions = case.call.positions[:, None]
        rotated = rotate(jnp.bfloat16(plain), positions, frequencies, inverse=inverse)
        return np.abs(turned - np.float32(rotated))[..., -rope:]

    assert np.all(deviation(True) <= 2.0**-7 * length)
    assert np.mean(deviation(True) > 0) < 0.02
    assert np.mean(deviation(False) > 2.0**-7 * length) > 0.3


@pytest.mark.slow
@pytest.mark.usefixtures("usual_kernel")
@pytest.mark.parametrize(
    ("splits", "num_heads", "name"),
    slow.all_but([(1, 64, "fp8_ue8m0")], [(1, 64, "fp8_ue8m0"), (2, 64, "bf16"), (1, 8, "bf16")]),
)
def test_queries_as_projected_are_normed_and_rotated(monkeypatch, splits, num_heads, name):
    split_into(splits, monkeypatch)
    case = draw(name, sizes=dataclasses.replace(SIZES, num_heads=num_heads))
    frequencies = np.float32(100.0 ** -np.linspace(0, 1, SIZES.rope_dim // 2))
    scale = 2.0 ** np.random.default_rng(0).integers(-6, 7, (1, num_heads, 1))
    raw = (case.arguments["queries"] * scale).astype(jnp.bfloat16)
    ready = rotate(
        rms_norm_by_pairs(raw, None, eps=1e-6), case.call.positions[:, None], frequencies
    )
    case = dataclasses.replace(case, arguments=case.arguments | {"queries": np.asarray(ready)})
    options = {"backend": "mosaic_gpu", "frequencies": frequencies}
    wanted = case.attend(**options)
    allowed = attention_cases.TOLERANCE * case.expected(absolute=True)
    # A rotated pair is as long as before it, and its values are at most that.
    allowed = np.maximum(allowed, np.roll(allowed, 1, axis=-1) + np.roll(allowed, -1, axis=-1))

    def largest(eps):
        found = case.attend(queries=raw, query_eps=eps, **options)
        return (np.abs(found - wanted) / np.maximum(allowed, 1e-30)).max()

    assert largest(1e-6) < 1
    assert largest(1.0) > 3


@pytest.mark.slow
def test_the_tolerance_rejects_other_definitions(lane):
    case = draw()
    actual = case.attend(backend="mosaic_gpu")
    no_sink = np.full(SIZES.num_heads, -np.inf, np.float32)
    broken = [{"sink": no_sink}, {"window": W - 1}, {"window": W + 1}, {"selected": slice(1, None)}]
    assert min(case.error(actual, **variant) for variant in broken) > 3


@pytest.mark.slow
def test_maxima_that_grow_from_tile_to_tile(usual_kernel, monkeypatch):
    split_into(1, monkeypatch)
    case = draw()
    queries = case.arguments["queries"] * np.asarray(16, jnp.bfloat16)
    case = dataclasses.replace(case, arguments=case.arguments | {"queries": queries})
    assert case.error(case.attend(backend="mosaic_gpu")) < 1
    if (
        usual_kernel is mosaic_blackwell
    ):  # whose sums need scaling in tensor memory then, and only then
        monkeypatch.setattr(mosaic_blackwell.plgpu, "async_store_tmem", lambda *_: None)
        assert case.error(case.attend(backend="mosaic_gpu")) > 100


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", [2.0**-6, 2.0**13])
def test_small_keys_and_large_ones(lane, magnitude):
    """Largest ones of 0.06 and of 37,000: f16 holds no more than 65,504, and steps of 2^-24."""
    case = draw(magnitude=magnitude)
    queries = case.arguments["queries"] * np.asarray(1 / magnitude, jnp.bfloat16)
    case = dataclasses.replace(case, arguments=case.arguments | {"queries": queries})
    assert case.error(case.attend(backend="mosaic_gpu")) < 1


@pytest.mark.slow
@pytest.mark.parametrize("entries_per_block", [1, 53])
def test_blocks_of_any_size(lane, entries_per_block):
    case = draw(entries_per_block=entries_per_block)
    assert case.error(case.attend(backend="mosaic_gpu")) < 1


@pytest.mark.slow
def test_indices_that_name_nothing_are_not_read(lane):
    """-1 between real ones, and beyond the table; the pools are poison there."""
    case = draw()
    selected = case.arguments["selected"]
    outside = np.full((SIZES.num_tokens, 3), 10**6, np.int32)
    scattered = np.insert(selected, [1, 5], -1, axis=1)
    selected = np.concatenate([outside, scattered], axis=1)
    changed = case.attend(backend="mosaic_gpu", selected=selected, visible=None)
    assert case.error(changed) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("usual_kernel")
def test_nothing_visible_gives_zeros_and_the_window_alone_is_enough():
    case = draw()
    nobody = np.full(SIZES.num_tokens, -1, np.int32)
    no_sink = np.full(SIZES.num_heads, -np.inf, np.float32)
    out = case.attend(no_sink, backend="mosaic_gpu", slots=nobody, segment_ids=nobody)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    alone = case.attend(backend="mosaic_gpu", pool=None, selected=None)
    assert case.error(alone, selected=slice(0)) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("usual_kernel")
def test_a_request_gets_the_same_bits_in_any_row_and_any_blocks():
    cases = [draw(packing=i) for i in range(2)]
    out = [case.attend(backend="mosaic_gpu") for case in cases]
    for request in range(3):
        first, second = (out[i][case.call.request_ids == request] for i, case in enumerate(cases))
        np.testing.assert_array_equal(first, second)


@pytest.mark.gpu
def test_twenty_runs_give_the_same_bits():
    case = draw()
    expected = case.attend(backend="mosaic_gpu")
    for _ in range(20):
        np.testing.assert_array_equal(case.attend(backend="mosaic_gpu"), expected)


def refused(name="fp8_ue8m0", **changes):
    case = draw(name)
    with pytest.raises(NotImplementedError, match="pass backend='reference'") as raised:
        case.attend(backend="mosaic_gpu", **changes)
    return str(raised.value)


def test_what_the_kernel_cannot_serve_is_refused_by_name():
    queries = draw().arguments["queries"]
    assert "takes bf16 queries" in refused(queries=queries.astype(np.float32))
    assert "would round keys of cache format 'f32'" in refused("f32")
    for heads in (3, 72):
        few = np.resize(queries, (queries.shape[0], heads, queries.shape[2]))
        assert "needs H % 64 == 0" in refused(queries=few, sink=np.zeros(heads, np.float32))
    arguments = inputs.valid_arguments("sparse_attention")
    with pytest.raises(NotImplementedError, match=r"takes bf16 queries.*float32"):
        sparse_attention(**arguments, backend=Backend.MOSAIC_GPU)


def _at_flash_sizes(arguments, query_eps=None):
    return sparse_attention(
        **arguments, scale=cases.SCALE, query_eps=query_eps, backend=Backend.MOSAIC_GPU
    )


AOT_CASES = [
    (
        f"{name}_{tokens}x{heads}x{top_k}@{target}",
        _at_flash_sizes,
        [attention_cases.flash_specs(tokens, heads, top_k, name)],
    )
    for name, tokens, heads, top_k in cases.COMPILED
    for target in BOTH
] + [
    (
        f"{name}_{tokens}x{heads}x{top_k} as projected@{target}",
        functools.partial(_at_flash_sizes, query_eps=1e-6),
        [attention_cases.flash_specs(tokens, heads, top_k, name)],
    )
    for name, tokens, heads, top_k in cases.COMPILED_AS_PROJECTED
    for target in BOTH
]
