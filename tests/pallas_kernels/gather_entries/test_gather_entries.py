import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from benchmarks.cases import cache as cases
from helpers import gather_cases, inputs, slow, token_oracle
from helpers.arrays import ones, zeros
from helpers.calls import make_call
from helpers.inputs import CASE_LAYER, LAYER, NUM_LAYERS, pack_call, poison, shuffled_table
from pallas_kernels import (
    CACHE_FORMATS,
    LayerPlanes,
    gather_entries,
    gather_window,
    get_cache_format,
)
from pallas_kernels.common import backend
from pallas_kernels.gather_entries import op

pytestmark = pytest.mark.unoptimised

C, ROPE, IC = 12, 4, 16
NUM_BLOCKS, LOGICAL = 12, 4
W, NUM_SLOTS, SLOTS = 8, 6, [3, 1, 4]
KERNEL = "triton_gpu"
dense_entries = functools.partial(gather_cases.dense_entries, backend=KERNEL)
dense_window = functools.partial(gather_cases.dense_window, backend=KERNEL)
AOT_CASES = [
    (
        name,
        dense_entries,
        gather_cases.entries_specs(kind, entries, cases.NUM_LAYERS[kind], context),
    )
    for name, kind, entries, context in cases.COMPILED_GATHERED
] + [("window", dense_window, gather_cases.window_specs(cases.COMPILED_WINDOWS))]
each_format = pytest.mark.parametrize("name", CACHE_FORMATS)

STATIC = ("dim", "dtype", "backend")
jit_gather_entries = jax.jit(gather_entries, static_argnames=STATIC)
jit_gather_window = jax.jit(gather_window, static_argnames=STATIC)


def store_entries(rng, codec, dim, rope_dim, num_entries, entries_per_block):
    """Requests with that many entries: the pool, its block table, and entries as they decode."""
    num_blocks = [-(-n // entries_per_block) for n in num_entries]
    table = shuffled_table(rng, num_blocks, num_logical=LOGICAL, num_physical=NUM_BLOCKS)
    pool = poison(codec.plane_shapes(dim, rope_dim), NUM_LAYERS, NUM_BLOCKS, entries_per_block)
    vectors = [rng.normal(size=(n, dim)) for n in num_entries]
    encoded, decoded = inputs.encode(codec, vectors, rope_dim)
    for request, (rows, n) in enumerate(zip(encoded, num_entries, strict=True)):
        everything = np.full(n, request), np.arange(n)
        pool = token_oracle.flush_write(pool, rows, table, *everything, layer=LAYER)
    return LayerPlanes(pool, CASE_LAYER, codec), table, decoded


def check_gather(codec, dim, rope_dim, entries_per_block, seed=0, backend="reference"):
    """Every boundary of the table, queries of all requests and of none, -1 among the indices."""
    rng = np.random.default_rng(seed)
    num_entries = [2 * entries_per_block + 1, 4 * entries_per_block, 0]
    stored = store_entries(rng, codec, dim, rope_dim, num_entries, entries_per_block)
    pool, table, vectors = stored
    segment_ids = np.array([1, 0, -1, 2, 1, 0], np.int32)
    index = np.full((6, 10), -1, np.int32)
    for token, request in enumerate(segment_ids):
        count = max(num_entries[request] if request >= 0 else 3, 1)
        edges = [0, entries_per_block - 1, entries_per_block, count - 1, count // 2]
        beyond = [] if request == 0 else [LOGICAL * entries_per_block, 10**9]
        places = [e for e in edges if e < count] + beyond
        index[token, rng.permutation(10)[: len(places)]] = places
    call = make_call(table, segment_ids)
    gathered, valid = jit_gather_entries(pool, call, index, dim=dim, backend=backend)
    expected = np.zeros((6, 10, dim), np.float32)
    present = np.zeros((6, 10), bool)
    for place in np.ndindex(6, 10):
        request, entry = segment_ids[place[0]], index[place]
        if token_oracle.locate(table, request, entry, entries_per_block):
            expected[place], present[place] = vectors[request][entry], True
    np.testing.assert_array_equal(valid, present)
    np.testing.assert_array_equal(gathered, expected)
    assert present.sum() >= 8


@each_format
def test_entries_come_back_as_they_were_encoded(name):
    """Known bug B32: zeros, not NaN, where there is no entry, whatever storage holds there."""
    check_gather(get_cache_format(name).entry, C, ROPE, entries_per_block=2)


@pytest.mark.parametrize(
    "name", slow.all_but(["bf16", "fp8_ue8m0", "fp8_ue8m0_fp8_index"], list(CACHE_FORMATS))
)
def test_index_keys_come_back_as_they_were_encoded(name):
    check_gather(get_cache_format(name).index_key, IC, 0, entries_per_block=3)


@pytest.mark.parametrize("entries_per_block", slow.all_but([1, 53], [1, 2, 53, 61, 69]))
def test_b2_blocks_of_any_size_are_addressed_by_their_own_stride(entries_per_block):
    check_gather(get_cache_format("f32").entry, C, ROPE, entries_per_block)


def test_gathering_keeps_the_order_of_the_indices_and_their_repetitions():
    rng = np.random.default_rng(0)
    codec = get_cache_format("bf16").entry
    pool, table, vectors = store_entries(rng, codec, C, ROPE, [12, 5, 3], 3)
    index = np.array([[11, 0, 5, 5, -1, 0]], np.int32)
    gathered, _ = jit_gather_entries(pool, make_call(table, [0]), index, dim=C)
    expected = vectors[0][index[0]]
    expected[4] = 0
    np.testing.assert_array_equal(gathered[0], expected)


def check_window(codec, lengths, counts, seed=0, backend="reference"):
    """Each token's window against its history; the ring holds only what it must, then poison."""
    rng = np.random.default_rng(seed)
    history = [rng.normal(size=(n + c, C)) for n, c in zip(lengths, counts, strict=True)]
    encoded, decoded = inputs.encode(codec, history, ROPE)
    ring = poison(codec.plane_shapes(C, ROPE), NUM_LAYERS, NUM_SLOTS, W)
    for slot, rows, length in zip(SLOTS, encoded, lengths, strict=True):
        stored = {name: plane[:length] for name, plane in rows.items()}
        places = np.full(length, slot), np.arange(length)
        ring = token_oracle.append_ring(ring, stored, *places, layer=LAYER)
    call = pack_call(rng, SLOTS, lengths, counts, num_tokens=40)
    rows = call.rows(encoded)
    ring = LayerPlanes(ring, CASE_LAYER, codec)
    gathered, valid = jit_gather_window(ring, rows, call.indices(), dim=C, backend=backend)
    expected, present = np.zeros((40, W, C), np.float32), np.zeros((40, W), bool)
    for token, request in enumerate(call.request_ids):
        if request >= 0:
            for p in token_oracle.window_positions(call.positions[token], W):
                expected[token, p % W], present[token, p % W] = decoded[request][p], True
    np.testing.assert_array_equal(valid, present)
    np.testing.assert_array_equal(gathered, expected)


@pytest.mark.parametrize("name", slow.all_but(["fp8_ue8m0"], list(CACHE_FORMATS)))
def test_a_window_is_read_from_the_ring_and_the_call_in_every_format(name):
    check_window(get_cache_format(name).entry, lengths=[0, W + 3, 5], counts=[W + 2, 5, 1])


@pytest.mark.parametrize("counts", [(1, 1, 1), (W - 1, W, W + 1), (0, 3 * W, 2)])
@pytest.mark.parametrize("length", [0, 1, W - 1, W, W + 1, 2 * W - 1, 16 * W])
def test_a_window_has_the_last_tokens_and_its_own(length, counts):
    """Known bugs B19 and B32: one token or many, and nothing that lies before position 0."""
    codec = get_cache_format("f32").entry
    check_window(codec, [length, length + 3, max(0, length - 2)], counts, seed=length)


def test_b5_a_call_of_padding_alone_reads_nothing():
    codec = get_cache_format("fp8_ue8m0").entry
    ring = poison(codec.plane_shapes(C, ROPE), NUM_LAYERS, NUM_SLOTS, W)
    rows = poison(codec.plane_shapes(C, ROPE), 40)
    call = make_call(np.full((1, 1), -1), np.full(40, -1))
    gathered, valid = jit_gather_window(LayerPlanes(ring, CASE_LAYER, codec), rows, call, dim=C)
    assert not gathered.any()
    assert not valid.any()


@pytest.mark.parametrize(
    ("name", "entries_per_block"),
    slow.all_but(
        [("fp8_ue8m0", 53)],
        list(itertools.product(["fp8_ue8m0", "fp8_per_entry"], [1, 2, 53])),
    ),
)
def test_the_entries_kernel_matches_the_oracle(lane, name, entries_per_block):
    codec = get_cache_format(name).entry
    check_gather(codec, C, ROPE, entries_per_block, backend=KERNEL)


@pytest.mark.parametrize(
    ("name", "counts"),
    slow.all_but(
        [("fp8_ue8m0", (W - 1, W, W + 1))],
        list(
            itertools.product(
                ["fp8_ue8m0", "fp8_per_entry"], [(1, 1, 1), (W - 1, W, W + 1), (0, 3 * W, 2)]
            )
        ),
    ),
)
def test_the_window_kernel_matches_the_oracle(lane, name, counts):
    codec = get_cache_format(name).entry
    check_window(codec, [0, 2 * W - 1, W], counts, backend=KERNEL)


def real_entries(rng, codec, num_entries):
    """A pool of blocks of 32 entries of the released size, with the table of three requests."""
    num_blocks = [-(-n // 32) for n in num_entries]
    table = shuffled_table(rng, num_blocks, num_logical=max(num_blocks), num_physical=20)
    pool = poison(codec.plane_shapes(512, 64), NUM_LAYERS, 20, 32)
    encoded, _ = inputs.encode(codec, [rng.normal(size=(n, 512)) for n in num_entries], 64)
    for request, (rows, n) in enumerate(zip(encoded, num_entries, strict=True)):
        everything = np.full(n, request), np.arange(n)
        pool = token_oracle.flush_write(pool, rows, table, *everything, layer=LAYER)
    return LayerPlanes(pool, CASE_LAYER, codec), table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    slow.all_but(
        [("fp8_ue8m0", jnp.bfloat16)],
        list(itertools.product(["fp8_ue8m0", "fp8_per_entry"], [jnp.float32, jnp.bfloat16])),
    ),
)
def test_the_entries_kernel_gives_the_references_bits_at_the_released_size(lane, name, dtype):
    rng = np.random.default_rng(0)
    codec = get_cache_format(name).entry
    num_entries = [100, 33, 64]
    pool, table = real_entries(rng, codec, num_entries)
    index = np.stack([rng.integers(-1, n, 23, np.int32) for n in num_entries])
    call = (pool, make_call(table, np.arange(3)), index)
    same = {"dim": 512, "dtype": dtype}
    expected, present = jit_gather_entries(*call, **same, backend="reference")
    gathered, valid = jit_gather_entries(*call, **same, backend=KERNEL)
    assert gathered.dtype == dtype
    np.testing.assert_array_equal(valid, present)
    np.testing.assert_array_equal(gathered, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("gibibytes", [1, 3, 5])
def test_the_entries_kernel_reaches_the_top_of_a_large_plane(gibibytes):
    """Known to go wrong: Triton's offsets in byte planes between 2 and 4 GiB."""
    codec = get_cache_format("fp8_ue8m0").entry
    num_blocks = gibibytes * 2**30 // (2 * 32 * 448) + 1
    shapes = codec.plane_shapes(512, 64)
    pool = {
        name: fill_by_place((2, num_blocks, 32, *s.shape), s.dtype) for name, s in shapes.items()
    }
    blocks = np.array([[num_blocks - 1, 0, num_blocks - 2, num_blocks // 2]], np.int32)
    pool = LayerPlanes(pool, CASE_LAYER, codec)
    call = (pool, make_call(blocks, [0]), np.arange(128, dtype=np.int32)[None])
    same = {"dim": 512}
    expected, _ = jit_gather_entries(*call, **same, backend="reference")
    gathered, valid = jit_gather_entries(*call, **same, backend=KERNEL)
    assert valid.all()
    assert len(np.unique(np.asarray(expected[0]), axis=0)) == 128
    np.testing.assert_array_equal(gathered, expected)


@functools.partial(jax.jit, static_argnums=(0, 1))
def fill_by_place(shape, dtype):
    """Ordinary codes and scales, which differ from row to row."""
    places = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(len(shape))]
    mixed = sum(p * jnp.uint32(2654435761 * (2 * n + 1) % 2**32) for n, p in enumerate(places))
    return ((mixed >> 8) % 63 + 64).astype(dtype)


@each_format
def test_none_picks_the_kernel_on_a_gpu_where_it_can_decode(monkeypatch, name):
    monkeypatch.setattr(backend, "compute_capability", lambda: (9, 0))
    chosen = {b: lambda *_, b=b, **__: b for b in op._ENTRIES}
    monkeypatch.setattr(op, "_ENTRIES", chosen)
    codec = get_cache_format(name).entry
    planes = {
        n: jnp.zeros((1, 2, 4, *s.shape), s.dtype) for n, s in codec.plane_shapes(C, ROPE).items()
    }
    one = jnp.zeros((1, 1), jnp.int32)
    pool, call = LayerPlanes(planes, jnp.int32(0), codec), make_call(one, one[0])
    picked = gather_entries(pool, call, one, dim=C)
    assert picked == (KERNEL if "fp8" in name else "reference")


def test_a_codec_without_a_kernel_is_refused_by_name():
    arguments = inputs.valid_arguments("gather_entries")
    with pk.gpu_interpreter(), pytest.raises(NotImplementedError, match="backend='reference'"):
        gather_entries(**arguments, backend=KERNEL)


ENTRY_ERRORS = [
    ("call.block_table", zeros(3, jnp.int32), "block_table must have rank 2"),
    ("call.block_table", zeros((2, 3), jnp.uint32), "block_table must be int32"),
    ("index", zeros(3, jnp.int32), "index must have rank 2"),
    ("index", zeros((3, 3)), "index must be int32"),
    ("index", zeros((2, 3), jnp.int32), "index must agree on T"),
    ("call.segment_ids", zeros(3), "segment_ids must be int32"),
    ("pool.planes", {"other": ones((3, 4, 2, 8))}, "pool"),
    ("pool.planes", {"values": ones((3, 4, 2, 7))}, "pool"),
]
WINDOW_ERRORS = [
    ("rows", {"other": ones((3, 8))}, "rows must have the planes of ring"),
    ("rows", {"values": ones((3, 1))}, r"rows\['values'\] must hold rows of float32\[8\]"),
    ("rows", {"values": ones((2, 8))}, "rows"),
    ("call.slots", zeros(2, jnp.int32), "slots.* must agree on T"),
    ("call.positions", zeros(3), "positions must be int32"),
    ("call.lengths", zeros(3, jnp.int8), "lengths must be int32"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), ENTRY_ERRORS)
def test_gather_entries_names_the_argument_that_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        gather_entries(
            **inputs.replace_argument(inputs.valid_arguments("gather_entries"), name, wrong)
        )


@pytest.mark.parametrize(("name", "wrong", "message"), WINDOW_ERRORS)
def test_gather_window_names_the_argument_that_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        gather_window(
            **inputs.replace_argument(inputs.valid_arguments("gather_window"), name, wrong)
        )
