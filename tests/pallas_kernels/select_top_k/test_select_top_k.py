import functools

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.selection import COMPILED_TOP_K, SHAPES
from helpers import slow, token_oracle
from helpers.arrays import ones, zeros
from pallas_kernels import gpu_interpreter
from pallas_kernels.select_top_k import mosaic_gpu as select_kernel
from pallas_kernels.select_top_k.op import select_top_k

pytestmark = pytest.mark.unoptimised

KERNELS = ["mosaic_gpu"]
INF, NAN = np.inf, np.nan

AOT_CASES = [
    (
        f"top {k} of {num_rows} x {num_entries}",
        functools.partial(select_top_k, k=k, backend="mosaic_gpu"),
        [
            jax.ShapeDtypeStruct((num_rows, num_entries), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        ],
    )
    for num_rows, num_entries, k in COMPILED_TOP_K
]


def patterns(num_entries):
    """Rows of scores that selections have got wrong, or slow."""
    rng = np.random.default_rng(num_entries)
    random = rng.normal(size=num_entries).astype(np.float32)
    entry = np.arange(num_entries)
    return {
        "distinct": random,
        "ascending": np.sort(random),
        "descending": np.sort(random)[::-1],
        "all equal": np.full(num_entries, 0.5),
        "all zero, of both signs": np.where(entry % 3, 0.0, -0.0),
        "zeros of both signs among others": np.where(entry % 3, random, random * -0.0),
        "one spike": np.where(entry == num_entries // 3, 1e30, 0.0),
        "minus infinity alone": np.full(num_entries, -INF),
        "minus infinity among others": np.where(entry % 4, -INF, random),
        "NaN alone": np.full(num_entries, NAN),
        "NaN among minus infinity": np.where(entry % 5, NAN, -INF),
        "NaN of both signs first": np.where(
            entry < num_entries // 2, np.copysign(NAN, random), random
        ),
        "extremes": np.resize(np.float32([-3.4e38, 3.4e38, -INF, INF, 1e-30, -1e-30]), entry.shape),
        "denormal": (entry * 7919 % 8191 - 4096).astype(np.float32) * np.float32(1e-42),
        "few values": rng.integers(-2, 3, num_entries),
        "any bits": rng.integers(-(2**31), 2**31, num_entries).astype(np.int32).view(np.float32),
        "the last ones best": np.where(entry > num_entries - num_entries // 8, 3.0, random),
        "one bit apart": (0x3F800000 + entry % 1000).astype(np.int32).view(np.float32),
    }


def lengths(num_entries, k):
    near = {0, 1, k - 1, k, k + 1, num_entries // 2, num_entries - 1, num_entries}
    return sorted(v for v in near if 0 <= v <= num_entries)


def stack(rows):
    return np.stack([np.asarray(row, np.float32) for row in rows])


def check(scores, visible, k, backend):
    """Entries past the length are NaN: what is not visible must not be chosen."""
    scores, visible = np.array(scores), np.asarray(visible, np.int32)
    for row, length in zip(scores, visible, strict=True):
        row[length:] = NAN
    selected = select_top_k(jnp.asarray(scores), jnp.asarray(visible), k, backend=backend)
    expected = [best_entries(row[:v], k) for row, v in zip(scores, visible, strict=True)]
    assert selected.dtype == jnp.int32
    np.testing.assert_array_equal(selected, expected)


def best_entries(scores, k):
    """`token_oracle.best_entries` for long rows."""
    order = np.lexsort((np.where(np.isnan(scores), 0, -scores), np.isnan(scores)))
    chosen = np.sort(order[:k])
    return np.pad(chosen, (0, k - len(chosen)), constant_values=-1)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles short enough that rows of a few hundred entries take two launches and three."""
    monkeypatch.setattr(select_kernel, "MAX_TILE", 512)
    monkeypatch.setattr(select_kernel, "SHORT_TILE", 256)


def test_the_long_oracle_agrees_with_the_short_one():
    for row in patterns(200).values():
        row = np.asarray(row, np.float32)
        np.testing.assert_array_equal(best_entries(row, 64), token_oracle.best_entries(row, 64))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("k", slow.all_but([64], [1, 64, 130]))
def test_every_pattern_in_one_launch(lane, backend, k):
    rows = patterns(256)
    assert len(select_kernel.choose_stages(256, k)) == 1
    visible = np.resize(lengths(256, k)[::-1], len(rows))
    check(stack(rows.values()), visible, k, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("num_entries", "num_launches"), slow.all_but([(700, 2)], [(700, 2), (2100, 3)])
)
def test_every_pattern_in_several_launches(lane, backend, small_tiles, num_entries, num_launches):
    k = 100
    assert len(select_kernel.choose_stages(num_entries, k)) == num_launches
    rows = list(patterns(num_entries).values())
    if lane == "interpreter":  # a program there takes a tenth of a second
        rows = rows[:: 4 if num_launches == 3 else 2]
    visible = np.resize(lengths(num_entries, k)[::-1], len(rows))
    check(stack(rows), visible, k, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("num_entries", slow.all_but([129], [1, 127, 129, 1000]))
def test_any_width(lane, backend, num_entries):
    k = 40
    scores = np.random.default_rng(num_entries).normal(size=(3, num_entries))
    check(stack(scores), [num_entries, num_entries // 2, 0], k, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_shuffled_rows_get_the_shuffled_answer_and_neighbours_do_not_matter(
    lane, backend, small_tiles
):
    rows = stack(list(patterns(520).values())[:3])
    visible = np.int32([520, 400, 90])
    select = functools.partial(select_top_k, k=64, backend=backend)
    selected = np.asarray(select(rows, visible))
    order = np.array([2, 0, 1])
    np.testing.assert_array_equal(select(rows[order], visible[order]), selected[order])
    alone = select(np.where(np.arange(3)[:, None] == 1, rows, NAN), visible * (np.arange(3) == 1))
    np.testing.assert_array_equal(alone[1], selected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("k", [512, 1024])
@pytest.mark.parametrize("num_entries", [4096, 16384, 65536, 65537, 262144])
def test_every_pattern_at_real_sizes(num_entries, k):
    rows = stack(patterns(num_entries).values())
    rng = np.random.default_rng(k)
    check(rows, np.full(len(rows), num_entries), k, "mosaic_gpu")
    check(rows, np.resize(lengths(num_entries, k), len(rows)), k, "mosaic_gpu")
    check(rows, rng.integers(0, num_entries + 1, len(rows)), k, "mosaic_gpu")


@pytest.mark.gpu
def test_the_largest_k_and_thousands_of_rows():
    rng = np.random.default_rng(0)
    k = select_kernel.MAX_K
    check(rng.normal(size=(2, 70000)).astype(np.float32), [70000, 20000], k, "mosaic_gpu")
    many = rng.normal(size=(3000, 2048)).astype(np.float32)
    check(many, rng.integers(0, 2049, 3000), 512, "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["distinct", "all equal", "few values"])
def test_twenty_runs_are_equal(name):
    scores = jnp.asarray(np.tile(stack([patterns(65536)[name]]), (8, 1)))
    visible = jnp.full(8, 65000, jnp.int32)
    select = jax.jit(functools.partial(select_top_k, k=512, backend="mosaic_gpu"))
    first = np.asarray(select(scores, visible))
    for _ in range(20):
        np.testing.assert_array_equal(select(scores, visible), first)


def test_without_a_backend_the_reference_runs_on_a_cpu_and_agrees():
    scores, visible = stack(patterns(64).values()), jnp.full(18, 50, jnp.int32)
    with jax.default_device(jax.devices("cpu")[0]):
        selected = select_top_k(jnp.asarray(scores), visible, 8)
    np.testing.assert_array_equal(selected, [best_entries(row[:50], 8) for row in scores])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 512, 1000, 1024, select_kernel.MAX_K])
def test_stages_cover_a_row_and_end_in_one_tile(shape, k):
    _, num_entries = shape
    stages = select_kernel.choose_stages(num_entries, k)
    assert stages[-1].num_tiles == 1
    assert all(stage.span * stage.num_tiles >= num_entries for stage in stages)
    assert all(stage.tile <= select_kernel.MAX_TILE for stage in stages)
    if k in (512, 1024):
        assert len(stages) == (1 if num_entries <= select_kernel.MAX_TILE else 2)


VALID = {"scores": ones((3, 8)), "visible": zeros(3, jnp.int32), "k": 2}
ERRORS = [
    ("scores", ones(3), "scores must have rank 2"),
    ("scores", ones((2, 8)), "scores.* must agree on T"),
    ("scores", ones((3, 8), jnp.bfloat16), "scores must be float32, got bfloat16"),
    ("visible", zeros((3, 1), jnp.int32), "visible must have rank 1"),
    ("visible", zeros(3, jnp.uint32), "visible must be int32"),
    ("k", 0, "k must be at least 1, got 0"),
    ("backend", "cuda", "backend must be one of"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), ERRORS)
def test_an_error_names_the_argument_that_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        select_top_k(**VALID | {name: wrong})


def test_a_named_backend_runs_or_refuses():
    with pytest.raises(NotImplementedError, match="no 'triton_gpu' implementation"):
        select_top_k(**VALID, backend="triton_gpu")
    k = select_kernel.MAX_K + 1
    with gpu_interpreter(), pytest.raises(NotImplementedError, match="at most 8192 entries"):
        select_top_k(jnp.ones((1, k)), jnp.ones(1, jnp.int32), k, backend="mosaic_gpu")


def test_without_ptx_in_kernels_the_kernel_says_which_jax_has_it(monkeypatch):
    """As in jax 0.11.1."""
    monkeypatch.delattr(mgpu.utils, "inline_ptx")
    with (
        gpu_interpreter(),
        pytest.raises(NotImplementedError, match=r"needs jax 0\.11\.2 or newer"),
    ):
        select_top_k(**VALID, backend="mosaic_gpu")


def test_the_patterns_reject_other_orders():
    """Ties to the higher index, NaN first, and a minus zero below zero would all be seen."""
    k, seen = 64, {"ties": 0, "NaN": 0, "zeros": 0}
    for row in patterns(256).values():
        row = np.asarray(row, np.float32)
        expected = best_entries(row, k)
        backwards = 255 - best_entries(row[::-1], k)[::-1]
        nan_first = best_entries(np.where(np.isnan(row), INF, row), k)
        signed = np.where((row == 0) & np.signbit(row), np.float32(-1e-45), row)
        seen["ties"] += not np.array_equal(backwards, expected)
        seen["NaN"] += not np.array_equal(nan_first, expected)
        seen["zeros"] += not np.array_equal(best_entries(signed, k), expected)
    assert min(seen.values()) > 0
