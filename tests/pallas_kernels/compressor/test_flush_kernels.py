"""The kernels that append, compress and flush, against the references that define them."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallas_kernels as pk
from benchmarks.cases import cache as cases
from helpers import cache_specs, layer_cases, slow
from helpers.layer_cases import (
    COMPRESSION_RATIOS,
    CUTS,
    EPS,
    KERNEL,
    LENGTHS,
    MAX_SHARE,
    C,
    draw_norms,
    flat,
    run,
    step,
)
from helpers.schedules import assert_same_bytes, random_cuts
from pallas_kernels import CACHE_FORMATS
from pallas_kernels.common import norm_rope
from pallas_kernels.compressor import op, triton_gpu
from pallas_kernels.compressor.closing import find_closing
from pallas_kernels.compressor.reference import Windows
from pallas_kernels.compressor.tiling import Tiling
from pallas_kernels.gpu import triton, triton_codecs, triton_rope

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
    pytest.mark.unoptimised,
]


def draw_histories(*arguments):
    """Without index queries, which are not stored: their kernel would take time for nothing."""
    drawn = layer_cases.draw_histories(*arguments)
    return {name: history for name, history in drawn.items() if name != "index_queries"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow.all_but(
        [("fp8_ue8m0", jnp.bfloat16)],
        [(name, jnp.bfloat16) for name in CACHE_FORMATS] + [("f32", jnp.float32)],
    ),
)
@pytest.mark.parametrize("kind", slow.all_but(["csa"], list(COMPRESSION_RATIOS)))
def test_the_kernels_store_what_the_references_store(lane, name, kind, dtype):
    """Among them: windows cut anywhere, several a call, blocks that are absent, idle rows."""
    rng = np.random.default_rng(0)
    histories, norms = draw_histories(rng, kind, LENGTHS, dtype), draw_norms(rng, kind, dtype)
    (actual, _), (expected, _) = (
        run(name, kind, histories, CUTS, norms, num_tokens=64, backend=backend)
        for backend in (KERNEL, "reference")
    )
    layer_cases.assert_stored_alike(CACHE_FORMATS[name], actual, expected)


@pytest.mark.parametrize("kind", slow.all_but(["csa"], list(COMPRESSION_RATIOS)))
def test_the_bound_rejects_a_window_shifted_by_a_token_and_a_wrong_weight(lane, kind):
    name = "fp8_ue8m0"
    fmt, rng = CACHE_FORMATS[name], np.random.default_rng(0)
    histories, norms = draw_histories(rng, kind, LENGTHS), draw_norms(rng, kind, jnp.bfloat16)
    shifted = histories | {
        "main": [{part: np.roll(x, 1, axis=0) for part, x in h.items()} for h in histories["main"]]
    }
    weights = (norms[0], *(jnp.roll(norm, 1) for norm in norms[1:]))
    expected, _ = run(name, kind, histories, CUTS, norms, num_tokens=64, backend="reference")
    for broken in ((shifted, norms), (histories, weights)):
        actual, _ = run(name, kind, broken[0], CUTS, broken[1], num_tokens=64)
        share = layer_cases.differing_share(fmt.entry, actual["entries"], expected["entries"], C)
        assert share > 5 * MAX_SHARE


@pytest.mark.parametrize("kind", slow.all_but(["csa"], list(COMPRESSION_RATIOS)))
def test_b5_a_call_of_padding_alone_writes_nothing(lane, kind):
    name, rng = "fp8_ue8m0", np.random.default_rng(0)
    histories, norms = draw_histories(rng, kind, LENGTHS), draw_norms(rng, kind, jnp.bfloat16)
    layer, _ = run(name, kind, histories, [[0]] * len(LENGTHS), norms, num_tokens=64)
    assert_same_bytes(flat(layer), flat(layer_cases.empty_layer(CACHE_FORMATS[name], kind)))


SCHEDULES = {
    "single tokens": ([[1] * n for n in LENGTHS], {"num_tokens": 3, "num_rows": 3}),
    "random cuts": ([random_cuts(np.random.default_rng(n), n, 16) for n in LENGTHS], {}),
    "alone": ([[5] * (LENGTHS[0] // 5) + [LENGTHS[0] % 5]], {"num_tokens": 5, "num_rows": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("kind", COMPRESSION_RATIOS)
def test_bits_do_not_depend_on_how_tokens_are_cut_into_calls(lane, kind, schedule):
    """Known bugs B1, B8, B19: entries and all that is kept, in buckets of other shapes too."""
    name, rng = "fp8_ue8m0", np.random.default_rng(0)
    cuts, shapes = SCHEDULES[schedule]
    histories = draw_histories(rng, kind, LENGTHS)
    norms = draw_norms(rng, kind, jnp.bfloat16)
    whole, _ = run(
        name, kind, histories, [[n] for n in LENGTHS[: len(cuts)]], norms, num_tokens=128, seed=1
    )
    actual, _ = run(name, kind, histories, cuts, norms, **{"num_tokens": 64} | shapes)
    assert_same_bytes(flat(actual), flat(whole))


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPRESSION_RATIOS)
def test_windows_may_close_in_any_order(lane, kind, monkeypatch):
    """The definitions and kernels take the closing tokens, and -1, as they come."""
    rng = np.random.default_rng(0)
    histories, norms = draw_histories(rng, kind, LENGTHS), draw_norms(rng, kind, jnp.bfloat16)
    arguments = ("fp8_ue8m0", kind, histories, CUTS, norms)
    expected, _ = run(*arguments, num_tokens=64)

    def find_in_any_order(call, compression_ratio):
        closing = find_closing(call, compression_ratio)
        return closing[np.random.default_rng(1).permutation(closing.shape[0])]

    monkeypatch.setattr(op, "find_closing", find_in_any_order)
    for backend in (KERNEL, "reference"):
        step.clear_cache()
        actual, _ = run(*arguments, num_tokens=64, backend=backend)
        step.clear_cache()
        if backend == KERNEL:
            assert_same_bytes(flat(actual), flat(expected))
        layer_cases.assert_stored_alike(CACHE_FORMATS["fp8_ue8m0"], actual, expected)


@pytest.mark.slow
def test_b5_a_program_without_a_window_writes_nothing_where_means_come_from_memory(
    lane, monkeypatch
):
    """Its token, were it the first one, would have an entry."""
    tiling = Tiling(warps=4, channels=12, pool_warps=1, chunk=3)
    monkeypatch.setattr(triton_gpu, "choose_hca", lambda *sizes: tiling)
    name, rng = "fp8_ue8m0", np.random.default_rng(0)
    histories, norms = draw_histories(rng, "hca", [17]), draw_norms(rng, "hca", jnp.bfloat16)
    step.clear_cache()
    layer, _ = run(name, "hca", histories, [[17]], norms, num_tokens=17, num_rows=1)
    step.clear_cache()
    empty = layer_cases.empty_layer(CACHE_FORMATS[name], "hca")
    assert_same_bytes(flat(layer["entries"]), flat(empty["entries"]))


@pytest.mark.slow
@pytest.mark.parametrize("width", slow.all_but([512], [128, 512]))
def test_any_number_of_warps_adds_in_the_order_of_the_reference(lane, width):
    x = np.random.default_rng(width).normal(size=(5, width)).astype(np.float32)

    def add(rows, sums):
        row = pl.program_id(0)
        tile = triton.load_row(rows, (row,), start=0, count=width, width=width)
        sums[row] = triton_rope.sum_by_pairs(tile)

    expected = np.asarray(norm_rope.sum_by_pairs(jnp.asarray(x)))[:, 0]
    assert np.any(expected != x.sum(axis=-1))
    for num_warps in (1, 2, 4, 8):
        actual = triton.launch(
            add,
            grid=(5,),
            inputs=jnp.asarray(x),
            outputs=jax.ShapeDtypeStruct((5,), jnp.float32),
            num_warps=num_warps,
            name="add",
        )
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dim"),
    slow.all_but(
        [("fp8_ue8m0", 128)],
        [
            (name, dim)
            for name in ("fp8_ue8m0", "fp8_per_entry", "fp8_ue8m0_fp8_index")
            for dim in (4, 8, 16, 128)
        ],
    ),
)
def test_index_keys_are_encoded_to_the_byte(lane, name, dim):
    """Among them zeros of both signs, and keys of too few codes for a word."""
    codec, rng = CACHE_FORMATS[name].index_key, np.random.default_rng(dim)
    x = rng.integers(-40, 41, (9, dim)) * 2.0 ** rng.integers(-8, 8, (9, 1))
    x[0] = 0.0
    x = jnp.asarray(x, jnp.float32)
    expected = codec.encode(x, 0)

    def encode_keys(keys, stored):
        token, width = pl.program_id(0), triton_codecs.tile_width(codec, dim)
        key = triton.load_row(keys, (token,), start=0, count=dim, width=width)
        encoded = triton_codecs.encode(codec, key, dim=dim, rope_dim=0)
        triton_codecs.store_entry(stored, (token,), encoded)

    empty = {plane: jnp.zeros_like(values) for plane, values in expected.items()}
    written = triton.launch(
        encode_keys,
        grid=(9,),
        inputs=x,
        in_place=triton.as_words(empty),
        num_warps=4,
        name="encode_keys",
    )
    actual = triton.from_words(written, empty)
    assert_same_bytes(*(jax.tree.map(np.asarray, planes) for planes in (actual, expected)))


def draw_large_call(rng, num_blocks, entries_per_block, dim):
    """A decode call of 32 requests that all close a CSA window, in the last blocks there are."""
    num_rows, compression_ratio = 32, COMPRESSION_RATIOS["csa"]
    positions = np.full(num_rows, 8 * compression_ratio - 1, np.int32)
    table = np.full((num_rows, 32), -1, np.int32)
    block = (8 - 1) // entries_per_block
    table[:, block] = num_blocks - 1 - rng.permutation(num_rows)
    state = {
        part: rng.normal(size=(1, num_rows, 2 * compression_ratio, 2 * dim))
        for part in ("values", "scores")
    }
    new = {part: rng.normal(size=(num_rows, 2 * dim)) for part in ("values", "scores")}
    each = np.arange(num_rows, dtype=np.int32)
    call = pk.CallIndices(
        segment_ids=each,
        slots=each,
        positions=positions,
        lengths=positions,
        row_slots=each,
        row_lengths=positions,
        row_counts=np.ones_like(each),
        row_offsets=each,
        block_table=table,
        max_row_tokens=1,
    )
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (state, new))
    return *arrays, jax.tree.map(jnp.asarray, call)


@functools.partial(jax.jit, donate_argnums=0)
def flush_large(pool, state, new, call):
    norm, codec = jnp.ones(512, jnp.bfloat16), CACHE_FORMATS["fp8_ue8m0"].entry
    return pk.flush_csa(
        [pk.Compressor(state, new, norm, pool, codec)],
        call,
        jnp.ones(32, jnp.float32),
        layer=jnp.int32(0),
        compression_ratio=COMPRESSION_RATIOS["csa"],
        eps=EPS,
        backend=KERNEL,
    )[0]


@pytest.mark.gpu
@pytest.mark.parametrize("gibibytes", [3, 5])
def test_planes_past_2_and_4_gib_are_exact(gibibytes):
    """Pallas through Triton has offsets of 32 bits: bytes past 2 GiB are reached as words."""
    shapes = CACHE_FORMATS["fp8_ue8m0"].entry.plane_shapes(512, 64)
    num_blocks = (gibibytes << 30) // (32 * 448)

    def flush(count):
        state, new, call = draw_large_call(np.random.default_rng(0), count, 32, 512)
        pool = {n: jnp.zeros((1, count, 32, *s.shape), s.dtype) for n, s in shapes.items()}
        flushed = flush_large(pool, state, new, call)
        untouched = {name: int(jnp.max(plane[:, : count - 32])) for name, plane in flushed.items()}
        return {
            name: np.asarray(plane[:, count - 32 :]) for name, plane in flushed.items()
        }, untouched

    (large, untouched), (small, _) = flush(num_blocks), flush(64)
    assert_same_bytes(large, small)
    assert untouched == {"nope": 0, "rope": 0, "scale": 0}
    assert np.any(small["nope"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", COMPRESSION_RATIOS)
def test_twenty_runs_are_bitwise_equal(kind):
    name, rng = "fp8_ue8m0", np.random.default_rng(0)
    histories = draw_histories(rng, kind, LENGTHS)
    norms = draw_norms(rng, kind, jnp.bfloat16)
    first = flat(run(name, kind, histories, CUTS, norms, num_tokens=64)[0])
    for _ in range(19):
        again, _ = run(name, kind, histories, CUTS, norms, num_tokens=64)
        assert_same_bytes(flat(again), first)


@pytest.mark.parametrize(("dims", "warps"), [((512, 128), [8, 1]), ((192, 256), [8, 2])])
def test_launches_apart_have_warps_by_lanes_not_channels(dims, warps, monkeypatch):
    """An entry of 192 channels takes 512 lanes; by channels it had three warps beside four."""
    monkeypatch.setattr(triton_gpu, "choose_csa", lambda *sizes: Tiling(warps=4, apart=True))
    _, flush, specs, _ = aot_csa("fp8_ue8m0", 64, 64, dims)
    with pk.gpu_interpreter(), mock.patch.object(triton, "launch", wraps=triton.launch) as launch:
        jax.eval_shape(flush, *specs)
    assert [call.kwargs["num_warps"] for call in launch.call_args_list] == warps


@pytest.mark.parametrize("warps", [0, 3, 64])
def test_warps_that_no_program_can_have_are_refused(warps, monkeypatch):
    """Before anything is compiled: given three, LLVM ends the process."""
    monkeypatch.setattr(triton_gpu, "choose_csa", lambda *sizes: Tiling(warps=warps))
    _, flush, specs, _ = aot_csa("fp8_ue8m0", 64, 64)
    with pk.gpu_interpreter(), pytest.raises(ValueError, match=f"warps a program, got {warps}"):
        jax.eval_shape(flush, *specs)


def _closing(kind, tokens, rows):
    return cache_specs.i32(min(tokens, tokens // cases.COMPRESSION_RATIO[kind] + rows))


def aot_csa(name, tokens, rows, dims=(cases.C, cases.IC)):
    """The kernel of `flush_csa`, of a Flash layer unless told, and its arguments.

    The first is donated. Which tokens close a window is given, so that the kernel is all there is.
    """
    codecs = (CACHE_FORMATS[name].entry, CACHE_FORMATS[name].index_key)
    specs = (
        tuple(cache_specs.pool(codec, dim, "csa") for codec, dim in zip(codecs, dims, strict=True)),
        tuple(cache_specs.state("csa", dim) for dim in dims),
        tuple(cache_specs.both(tokens, 2 * dim) for dim in dims),
        tuple(jax.ShapeDtypeStruct((dim,), jnp.bfloat16) for dim in dims),
        cache_specs.array(cases.ROPE // 2),
        cache_specs.call(tokens, rows),
        _closing("csa", tokens, rows),
        cache_specs.i32(),
    )

    def flush(pools, states, rows, norms, frequencies, call, closing, layer):
        compressors = [
            pk.Compressor(*arrays)
            for arrays in zip(states, rows, norms, pools, codecs, strict=True)
        ]
        ratio = cases.COMPRESSION_RATIO["csa"]
        windows = Windows(call, frequencies, closing, layer, ratio, EPS)
        return triton_gpu.flush_csa(compressors, windows)

    return f"flush_csa {name} {tokens} tokens", flush, specs, (0,)


def aot_hca(name, tokens, rows):
    """The kernel of `flush_hca` likewise."""
    codec = CACHE_FORMATS[name].entry
    specs = (
        cache_specs.pool(codec, cases.C, "hca"),
        cache_specs.state("hca", cases.C),
        cache_specs.both(tokens, cases.C),
        jax.ShapeDtypeStruct((cases.C,), jnp.bfloat16),
        cache_specs.array(cases.ROPE // 2),
        cache_specs.call(tokens, rows),
        _closing("hca", tokens, rows),
        cache_specs.i32(),
    )

    def flush(pool, running, rows, norm, frequencies, call, closing, layer):
        compressor = pk.Compressor(running, rows, norm, pool, codec)
        ratio = cases.COMPRESSION_RATIO["hca"]
        windows = Windows(call, frequencies, closing, layer, ratio, EPS)
        return triton_gpu.flush_hca(compressor, windows)

    return f"flush_hca {name} {tokens} tokens", flush, specs, (0,)


def aot_append(kind, name, tokens, rows):
    """`append_tokens` of a CSA or an HCA layer; the rings and the pool, first, are donated."""
    codec = CACHE_FORMATS[name].entry
    rings, new = [cache_specs.ring(codec)], [cache_specs.planes(codec, cases.C, tokens)]
    running = projections = None
    if kind == "csa":
        rings += [cache_specs.state("csa", dim) for dim in (cases.C, cases.IC)]
        new += [cache_specs.both(tokens, 2 * dim) for dim in (cases.C, cases.IC)]
    else:
        running, projections = cache_specs.state("hca", cases.C), cache_specs.both(tokens, cases.C)

    def append(state, new, projections, call, layer):
        rings, running = state
        return pk.append_tokens(
            rings,
            new,
            running,
            projections,
            call,
            layer=layer,
            compression_ratio=cases.COMPRESSION_RATIO["hca"],
            backend=KERNEL,
        )

    specs = ((rings, running), new, projections, cache_specs.call(tokens, rows), cache_specs.i32())
    return f"append_tokens {kind} {name} {tokens} tokens", append, specs, (0,)


def aot_write(name, count, layers, blocks, entries_per_block, requests, logical):
    """`flush_write` of entries to blocks; the pool is donated."""
    codec = CACHE_FORMATS[name].entry
    pool = cache_specs.planes(codec, cases.C, layers, blocks, entries_per_block)
    rows = cache_specs.planes(codec, cases.C, count)

    def write(pool, rows, table, segment_ids, numbers, layer):
        return pk.flush_write(
            pool, rows, table, segment_ids, numbers, layer=layer, backend="triton_gpu"
        )

    specs = (
        pool,
        rows,
        cache_specs.i32(requests, logical),
        cache_specs.i32(count),
        cache_specs.i32(count),
        cache_specs.i32(),
    )
    return f"flush_write {name} {count} entries", write, specs, (0,)


AOT_CASES = [
    *(aot_write(*case) for case in cases.COMPILED_WRITTEN),
    *({"csa": aot_csa, "hca": aot_hca}[kind](*case) for kind, *case in cases.COMPILED_FLUSHED),
    *(aot_append(*case) for case in cases.COMPILED_APPENDED_ALONE),
]
"""Name, function and argument shapes, to compile for each GPU; argument 0 is donated."""
