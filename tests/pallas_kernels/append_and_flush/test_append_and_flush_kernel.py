"""The kernels that norm, rotate and encode a call's tokens, and those that keep them too."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from benchmarks.cases import cache as cases
from helpers import cache_specs, inputs, slow
from helpers.arrays import ones, zeros
from helpers.layer_cases import (
    COMPRESSION_RATIOS,
    EPS,
    FREQUENCIES,
    KERNEL,
    LENGTHS,
    MAX_SHARE,
    ROPE,
    C,
    assert_index_queries_alike,
    assert_stored_alike,
    differing_share,
    draw_histories,
    draw_norms,
    empty_layer,
    flat,
    run,
)
from helpers.schedules import assert_same_bytes
from pallas_kernels import CACHE_FORMATS
from pallas_kernels.common.norm_rope import rotate

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
    pytest.mark.unoptimised,
]

ONE_BY_ONE = [[1] * n for n in LENGTHS]
DECODE = {"num_tokens": 5, "fused": True}
# Of the two, CSA has the launches that `test_flush_kernels.py` compares by default.
usual_kind = pytest.mark.parametrize("kind", slow.all_but(["hca"], list(COMPRESSION_RATIOS)))
each_kind = pytest.mark.parametrize("kind", COMPRESSION_RATIOS)


def draw(kind, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    return draw_histories(rng, kind, LENGTHS, dtype), draw_norms(rng, kind, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow.all_but(
        [("fp8_ue8m0", jnp.bfloat16)],
        [(name, jnp.bfloat16) for name in CACHE_FORMATS] + [("f32", jnp.float32)],
    ),
)
@usual_kind
def test_one_token_per_request_is_stored_as_the_reference_stores_it(lane, name, kind, dtype):
    """Rings go round, windows close in some rows, blocks are absent, and rows lie idle."""
    histories, norms = draw(kind, dtype)
    (actual, queries), (expected, wanted) = (
        run(name, kind, histories, ONE_BY_ONE, norms, **DECODE, backend=backend)
        for backend in (KERNEL, "reference")
    )
    assert_stored_alike(CACHE_FORMATS[name], actual, expected)
    assert_same_but_for_roundings(queries, wanted)


def assert_same_but_for_roundings(actual, expected):
    """Of bf16 a step in MAX_SHARE of the values, of f32 a few ulps; index queries by a code."""
    kinds = dict.fromkeys(kind for kind, _ in expected)
    found, wanted = (
        {kind: np.concatenate([a for key, a in given.items() if key[0] == kind]) for kind in kinds}
        for given in (actual, expected)
    )
    if "index_queries" in kinds:
        assert_index_queries_alike(found["index_queries"], wanted["index_queries"])
    actual, expected = (given["queries"].astype(np.float64) for given in (found, wanted))
    difference = np.abs(actual - expected)
    assert np.all(difference <= 2.0**-7 * np.abs(expected).max(axis=-1, keepdims=True))
    assert np.mean(difference > 2.0**-18) <= MAX_SHARE


@pytest.mark.slow
@each_kind
def test_one_token_per_request_leaves_the_bits_that_many_leave(lane, kind):
    """Known bugs B1, B8, B19, through other kernels: a decode step and a prefill agree."""
    histories, norms = draw(kind)
    actual, queries = run("fp8_ue8m0", kind, histories, ONE_BY_ONE, norms, **DECODE)
    whole, wanted = run(
        "fp8_ue8m0", kind, histories, [[n] for n in LENGTHS], norms, num_tokens=128, seed=1
    )
    assert_same_bytes(flat(actual), flat(whole))
    assert_same_bytes(queries, wanted)


@usual_kind
def test_b5_padding_alone_writes_nothing(lane, kind):
    histories, norms = draw(kind)
    layer, _ = run("fp8_ue8m0", kind, histories, [[0]], norms, **DECODE)
    assert_same_bytes(flat(layer), flat(empty_layer(CACHE_FORMATS["fp8_ue8m0"], kind)))


@usual_kind
def test_the_bounds_reject_a_position_that_is_off_by_one(lane, kind):
    """Such as one of the queries rotates them, and their entries, a little too far."""
    histories, norms = draw(kind)
    expected, wanted = run(
        "fp8_ue8m0", kind, histories, ONE_BY_ONE, norms, **DECODE, backend="reference"
    )
    shifted = histories | {
        key: [np.roll(x, 1, axis=0) for x in histories[key]]
        for key in {"queries", "kv", "index_queries"} & histories.keys()
    }
    actual, queries = run("fp8_ue8m0", kind, shifted, ONE_BY_ONE, norms, **DECODE)
    codec = CACHE_FORMATS["fp8_ue8m0"].entry
    assert differing_share(codec, actual["window"], expected["window"], C) > 5 * MAX_SHARE
    with pytest.raises(AssertionError):
        assert_same_but_for_roundings(queries, wanted)
    if kind == "csa":
        with pytest.raises(AssertionError):
            assert_index_queries_alike(queries["index_queries", 1], wanted["index_queries", 1])


def encode(queries, kv, norm, positions, *, codec, backend, eps=EPS):
    jitted = jax.jit(functools.partial(pk.encode_tokens, codec=codec, backend=backend))
    norm_rope = pk.NormRope(norm, jnp.asarray(FREQUENCIES), eps)
    return jax.tree.map(np.asarray, jitted(queries, kv, norm_rope, positions))


@pytest.mark.slow
def test_window_entries_are_encoded_without_queries_too(lane):
    del lane
    rng, codec = np.random.default_rng(0), CACHE_FORMATS["fp8_ue8m0"].entry
    queries = jnp.asarray(rng.normal(size=(7, 3, C)), jnp.bfloat16)
    given = jnp.ones(C, jnp.bfloat16), jnp.arange(7, dtype=jnp.int32)
    options = {"codec": codec, "backend": "triton_gpu"}
    _, expected = encode(queries, queries[:, 0], *given, **options)
    none, found = encode(None, queries[:, 0], *given, **options)
    assert none is None
    assert_same_bytes(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    slow.all_but(
        [("fp8_ue8m0", jnp.bfloat16)],
        list(itertools.product(CACHE_FORMATS, [jnp.bfloat16, jnp.float32])),
    ),
)
def test_window_entries_are_encoded_to_the_byte(lane, name, dtype):
    """Zeros of both signs, subnormal codes, and values halfway between two codes.

    An eps that dwarfs them and a weight that undoes it leave values as they are; position 0 rotates
    by nothing.
    """
    codec, rng = CACHE_FORMATS[name].entry, np.random.default_rng(0)
    x = rng.normal(size=(7, C)) * 10.0 ** rng.integers(-6, 4, size=(7, 1))
    x[0], x[1, :4], x[2] = 0.0, [0.0, -0.0, 1e-9, -1e-9], np.arange(C) / 16 + 1.0625
    x = jnp.asarray(x, dtype)
    arguments = (x[:, None], x, jnp.full(C, 2.0**32, dtype), jnp.zeros(7, jnp.int32))
    (_, actual), (_, expected) = (
        encode(*arguments, codec=codec, backend=backend, eps=2.0**64)
        for backend in (KERNEL, "reference")
    )
    assert_same_bytes(actual, expected)
    assert_same_bytes(expected, jax.tree.map(np.asarray, codec.encode(x, ROPE)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "dim"),
    slow.all_but([(11, C)], [(1, C), (8, C), (11, C), (16, 128)]),
)
def test_queries_of_any_number_of_heads_and_dims(lane, num_heads, dim):
    """The last are tiles without a hole, of which there is a second one."""
    rng = np.random.default_rng(num_heads)
    queries = jnp.asarray(rng.normal(size=(3, num_heads, dim)), jnp.bfloat16)
    kv, positions = queries[:, 0], jnp.asarray([0, 5, 1_000_000], jnp.int32)
    codec = CACHE_FORMATS["fp8_ue8m0"].entry
    (actual, _), (expected, _) = (
        encode(queries, kv, jnp.ones(dim, jnp.bfloat16), positions, codec=codec, backend=backend)
        for backend in (KERNEL, "reference")
    )
    assert_same_but_for_roundings({("queries", 0): actual}, {("queries", 0): expected})


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", slow.all_but(["encode_tokens"], ["encode_tokens", "append_and_flush"])
)
def test_queries_without_a_norm_are_rotated_alone(lane, op):
    """V4.1's: as the definition has them, to the bit on a CPU; entries stay what they were."""
    arguments = inputs.valid_arguments(op)
    rng, shape = np.random.default_rng(0), arguments["queries"].shape
    arguments["queries"] = jnp.asarray(rng.normal(size=shape) * 3, jnp.float32)
    normed = arguments["norm_rope"]
    positions = arguments["positions"] if op == "encode_tokens" else arguments["call"].positions

    @functools.cache
    def found(norms_queries, backend):
        norm_rope = dataclasses.replace(normed, norms_queries=norms_queries)
        given = arguments | {"norm_rope": norm_rope}
        done = jax.jit(lambda: getattr(pk, op)(**given, backend=backend))()
        return done if op == "encode_tokens" else (done.queries, done.rows)

    (queries, rows), (_, before) = found(False, KERNEL), found(True, KERNEL)
    expected = rotate(arguments["queries"], positions[:, None], normed.frequencies)
    np.testing.assert_allclose(queries, expected, atol=1e-5)
    assert_same_bytes(rows, before)
    for backend in (KERNEL, "reference"):
        assert np.abs(np.asarray(found(True, backend)[0]) - expected).max() > 0.1
    np.testing.assert_array_equal(found(False, "reference")[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "name"),
    slow.all_but(
        [(9, "fp8_ue8m0")],
        list(itertools.product([1, 9], CACHE_FORMATS)),
    ),
)
def test_index_queries_are_rounded_as_they_are_alone(lane, name, num_heads):
    """To the bit, beside a window that closes, padding and a layer without compressors."""
    codec, rng = CACHE_FORMATS[name].index_key, np.random.default_rng(num_heads)
    given = jnp.asarray(rng.normal(size=(3, num_heads, 8)) * 3, jnp.float32)
    positions = jnp.asarray([0, 5, 1_000_000], jnp.int32)
    arguments = inputs.valid_arguments("append_and_flush")
    arguments |= {"index_queries": given, "index_codec": codec}
    slots = jnp.asarray([0, -1, 1], jnp.int32)
    arguments["call"] = dataclasses.replace(arguments["call"], positions=positions, slots=slots)
    frequencies = arguments["norm_rope"].frequencies
    alone = pk.round_index_queries(given, frequencies, positions, codec=codec, backend=KERNEL)
    assert alone.dtype == jnp.float32
    for without in ({}, {"compressors": ()}):
        done = pk.append_and_flush(**arguments | without, backend=KERNEL)
        assert_same_bytes({0: np.asarray(done.index_queries)}, {0: np.asarray(alone)})


@pytest.mark.gpu
@each_kind
def test_twenty_runs_are_bitwise_equal(kind):
    histories, norms = draw(kind)
    cuts = [[1] * 9 for _ in LENGTHS]
    first, queries = run("fp8_ue8m0", kind, histories, cuts, norms, **DECODE)
    for _ in range(19):
        again, same = run("fp8_ue8m0", kind, histories, cuts, norms, **DECODE)
        assert_same_bytes(flat(again), flat(first))
        assert_same_bytes(same, queries)


RUNNING = ones((3, 3, 3, 8))
NARROW = dict.fromkeys(("values", "scores"), ones((3, 1)))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("kv", ones((3, 7)), "kv must be"),
        ("call.slots", zeros(2, jnp.int32), "call.slots.* must agree on T"),
        ("call.segment_ids", zeros(3), "call.segment_ids must be int32"),
        ("call.block_table", zeros(3, jnp.int32), "call.block_table must have rank 2"),
        ("call.block_table", zeros((3, 3), jnp.int32), "call.block_table must agree on B"),
        ("norm_rope.weight", ones(1), "norm_rope.weight must be"),
        ("norm_rope.frequencies", ones((2, 2)), "frequencies must have rank 1"),
        ("compression_ratio", 3, r"compressors\[0\].state must keep"),
        ("ring.planes", {"values": ones((3, 3, 4, 7))}, "ring must hold the planes"),
        ("index_queries", None, "index_codec goes with index_queries"),
        ("index_codec", None, "index_codec goes with index_queries"),
        ("index_queries", ones((3, 8)), "index_queries must have rank 3"),
        ("index_queries", ones((2, 2, 8)), "index_queries must agree on T"),
        ("index_queries", ones((3, 2, 2)), "frequencies must have one for each pair of .* 2"),
        ("index_queries", ones((3, 2, 8), jnp.bfloat16), "queries and index_queries must ag"),
    ],
)
def test_an_error_names_the_argument_that_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        pk.append_and_flush(
            **inputs.replace_argument(inputs.valid_arguments("append_and_flush"), name, wrong)
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": NARROW}, r"compressors\[0\].rows\['values'\] must be"),
        ({"state": RUNNING}, r"compressors\[0\].rows\['values'\] must be .* = \[3, 8\]"),
        ({"norm": ones(7)}, r"compressors\[0\].pool must hold"),
        ({"norm": ones((1, 8))}, r"compressors\[0\].norm must have rank 1"),
        ({"rows": {"other": ones((3, 8))}}, r"compressors\[0\].rows must be values and scores"),
    ],
)
def test_an_error_names_what_is_wrong_of_a_compressor(changed, message):
    arguments = inputs.valid_arguments("append_and_flush")
    arguments["compressors"] = [dataclasses.replace(c, **changed) for c in arguments["compressors"]]
    with pytest.raises(ValueError, match=message):
        pk.append_and_flush(**arguments)


def test_a_running_pool_has_no_other_compressor_beside_it():
    arguments = inputs.valid_arguments("append_and_flush")
    rows = dict.fromkeys(("values", "scores"), jnp.ones((3, 8)))
    hca = dataclasses.replace(arguments["compressors"][0], state=RUNNING, rows=rows)
    with pytest.raises(ValueError, match="only compressor"):
        pk.append_and_flush(**arguments | {"compressors": [hca, *arguments["compressors"]]})


def _projected(tokens, heads):
    bf16 = functools.partial(cache_specs.array, dtype=jnp.bfloat16)
    queries, kv, norm = bf16(tokens, heads, cases.C), bf16(tokens, cases.C), bf16(cases.C)
    return queries, kv, norm, cache_specs.array(cases.ROPE // 2)


def aot_encode(name, tokens, heads):
    """`encode_tokens`; nothing is donated."""
    codec = CACHE_FORMATS[name].entry

    def encode_tokens(queries, kv, norm, frequencies, positions):
        norm_rope = pk.NormRope(norm, frequencies, EPS)
        return pk.encode_tokens(queries, kv, norm_rope, positions, codec=codec, backend=KERNEL)

    specs = (*_projected(tokens, heads), cache_specs.array(tokens, dtype=jnp.int32))
    return f"encode_tokens {name} {tokens} tokens {heads} heads", encode_tokens, specs


def aot_append_and_flush(kind, name, tokens, heads):
    """`append_and_flush` of a layer; ring, states and pools, first, are donated."""
    fmt = CACHE_FORMATS[name]
    families = {
        "swa": [],
        "csa": [(cases.C, fmt.entry), (cases.IC, fmt.index_key)],
        "hca": [(cases.C, fmt.entry)],
    }
    width = 2 if kind == "csa" else 1

    states, new, pools, norms, codecs = [], [], [], [], []
    for dim, codec in families[kind]:
        states.append(cache_specs.state(kind, dim))
        new.append(cache_specs.both(tokens, width * dim))
        pools.append(cache_specs.pool(codec, dim, kind))
        norms.append(cache_specs.array(dim, dtype=jnp.bfloat16))
        codecs.append(codec)
    index = {}
    if kind == "csa":
        queries = tokens, cases.INDEX_HEADS, cases.IC
        index = {"index_queries": cache_specs.array(*queries, dtype=jnp.bfloat16)}

    def append(kept, projected, new, norms, call, layer, index):
        ring, states, pools = kept
        queries, kv, weight, frequencies = projected
        compressors = [
            pk.Compressor(*arrays) for arrays in zip(states, new, norms, pools, codecs, strict=True)
        ]
        ratio = cases.COMPRESSION_RATIO["csa" if kind == "csa" else "hca"]
        static = {"compression_ratio": ratio, "backend": KERNEL}
        done = pk.append_and_flush(
            queries,
            kv,
            pk.LayerPlanes(ring, layer, fmt.entry),
            compressors,
            call,
            pk.NormRope(weight, frequencies, EPS),
            **static,
            **index,
            index_codec=fmt.index_key if index else None,
        )
        updated = (done.ring, list(done.states), list(done.pools))
        return updated, done.queries, done.rows, done.index_queries

    kept = (cache_specs.ring(fmt.entry), states, pools)
    call = cache_specs.call(tokens, tokens)
    layer = cache_specs.array(dtype=jnp.int32)
    specs = (kept, _projected(tokens, heads), new, norms, call, layer, index)
    return f"append_and_flush {kind} {name} {tokens} tokens {heads} heads", append, specs, (0,)


AOT_CASES = [
    *(aot_encode(*case) for case in cases.COMPILED_ENCODED),
    *(aot_append_and_flush(*case) for case in cases.COMPILED_APPENDED),
]
