"""Rows of planes packed, unpacked and summed: bytes, so that all is compared to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from benchmarks.cases.cache import COMPILED_MOVED, COMPILED_MOVED_AMONG
from helpers import row_cases, slow
from helpers.arrays import zeros
from helpers.inputs import replace_argument
from pallas_kernels.pack_rows import pack_rows, reference, sum_rows, triton_gpu, unpack_rows

pytestmark = pytest.mark.unoptimised

BF16 = jnp.bfloat16
PLANES = {
    "blocks": [(3, (4, 112), "u1"), (3, (4, 16), BF16), (3, (4, 8), "u1"), (2, (1, 8), "u1")],
    "V4.1": [(2, (4, 16), "u1"), (1, (3,), "i4"), (2, (8, 32), "f4"), (3, (4, 4), "u1")],
    "all groups": [(3, (4, 48), "u1"), (2, (4,), BF16), (4, (3,), "i4"), (2, (40,), "f4")],
    "one": [(1, (), "u4")],
    "none of some": [(2, (0,), "u1"), (0, (4,), "f4"), (2, (6,), BF16)],
}
"""(L, what follows A, dtype) of each plane. "All groups" are of 4, 2 and 1 words. In "V4.1" rows
and all words behind the ids' three begin at no multiple of 16 bytes."""
NUM_PLACES = 7

jit_pack = jax.jit(pack_rows, static_argnames="backend")
jit_unpack = jax.jit(unpack_rows, static_argnames="backend")
jit_sum = jax.jit(sum_rows, static_argnames="backend")


def kernel(op):
    return functools.partial(op, backend="triton_gpu")


def aot_case(op, what, count):
    planes = row_cases.FLASH[what](COMPILED_MOVED_AMONG[what])
    rows = jax.ShapeDtypeStruct((count,), np.int32)
    packed = jax.ShapeDtypeStruct((count, row_cases.WIDTH[what]), np.uint8)
    function, specs, *donated = {
        "pack": (pack_rows, [planes, rows]),
        "unpack": (unpack_rows, [planes, rows, packed], (0,)),
        "sum": (sum_rows, [packed]),
    }[op]
    return f"{op} {count} {what}", kernel(function), specs, *donated


AOT_CASES = [aot_case(*case) for case in COMPILED_MOVED]


def draw(name, seed=0, num_places=NUM_PLACES):
    """Planes whose bytes may be anything, NaN included."""
    rng = np.random.default_rng(seed)
    return [
        draw_bits(rng, (num_layers, num_places, *rest), dtype)
        for num_layers, rest, dtype in PLANES[name]
    ]


def draw_bits(rng, shape, dtype):
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def draw_rows(count, num_places, seed=0):
    """Some are none, some none that there could be, and the others differ; the first is there."""
    rows = np.full(count, -1, np.int32)
    rows[: num_places - 1] = np.random.default_rng(seed).permutation(num_places)[:count][
        : num_places - 1
    ]
    rows[2::7] = (num_places, -1, 2**31 - 1, -(2**31))[: len(rows[2::7])] if count < 30 else -1
    return rows


def oracle(planes, rows):
    """The bytes of each row, one plane and layer after the other."""
    width = sum(plane[:, 0].nbytes for plane in planes)
    found = [
        b"".join(layer[row].tobytes() for plane in planes for layer in plane)
        if 0 <= row < planes[0].shape[1]
        else bytes(width)
        for row in rows
    ]
    return np.array([np.frombuffer(row, np.uint8) for row in found]).reshape(len(rows), width)


def oracle_sum(row):
    """Of its words one after the other, in whole numbers of any size."""
    row = bytes(row) + bytes(-len(row) % 4)
    totals = [0, 0]
    for place in range(len(row) // 4):
        word = int.from_bytes(row[4 * place : 4 * place + 4], "little")
        for half, factor in enumerate((0x9E3779B1, 0x85EBCA77)):
            x = word ^ (place + 1) * factor % 2**32
            x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
            x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
            totals[half] = (totals[half] + (x ^ x >> 16)) % 2**32
    return totals


def assert_same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def check(name, count, backend, num_places=NUM_PLACES):
    """All three ops against the oracle."""
    planes, rows = draw(name, num_places=num_places), draw_rows(count, num_places)
    expected = oracle(planes, rows)
    packed, sums = jit_pack([jnp.asarray(p) for p in planes], jnp.asarray(rows), backend=backend)
    np.testing.assert_array_equal(packed, expected, strict=True)
    np.testing.assert_array_equal(sums, np.uint32([oracle_sum(row) for row in expected]))
    np.testing.assert_array_equal(jit_sum(packed, backend=backend), sums, strict=True)
    before, places = draw(name, 1, num_places), draw_rows(count, num_places, 1)
    after = [plane.copy() for plane in before]
    for row, place in zip(rows, places, strict=True):
        if 0 <= place < num_places:
            for old, new in zip(after, planes, strict=True):
                old[:, place] = new[:, row] if 0 <= row < num_places else 0
    given = [jnp.asarray(plane) for plane in before], jnp.asarray(places), packed
    assert_same_bits(jit_unpack(*given, backend=backend), after)


@pytest.mark.parametrize(
    ("name", "count"), [("blocks", 4), ("blocks", 1), ("V4.1", 16), ("one", 3), ("none of some", 2)]
)
def test_the_reference_has_the_bytes_and_sums_of_the_definition(name, count):
    check(name, count, "reference")


def test_rows_that_are_no_whole_words_are_summed_as_if_zeros_followed():
    rows = np.random.default_rng(0).integers(0, 256, (3, 7), np.uint8)
    np.testing.assert_array_equal(jit_sum(rows), np.uint32([oracle_sum(row) for row in rows]))


@pytest.fixture
def small_tiles(monkeypatch):
    """So that planes have several, the last of them not full."""
    monkeypatch.setattr(triton_gpu, "_TILE", 128)
    jax.clear_caches()


USUAL = [("one", 64)]
CASES = [
    *USUAL,
    ("all groups", 4),
    ("blocks", 1),
    ("V4.1", 4),
    ("V4.1", 1),
    ("blocks", 16),
    ("V4.1", 64),
]


@pytest.mark.parametrize(("name", "count"), slow.all_but(USUAL, CASES))
def test_the_kernels_have_the_bits_of_the_definition(lane, small_tiles, name, count):
    """In several tiles, which run on through layers, of words alone and of four together."""
    check(name, count, "triton_gpu", num_places=70 if count == 64 else NUM_PLACES)


@pytest.mark.parametrize("name", ["none of some", "one"])
def test_nothing_is_moved_where_there_is_nothing(lane, name):
    planes = [jnp.asarray(plane) for plane in draw(name)]
    packed, sums = jit_pack(planes, jnp.zeros(0, jnp.int32), backend="triton_gpu")
    assert packed.shape == (0, sum(plane[:, 0].nbytes for plane in draw(name)))
    assert sums.shape == (0, 2)
    same = jit_unpack(planes, jnp.zeros(0, jnp.int32), packed, backend="triton_gpu")
    assert_same_bits(same, planes)
    empty = [plane for plane in planes if not plane.size]
    for given in [empty] if empty else []:
        packed, sums = jit_pack(given, jnp.zeros(3, jnp.int32), backend="triton_gpu")
        assert packed.shape == (3, 0)
        assert not np.any(sums)


@pytest.mark.parametrize(
    ("planes", "groups"),
    [
        (row_cases.FLASH["blocks"](4), {4, 2}),
        (row_cases.FLASH["slots"](4), {4}),
        ([jax.ShapeDtypeStruct(s, np.int32) for s in ((1, 4, 3), (2, 4, 8))], {1}),
        (draw("all groups"), {4, 2, 1}),
    ],
)
def test_words_go_in_groups_of_sixteen_bytes_where_they_can(planes, groups):
    """Of V4-Flash's blocks two for the scales of an HCA entry, which are two words."""
    parts = triton_gpu._parts_of(planes)
    assert {part.group for part in parts} == groups
    for part in parts:
        assert part.start % part.group == part.chunk % part.group == 0


def test_rows_of_the_released_sizes_are_as_wide_as_they_are_said_to_be():
    widths = {
        what: sum(map(reference.plane_bytes, planes(2))) for what, planes in row_cases.FLASH.items()
    }
    assert widths == row_cases.WIDTH == {"blocks": 449_824, "slots": 5_132_288}


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4, 16, 64])
@pytest.mark.parametrize("family", ["blocks", "slots"])
def test_at_the_sizes_of_v4_flash(family, count):
    """Sixteen slots at most; twenty runs give equal bits, and other places stay as they are."""
    count = min(count, 16) if family == "slots" else count
    rng = np.random.default_rng(count)
    planes = [jnp.asarray(draw_bits(rng, p.shape, p.dtype)) for p in row_cases.FLASH[family](80)]
    rows, places = (rng.permutation(80)[:count].astype(np.int32) for _ in range(2))
    rows[1::5], places[2::5] = -1, -1
    expected = jit_pack(planes, rows, backend="reference")
    for _ in range(20):
        assert_same_bits(jit_pack(planes, rows, backend="triton_gpu"), expected)
    packed, sums = expected
    np.testing.assert_array_equal(jit_sum(packed, backend="triton_gpu"), sums)
    written = jit_unpack(planes, places, packed, backend="reference")
    assert_same_bits(jit_unpack(planes, places, packed, backend="triton_gpu"), written)


@pytest.mark.gpu
def test_rows_of_a_plane_beyond_four_gib():
    """Whose offsets have 64 bits; the last place of the last layer is beyond it."""
    plane = jnp.zeros((5, 2**20, 1, 1024), jnp.uint8).at[4, 2**20 - 1].set(7)
    rows = jnp.int32([2**20 - 1, 0])
    packed, _ = jit_pack([plane], rows, backend="triton_gpu")
    assert np.all(np.asarray(packed[0, -1024:]) == 7)
    assert not np.any(np.asarray(packed[0, :-1024]))
    assert not np.any(np.asarray(packed[1]))
    into = jax.jit(kernel(unpack_rows), donate_argnums=0)
    (plane,) = into([plane], rows[::-1], packed)
    assert np.all(np.asarray(plane[4, 0]) == 7)
    assert not np.any(np.asarray(plane[4, -1]))


@pytest.mark.gpu
def test_an_op_on_a_gpu_takes_the_kernel():
    planes, rows = [jnp.zeros((2, 3, 8), jnp.uint8)], jnp.zeros(1, jnp.int32)
    assert "pack_rows" in jit_pack.lower(planes, rows).compile().as_text()


@pytest.mark.parametrize("op", ["pack_rows", "unpack_rows", "sum_rows"])
def test_bytes_that_are_no_words_are_said_to_take_the_reference(monkeypatch, op):
    monkeypatch.setattr("pallas_kernels.common.backend.compute_capability", lambda: (9, 0))
    planes, rows = [jnp.zeros((2, 3, 5), jnp.uint8)], jnp.zeros(1, jnp.int32)
    packed = jnp.zeros((1, 10), jnp.uint8)
    given = {"pack_rows": (planes, rows), "unpack_rows": (planes, rows, packed)}
    with pytest.warns(pk.FallbackWarning, match=rf"{op} of .*needs .*whole words of 4 bytes"):
        jax.eval_shape(getattr(pk, op), *given.get(op, (packed,)))


VALID = {
    "planes": [zeros((2, 5, 8), jnp.uint8), zeros((1, 5, 3), jnp.float32)],
    "rows": zeros(3, jnp.int32),
    "packed": zeros((3, 28), jnp.uint8),
}
ERRORS = [
    ("planes", [], "planes must hold one or more of arrays"),
    ("planes", [zeros(3)], r"planes\[0\] must have rank 2 or more, got .*shape=\(3,\)"),
    ("planes", [zeros((2, 5), bool)], r"planes\[0\] must hold numbers .*, got bool"),
    ("planes", [np.zeros((2, 5))], r"planes\[0\] must hold numbers of 1, 2 or 4 .*float64"),
    ("planes", [zeros((2, 5)), zeros((2, 6))], "planes must agree on A, .*second axis"),
    ("rows", zeros(3), "rows must be int32"),
    ("rows", zeros((3, 1), jnp.int32), "rows must have rank 1"),
    ("packed", zeros((3, 24), jnp.uint8), r"packed must be \[n, bytes of a row\] = \[3, 28\]"),
    ("packed", zeros((2, 28), jnp.uint8), r"packed must be \[n, bytes of a row\] = \[3, 28\]"),
    ("packed", zeros((3, 28), jnp.int8), "packed must be uint8, got int8"),
    ("backend", "cuda", "backend must be one of"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), ERRORS)
def test_an_error_names_the_argument_that_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        unpack_rows(**replace_argument(VALID, name, wrong))


def test_a_named_backend_runs_or_refuses():
    planes, rows = [jnp.zeros((2, 3, 5), jnp.uint8)], jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match=r"planes\[0\] uint8\[2, 3, 5\] has 5 bytes"):
        pack_rows(planes, rows, backend="triton_gpu")
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(NotImplementedError, match="need an NVIDIA GPU"),
    ):
        pack_rows(VALID["planes"], VALID["rows"], backend="triton_gpu")


@pytest.mark.parametrize("fault", ["layers in another order", "planes in another order", "a place"])
def test_the_cases_reject_other_layouts(fault):
    planes, rows = draw("blocks"), np.int32([3, 0])
    others = {
        "layers in another order": [plane[::-1] for plane in planes],
        "planes in another order": planes[::-1],
        "a place": [np.roll(plane, 1, axis=1) for plane in planes],
    }[fault]
    expected = oracle(planes, rows)
    found, sums = jit_pack([jnp.asarray(p) for p in others], rows, backend="reference")
    assert np.all(np.any(np.asarray(found) != expected, axis=1))
    assert np.all(sums != jit_sum(expected))
