"""Rungs 2 and 4 of the index scores, of them with the selection, and what rung 3 compiles."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels as pk
from benchmarks.cases import selection as cases
from helpers import inputs, slow
from helpers.calls import call_specs, make_call
from helpers.inputs import CASE_LAYER, LAYER, NUM_LAYERS, poison, shuffled_table
from pallas_kernels import Backend, LayerPlanes, get_cache_format, gpu_interpreter, index_topk
from pallas_kernels.gpu import mosaic_bulk, unpack_mxfp4
from pallas_kernels.gpu.devices import B200, H200
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.index_scores import tiling as scores_tiling
from pallas_kernels.index_scores.reference import index_scores
from pallas_kernels.select_top_k.reference import select_top_k

pytestmark = pytest.mark.unoptimised

HEADS, DIM, EB = 64, 128, 16
FORMATS = ["fp8_ue8m0", "fp8_ue8m0_fp8_index"]
TOLERANCE = 2.0**-12
"""Of the score that all products of |query| and |key|, and all |weight|, would give.

The FP8 tensor core drops what is 2^-13 of the largest term when it adds 32 products, four times;
in the interpreter the sums are f32.
"""


jit_index_topk = jax.jit(index_topk, static_argnames=("k", "backend"))


def draw(name, *, visible=(200, 65, 0), spread=0, entries_per_block=EB, num_heads=HEADS):
    """Arguments by name, whose pools are poison wherever no query may look, and the f32 keys."""
    codec = get_cache_format(name).index_key
    rng = np.random.default_rng(len(name))
    num_blocks = [-(-v // entries_per_block) for v in visible]
    table = shuffled_table(
        rng, num_blocks, num_logical=-(-max(visible) // entries_per_block), num_physical=60
    )
    pool = poison(codec.plane_shapes(DIM, 0), NUM_LAYERS, 60, entries_per_block)
    vectors = [
        rng.normal(size=(v, DIM))
        * np.exp2(rng.integers(-spread, spread + 1, (v, DIM // 32)).repeat(32, 1))
        for v in visible
    ]
    encoded, decoded = inputs.encode(codec, vectors, 0)
    for request, planes in enumerate(encoded):
        for entry in range(visible[request]):
            block = table[request, entry // entries_per_block]
            for plane, rows in planes.items():
                pool[plane][LAYER, block, entry % entries_per_block] = rows[entry]
    queries = inputs.encode(codec, [rng.normal(size=(3 * num_heads, DIM))], 0)[1][0]
    order = np.array([2, 0, 1], np.int32)
    arguments = {
        "queries": queries.reshape(3, num_heads, DIM),
        "weights": rng.normal(size=(3, num_heads)).astype(np.float32),
        "pool": LayerPlanes(pool, CASE_LAYER, codec),
        "call": make_call(table, order, visible=np.int32(visible)[order]),
    }
    return arguments, [decoded[request] for request in order]


def scores_of(arguments, **options):
    """The kernel's scores, one array of the visible ones per query."""
    op = functools.partial(pk.index_scores, backend=Backend.MOSAIC_GPU)
    run = jax.jit(functools.partial(scores_kernel.index_scores, **options) if options else op)
    visible = np.asarray(arguments["call"].visible)
    return [np.asarray(row[:v]) for row, v in zip(run(**arguments), visible, strict=True)]


def errors(arguments, keys, actual):
    """Deviations from the definition, in units of the tolerance; one array per query."""
    norm = (arguments["queries"].shape[1] * DIM) ** -0.5
    for query, weight, key, row in zip(
        arguments["queries"], arguments["weights"], keys, actual, strict=True
    ):
        expected = index_scores(query, weight, key)
        allowed = (np.abs(key) @ np.abs(query).T) @ np.abs(weight) * norm * TOLERANCE
        yield np.nan_to_num(np.abs(row - expected) / allowed, nan=np.inf)


@pytest.mark.parametrize("name", slow.all_but(["fp8_ue8m0"], FORMATS))
def test_scores_are_the_reference_s(lane, name):
    arguments, keys = draw(name)
    actual = scores_of(arguments)
    assert max(e.max(initial=0) for e in errors(arguments, keys, actual)) < 1
    shifted = [np.roll(row, 1) for row in actual]
    assert max(e.max(initial=0) for e in errors(arguments, keys, shifted)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", slow.all_but([32], [3, 32]))
def test_fewer_heads_of_v41_s_keys(lane, num_heads):
    """Keys that are not rotated; heads are filled up with zeros, and counted as they are."""
    arguments, keys = draw("fp4_e4m3", num_heads=num_heads)
    actual = scores_of(arguments)
    assert max(e.max(initial=0) for e in errors(arguments, keys, actual)) < 1
    halved = [row / 2**0.5 for row in actual]
    assert max(e.max(initial=0) for e in errors(arguments, keys, halved)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", slow.all_but(["fp8_ue8m0"], FORMATS))
def test_blackwell_s_tensor_cores_give_the_same(name):
    """In the interpreter alone: no card of that kind has been here."""
    arguments, keys = draw(name)
    with gpu_interpreter():
        actual = scores_of(arguments, device=B200)
    assert max(e.max(initial=0) for e in errors(arguments, keys, actual)) < 1


@pytest.mark.slow
def test_groups_of_very_different_scales(lane):
    arguments, keys = draw("fp8_ue8m0", visible=(64, 10, 0), spread=9)
    assert max(e.max(initial=0) for e in errors(arguments, keys, scores_of(arguments))) < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiling",
    [pytest.param(t, marks=[pytest.mark.slow] * (t != (5, 3))) for t in [(1, 1), (2, 2), (5, 3)]],
)
def test_any_tiling_gives_the_same_bits(lane, tiling):
    arguments, _ = draw("fp8_ue8m0")
    expected = scores_of(arguments, tiling=scores_tiling.Tiling(4, 4))
    actual = scores_of(arguments, tiling=scores_tiling.Tiling(*tiling))
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens"),
    slow.all_but([("fp8_ue8m0", 2)], list(itertools.product(FORMATS, (2, 3, 4)))),
)
def test_neighbouring_tokens_of_a_cta_have_the_scores_of_each_alone(lane, name, tokens):
    """Of one request, of two, of none; one sees a tile more than its neighbour, one has none."""
    del lane
    arguments, _ = draw(name)
    requests = np.array([0, 0, 0, 0, 0, 1, 1, -1, 0, 2, 1], np.int32)
    visible = np.array([191, 192, 192, 193, 200, 64, 65, 0, 200, 0, 3], np.int32)
    rng, count = np.random.default_rng(0), len(requests)
    given = arguments | {
        "queries": arguments["queries"][rng.integers(3, size=count)],
        "weights": rng.normal(size=(count, HEADS)).astype(np.float32),
        "call": make_call(arguments["call"].block_table, requests, visible=visible),
    }
    alone = scores_of(given, tiling=scores_tiling.Tiling(3, 2))
    together = scores_of(given, tiling=scores_tiling.Tiling(3, 2, tokens=tokens))
    largest = max(np.abs(row).max(initial=0) for row in alone)
    for actual, expected in zip(together, alone, strict=True):  # sums of 64 heads in any order
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2.0**-20 * largest)


def test_many_tokens_of_few_requests_share_keys():
    """On Hopper; fewer would leave SMs idle, and each other request of a CTA is a pass of all."""

    def tokens_of(num_tokens, num_requests, device=H200):
        return scores_tiling.choose_tiling(
            num_tokens, 128, True, device, num_requests=num_requests
        ).tokens

    assert tokens_of(2048, 1) == tokens_of(8192, 128) == 4
    assert tokens_of(2047, 1) == tokens_of(8192, 129) == tokens_of(256, 256) == 1
    assert tokens_of(8192, 1, B200) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_keys_that_l2_may_drop_give_the_same_bits(lane, name, monkeypatch):
    """A call says so of more than L2 holds, of which each key has one reader."""
    arguments, _ = draw(name)
    fetch, asked, told = mosaic_bulk.fetch, [], []

    def recorded(*args, last, **options):
        told.append(last)
        fetch(*args, last=last, **options)

    def read_once(*sizes):
        asked.append(sizes)
        return True

    monkeypatch.setattr(mosaic_bulk, "fetch", recorded)
    expected = scores_of(arguments)
    assert not any(told)
    told.clear()
    monkeypatch.setattr(scores_kernel, "read_once", read_once)
    for one, other in zip(expected, scores_of(arguments), strict=True):
        np.testing.assert_array_equal(one, other)
    assert told
    assert all(told)
    bytes_of_key = 68 if name == "fp8_ue8m0" else 132
    assert asked == [(3, 3, 13 * EB * bytes_of_key, H200)]
    assert scores_tiling.read_once(8, 8, 2**23, H200)
    assert not scores_tiling.read_once(9, 8, 2**23, H200)
    assert not scores_tiling.read_once(8, 8, 2**22, H200)
    assert not scores_tiling.read_once(8, 8, 2**23, B200)  # whose L2 holds them


@pytest.mark.slow
@pytest.mark.parametrize("entries_per_block", [4, 52])
def test_blocks_of_any_size(lane, entries_per_block):
    arguments, keys = draw("fp8_ue8m0", visible=(40, 9, 0), entries_per_block=entries_per_block)
    assert max(e.max(initial=0) for e in errors(arguments, keys, scores_of(arguments))) < 1


@pytest.mark.gpu
@pytest.mark.parametrize("gib", [3, 5])
def test_blocks_at_the_top_of_a_plane_of_gibibytes(gib):
    """Where 32-bit offsets would be negative, or wrap."""
    arguments, _ = draw("fp8_ue8m0")
    expected = scores_of(arguments)
    pool, table = arguments["pool"].planes, arguments["call"].block_table
    layers, small, *entry = pool["codes"].shape
    large = int(gib * 2**30) // (layers * math.prod(entry))
    pool = {
        name: jnp.full((layers, large, *plane.shape[2:]), 255, plane.dtype)
        .at[:, large - small :]
        .set(plane)
        for name, plane in pool.items()
    }
    table = jnp.where(table >= 0, table + np.int32(large - small), -1)
    changed = inputs.replace_argument(arguments, "pool.planes", pool)
    actual = scores_of(inputs.replace_argument(changed, "call.block_table", table))
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
def test_twenty_runs_give_the_same_bits():
    arguments, _ = draw("fp8_ue8m0")
    expected = scores_of(arguments)
    for _ in range(20):
        for one, other in zip(expected, scores_of(arguments), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow.all_but(["fp8_ue8m0"], FORMATS))
def test_the_selection_is_that_of_the_scores(lane, name):
    """And the reference's, but for entries whose scores lie within the tolerance of the last."""
    arguments, _ = draw(name)
    actual = scores_of(arguments)
    run = functools.partial(jit_index_topk, **arguments, k=40)
    selected = np.asarray(run(backend="mosaic_gpu"))
    for row, chosen, expected in zip(actual, selected, run(backend="reference"), strict=True):
        best = select_top_k(np.pad(row, (0, 40)), np.int32(len(row)), 40)
        np.testing.assert_array_equal(chosen, best)
        assert len(np.setdiff1d(chosen, expected)) <= 1


def test_fewer_entries_than_wanted_need_no_scores(lane):
    arguments, _ = draw("fp8_ue8m0")
    run = functools.partial(jit_index_topk, **arguments, k=300)
    np.testing.assert_array_equal(run(backend="mosaic_gpu"), run(backend="reference"))


def test_magnitudes_are_exact_down_to_2_to_the_minus_14():
    table = unpack_mxfp4.magnitude_bytes().view(np.uint8).view(ml_dtypes.float8_e4m3fn)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for steps in range(15):
        expected = magnitudes * 64 * 2.0**-steps
        np.testing.assert_array_equal(table.reshape(-1, 8)[steps].astype(np.float64), expected)
    assert not table.reshape(-1, 8)[-1].astype(np.float32).any()


def test_what_the_kernel_cannot_serve_is_refused_by_name():
    arguments = inputs.valid_arguments("index_topk")
    with pytest.raises(NotImplementedError, match=r"takes MXFP4 and FP8 keys.*backend='reference'"):
        index_topk(**arguments, backend="mosaic_gpu")
    arguments, _ = draw("fp8_ue8m0")
    many = arguments | {
        name: np.repeat(arguments[name], 2, axis=1) for name in ("queries", "weights")
    }
    with pytest.raises(NotImplementedError, match=r"needs queries \[T, 64, 128\], or fewer heads"):
        index_topk(**many, k=3, backend="mosaic_gpu")
    odd, _ = draw("fp8_ue8m0", entries_per_block=53)
    with pytest.raises(NotImplementedError, match=r"blocks of a multiple of 4, got 53 entries"):
        index_topk(**odd, k=3, backend="mosaic_gpu")


def _specs(name, num_tokens, num_entries, num_heads=HEADS):
    codec = get_cache_format(name).index_key
    shapes = codec.plane_shapes(DIM, 0)
    planes = {
        n: jax.ShapeDtypeStruct((*cases.COMPILED_POOL, *s.shape), s.dtype)
        for n, s in shapes.items()
    }
    return {
        "queries": jax.ShapeDtypeStruct((num_tokens, num_heads, DIM), jnp.bfloat16),
        "weights": jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        "pool": LayerPlanes(planes, jax.ShapeDtypeStruct((), jnp.int32), codec),
        "call": call_specs(num_tokens, num_entries // cases.ENTRIES_PER_BLOCK),
    }


def _at_flash_sizes(arguments):
    return index_topk(**arguments, k=cases.SELECTED[0], backend=Backend.MOSAIC_GPU)


def _of_neighbours(arguments, tokens):
    tiling = scores_tiling.Tiling(128, 4, tokens=tokens)
    return scores_kernel.index_scores(**arguments, tiling=tiling)


AOT_CASES = (
    [
        (f"{name}_{tokens}x{entries}", _at_flash_sizes, [_specs(name, tokens, entries)])
        for name in FORMATS
        for tokens, entries in cases.COMPILED_SCORES
    ]
    + [
        (
            f"{name} {of_a_cta} tokens of a CTA@sm_90a",
            functools.partial(_of_neighbours, tokens=of_a_cta),
            [_specs(name, tokens, entries)],
        )
        for tokens, entries, of_a_cta in [cases.COMPILED_NEIGHBOURS]
        for name in FORMATS
    ]
    + [
        (
            f"fp4_e4m3_{tokens}x{entries} of {heads} heads",
            _at_flash_sizes,
            [_specs("fp4_e4m3", tokens, entries, heads)],
        )
        for tokens, entries, heads in [cases.COMPILED_HEADS_OF_V41]
    ]
)
