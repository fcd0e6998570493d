"""The kernels that append, compress and flush, against the references that define them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from helpers import inputs
from helpers.inputs import CASE_LAYER, NUM_LAYERS, pack_call, poison, poisoned
from helpers.schedules import assert_same_bytes, random_cuts
from pallas_kernels import CACHE_FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

C, IC, ROPE, WINDOW, EPS = 12, 16, 4, 8, 1e-6
RATES = {"csa": 4, "hca": 24}
NUM_SLOTS, NUM_BLOCKS, LOGICAL, EB = 6, 16, 5, 2
SLOTS = [3, 1, 4]
FREQUENCIES = np.array([1.0, 0.3], np.float32)
KERNEL = "triton_gpu"
MAX_SHARE = 0.02
"""Of stored values may differ, by one step of their element type, where f32 maths rounds apart.

Before it is rounded to bf16, a value differs by a few ulps of f32 (exp, rsqrt, a division, sine and
cosine), 2**-20 or so. A rounding to bf16, in steps of 2**-8, makes a step of that once in 2**11
values, and there are three: one value in 700. In an index key the Hadamard rotation spreads such a
step over 128 values, to 2**-11 of each, and codes have steps of 2**-3 or more. That is well below
this share, which leaves room for a handful among few values. On a CPU none differs.
"""


def draw_state(rng, kind):
    """What a layer keeps, NaN all over: rings, states or a running pool."""
    if kind == "hca":
        return {"running": poisoned(NUM_LAYERS, NUM_SLOTS, 3, C)}
    shape = (NUM_LAYERS, NUM_SLOTS, 2 * RATES["csa"])
    return {
        name: {part: poisoned(*shape, 2 * dim) for part in ("values", "scores")}
        for name, dim in (("tail", C), ("index_tail", IC))
    }


def empty_layer(fmt, kind):
    """A layer's arrays, every byte 0xFF: window ring, compressor states and pools."""
    entry = fmt.entry.plane_shapes(C, ROPE)
    lead = (NUM_LAYERS, NUM_BLOCKS, EB)
    layer = {
        "window": poison(entry, NUM_LAYERS, NUM_SLOTS, WINDOW),
        "entries": poison(entry, *lead),
    }
    if kind == "csa":
        layer["index_keys"] = poison(fmt.index_key.plane_shapes(IC, 0), *lead)
    return jax.tree.map(jnp.asarray, layer | draw_state(None, kind))


@functools.partial(jax.jit, static_argnames=("name", "kind", "max_count", "backend", "eps"))
def step(layer, new, call, closing, table, norms, *, name, kind, max_count, backend, eps=EPS):
    """Flushes what a call closes, then appends its tokens, as a layer does."""
    fmt, rate = CACHE_FORMATS[name], RATES[kind]
    tokens = {key: call[key] for key in ("request_ids", "slots", "positions", "lengths")}
    common = tokens | {"closing": closing, "layer": CASE_LAYER, "rate": rate, "eps": eps}
    per_row = [call[f"row_{key}"] for key in ("slots", "lengths", "counts", "offsets")]
    static = {"layer": CASE_LAYER, "rate": rate, "max_count": max_count, "backend": backend}
    frequencies = jnp.asarray(FREQUENCIES)
    if kind == "csa":
        entries, keys = pk.flush_csa(
            (layer["entries"], layer["index_keys"]),
            (layer["tail"], layer["index_tail"]),
            (new["main"], new["index"]),
            norms,
            frequencies,
            table,
            codecs=(fmt.entry, fmt.index_key),
            backend=backend,
            **common,
        )
        rings = [layer[key] for key in ("window", "tail", "index_tail")]
        rows = [new[key] for key in ("window", "main", "index")]
        rings, _ = pk.append_tokens(rings, rows, None, None, *per_row, **static)
        names = ("window", "tail", "index_tail")
        return dict(zip(names, rings, strict=True)) | {"entries": entries, "index_keys": keys}
    entries = pk.flush_hca(
        layer["entries"],
        layer["running"],
        new["main"],
        norms[0],
        frequencies,
        table,
        codec=fmt.entry,
        max_count=max_count,
        backend=backend,
        **common,
    )
    (window,), running = pk.append_tokens(
        [layer["window"]], [new["window"]], layer["running"], new["main"], *per_row, **static
    )
    return {"window": window, "running": running, "entries": entries}


def draw_histories(rng, fmt, kind, lengths):
    """Each request's projections and encoded window rows."""
    width = 2 if kind == "csa" else 1
    encoded, _ = inputs.encode(fmt.entry, [rng.normal(size=(n, C)) for n in lengths], ROPE)

    def projections(dim):
        drawn = [np.float32(rng.normal(size=(2, n, width * dim))) for n in lengths]
        return [{"values": 3 * values, "scores": scores} for values, scores in drawn]

    histories = {"window": encoded, "main": projections(C)}
    return histories | ({"index": projections(IC)} if kind == "csa" else {})


def draw_norms(rng, kind, dtype):
    dims = (C, IC) if kind == "csa" else (C,)
    return tuple(jnp.asarray(1 + 0.2 * rng.normal(size=dim), dtype) for dim in dims)


def run(name, kind, histories, cuts, norms, *, num_tokens, num_rows=4, backend=KERNEL, seed=0):
    """Appends each request's history in pieces of cuts[request]; the layer begins as poison."""
    rng, rate = np.random.default_rng(seed), RATES[kind]
    layer, lengths = empty_layer(CACHE_FORMATS[name], kind), [0] * len(cuts)
    table = np.full((num_rows, LOGICAL), -1, np.int32)
    owned = np.random.default_rng(9).permutation(np.arange(1, NUM_BLOCKS - 1))
    for request in range(len(cuts)):
        table[request, : LOGICAL - request] = owned[request * 5 :][: LOGICAL - request]
    for number in range(max(map(len, cuts))):
        counts = [cut[number] if number < len(cut) else 0 for cut in cuts]
        call = pack_call(
            rng, SLOTS[: len(cuts)], lengths, counts, num_tokens=num_tokens, num_rows=num_rows
        )
        closing = call.closing(rate, min(num_tokens, num_tokens // rate + num_rows), rng)
        layer = step(
            layer,
            {key: call.rows(history[: len(cuts)]) for key, history in histories.items()},
            {key: jnp.asarray(value) for key, value in vars(call).items()},
            jnp.asarray(closing),
            jnp.asarray(table),
            norms,
            name=name,
            kind=kind,
            max_count=num_tokens,
            backend=backend,
        )
        lengths = [n + c for n, c in zip(lengths, counts, strict=True)]
    return jax.tree.map(np.asarray, layer)


def flat(layer):
    """The layer's planes by path, one dict."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(layer)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def differing_share(codec, actual, expected, dim):
    """The share of stored values that differ, infinite where one differs by more than a step.

    Bytes of rows that nothing wrote are equal too, or the share is infinite.
    """
    written = np.any(
        [
            np.any(np.atleast_1d(p.view(np.uint8).reshape(*p.shape[:3], -1) != 0xFF), axis=-1)
            for p in expected.values()
        ],
        axis=0,
    )
    for name in expected:
        if not np.array_equal(
            actual[name][~written].view(np.uint8), expected[name][~written].view(np.uint8)
        ):
            return np.inf
    rows = [
        {name: jnp.asarray(p[written]) for name, p in planes.items()}
        for planes in (actual, expected)
    ]
    a, b = (np.float64(codec.decode(planes, dim)) for planes in rows)
    difference, magnitude = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
    largest = np.max(magnitude, axis=-1, keepdims=True)
    if isinstance(codec, pk.formats.PlainCodec) and codec.dtype == "float32":
        rounded = np.abs(b - np.float64(jnp.asarray(b, jnp.bfloat16))) > 0
        step = 2.0**-7 * magnitude if not rounded.any() else 2.0**-18 * largest
        return np.inf if np.any(difference > step) else 0.0
    step = {pk.formats.PlainCodec: 2.0**-7, pk.formats.FP4KeyCodec: 2.0**-1}.get(
        type(codec), 2.0**-3
    )
    allowed = step * (magnitude + largest / 8)
    return np.inf if np.any(difference > allowed) else float(np.mean(a != b))


CUTS = ([13, 20, 1, 5], [30], [4, 1, 1, 9])
LENGTHS = [sum(cut) for cut in CUTS]


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, jnp.bfloat16) for name in CACHE_FORMATS] + [("f32", jnp.float32)]
)
@pytest.mark.parametrize("kind", RATES)
def test_the_kernels_store_what_the_references_store(lane, name, kind, dtype):
    """Among them: windows cut anywhere, several a call, blocks that are absent, idle rows."""
    fmt, rng = CACHE_FORMATS[name], np.random.default_rng(0)
    histories, norms = draw_histories(rng, fmt, kind, LENGTHS), draw_norms(rng, kind, dtype)
    actual, expected = (
        run(name, kind, histories, CUTS, norms, num_tokens=64, backend=backend)
        for backend in (KERNEL, "reference")
    )
    codecs = {"entries": (fmt.entry, C), "index_keys": (fmt.index_key, IC)}
    for family, (codec, dim) in codecs.items():
        if family in expected:
            assert (
                differing_share(codec, actual.pop(family), expected.pop(family), dim) <= MAX_SHARE
            )
    if "running" in expected:
        # exp differs by two ulps, for each of at most 24 tokens.
        running, wanted = actual.pop("running"), expected.pop("running")
        np.testing.assert_allclose(running, wanted, rtol=24 * 2.0**-21, atol=24 * 2.0**-21)
    assert_same_bytes(flat(actual), flat(expected))  # copies


@pytest.mark.parametrize("kind", RATES)
def test_the_bound_rejects_a_window_shifted_by_a_token_and_a_wrong_weight(lane, kind):
    name = "fp8_ue8m0"
    fmt, rng = CACHE_FORMATS[name], np.random.default_rng(0)
    histories, norms = draw_histories(rng, fmt, kind, LENGTHS), draw_norms(rng, kind, jnp.bfloat16)
    shifted = histories | {
        "main": [{part: np.roll(x, 1, axis=0) for part, x in h.items()} for h in histories["main"]]
    }
    weights = tuple(jnp.roll(norm, 1) for norm in norms)
    expected = run(name, kind, histories, CUTS, norms, num_tokens=64, backend="reference")
    for broken in ((shifted, norms), (histories, weights)):
        actual = run(name, kind, broken[0], CUTS, broken[1], num_tokens=64)
        share = differing_share(fmt.entry, actual["entries"], expected["entries"], C)
        assert share > 5 * MAX_SHARE


SCHEDULES = {
    "single tokens": ([[1] * n for n in LENGTHS], {"num_tokens": 3, "num_rows": 3}),
    "random cuts": ([random_cuts(np.random.default_rng(n), n, 16) for n in LENGTHS], {}),
    "alone": ([[5] * (LENGTHS[0] // 5) + [LENGTHS[0] % 5]], {"num_tokens": 5, "num_rows": 1}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", RATES)
def test_bits_do_not_depend_on_how_tokens_are_cut_into_calls(lane, kind, schedule):
    """Known bugs B1, B8, B19: entries and all that is kept, in buckets of other shapes too."""
    name, rng = "fp8_ue8m0", np.random.default_rng(0)
    cuts, shapes = SCHEDULES[schedule]
    histories = draw_histories(rng, CACHE_FORMATS[name], kind, LENGTHS)
    norms = draw_norms(rng, kind, jnp.bfloat16)
    whole = run(
        name, kind, histories, [[n] for n in LENGTHS[: len(cuts)]], norms, num_tokens=128, seed=1
    )
    actual = run(name, kind, histories, cuts, norms, **{"num_tokens": 64} | shapes)
    assert_same_bytes(flat(actual), flat(whole))


@pytest.mark.parametrize("kind", RATES)
def test_b5_a_call_of_padding_alone_writes_nothing(lane, kind):
    name, rng = "fp8_ue8m0", np.random.default_rng(0)
    histories = draw_histories(rng, CACHE_FORMATS[name], kind, [1])
    layer = run(
        name, kind, histories, [[0]], draw_norms(rng, kind, jnp.bfloat16), num_tokens=5, num_rows=2
    )
    assert_same_bytes(flat(layer), flat(empty_layer(CACHE_FORMATS[name], kind)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_window_entries_are_encoded_to_the_byte(lane, name, dtype):
    """Among them zeros of both signs, subnormal codes, and values halfway between two codes."""
    codec, rng = CACHE_FORMATS[name].entry, np.random.default_rng(0)
    x = rng.normal(size=(7, C)) * 10.0 ** rng.integers(-6, 4, size=(7, 1))
    x[0], x[1, :4], x[2] = 0.0, [0.0, -0.0, 1e-9, -1e-9], np.arange(C) / 16 + 1.0625
    x = jnp.asarray(x, dtype)
    actual, expected = (
        jax.jit(functools.partial(pk.encode_window, codec=codec, rope_dim=ROPE, backend=b))(x)
        for b in (KERNEL, "reference")
    )
    actual, expected = (jax.tree.map(np.asarray, planes) for planes in (actual, expected))
    assert_same_bytes(actual, expected)


def draw_large_call(rng, num_blocks, entries_per_block, dim):
    """A decode call of 32 requests that all close a CSA window, in the last blocks there are."""
    num_rows, rate = 32, RATES["csa"]
    positions = np.full(num_rows, 8 * rate - 1, np.int32)
    table = np.full((num_rows, 32), -1, np.int32)
    block = (8 - 1) // entries_per_block
    table[:, block] = num_blocks - 1 - rng.permutation(num_rows)
    state = {
        part: rng.normal(size=(1, num_rows, 2 * rate, 2 * dim)) for part in ("values", "scores")
    }
    new = {part: rng.normal(size=(num_rows, 2 * dim)) for part in ("values", "scores")}
    call = {
        "closing": np.arange(num_rows, dtype=np.int32),
        "request_ids": np.arange(num_rows, dtype=np.int32),
        "slots": np.arange(num_rows, dtype=np.int32),
        "positions": positions,
        "lengths": positions,
    }
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (state, new))
    return *arrays, jnp.asarray(table), jax.tree.map(jnp.asarray, call)


@functools.partial(jax.jit, donate_argnums=0)
def flush_large(pool, state, new, table, call):
    return pk.flush_csa(
        (pool,),
        (state,),
        (new,),
        (jnp.ones(512, jnp.bfloat16),),
        jnp.ones(32, jnp.float32),
        table,
        codecs=(CACHE_FORMATS["fp8_ue8m0"].entry,),
        layer=jnp.int32(0),
        rate=RATES["csa"],
        eps=EPS,
        backend=KERNEL,
        **call,
    )[0]


@pytest.mark.gpu
@pytest.mark.parametrize("gibibytes", [3, 5])
def test_planes_past_2_and_4_gib_are_exact(gibibytes):
    """Pallas through Triton has offsets of 32 bits: bytes past 2 GiB are reached as words."""
    shapes = CACHE_FORMATS["fp8_ue8m0"].entry.plane_shapes(512, 64)
    num_blocks = (gibibytes << 30) // (32 * 448)

    def flush(count):
        state, new, table, call = draw_large_call(np.random.default_rng(0), count, 32, 512)
        pool = {n: jnp.zeros((1, count, 32, *s.shape), s.dtype) for n, s in shapes.items()}
        flushed = flush_large(pool, state, new, table, call)
        untouched = {name: int(jnp.max(plane[:, : count - 32])) for name, plane in flushed.items()}
        return {
            name: np.asarray(plane[:, count - 32 :]) for name, plane in flushed.items()
        }, untouched

    (large, untouched), (small, _) = flush(num_blocks), flush(64)
    assert_same_bytes(large, small)
    assert untouched == {"nope": 0, "rope": 0, "scale": 0}
    assert np.any(small["nope"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RATES)
def test_twenty_runs_are_bitwise_equal(kind):
    name, rng = "fp8_ue8m0", np.random.default_rng(0)
    histories = draw_histories(rng, CACHE_FORMATS[name], kind, LENGTHS)
    norms = draw_norms(rng, kind, jnp.bfloat16)
    first = flat(run(name, kind, histories, CUTS, norms, num_tokens=64))
    for _ in range(19):
        assert_same_bytes(flat(run(name, kind, histories, CUTS, norms, num_tokens=64)), first)


def _planes(codec, dim, *lead):
    shapes = codec.plane_shapes(dim, 64)
    return {name: jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype) for name, s in shapes.items()}


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _both(*shape):
    return {"values": _f32(*shape), "scores": _f32(*shape)}


def _call_specs(tokens, rows, rate):
    closing = min(tokens, tokens // rate + rows)
    names = ("request_ids", "slots", "positions", "lengths")
    return {"closing": _i32(closing), "layer": _i32()} | {name: _i32(tokens) for name in names}


def aot_csa(name, tokens, rows):
    """`flush_csa` of a Flash layer, and the shapes of its arguments; the first is donated."""
    codecs = (CACHE_FORMATS[name].entry, CACHE_FORMATS[name].index_key)
    specs = (
        tuple(
            _planes(codec, dim, 2, 4096, 32) for codec, dim in zip(codecs, (512, 128), strict=True)
        ),
        tuple(_both(2, 64, 8, 2 * dim) for dim in (512, 128)),
        tuple(_both(tokens, 2 * dim) for dim in (512, 128)),
        tuple(jax.ShapeDtypeStruct((dim,), jnp.bfloat16) for dim in (512, 128)),
        _f32(32),
        _i32(rows, 2048),
        _call_specs(tokens, rows, 4),
    )

    def flush(*args):
        return pk.flush_csa(*args[:-1], **args[-1], codecs=codecs, rate=4, eps=EPS, backend=KERNEL)

    return f"flush_csa {name} {tokens} tokens", flush, specs, (0,)


def aot_hca(name, tokens, rows):
    """`flush_hca` likewise."""
    codec = CACHE_FORMATS[name].entry
    specs = (
        _planes(codec, 512, 2, 4096, 1),
        _f32(2, 64, 3, 512),
        _both(tokens, 512),
        jax.ShapeDtypeStruct((512,), jnp.bfloat16),
        _f32(32),
        _i32(rows, 2048),
        _call_specs(tokens, rows, 128),
    )
    static = {"codec": codec, "rate": 128, "eps": EPS, "backend": KERNEL}

    def flush(*args):
        return pk.flush_hca(*args[:-1], **args[-1], **static, max_count=tokens // rows)

    return f"flush_hca {name} {tokens} tokens", flush, specs, (0,)


def aot_append(kind, name, tokens, rows):
    """`append_tokens` of a CSA or an HCA layer; the rings and the pool, first, are donated."""
    codec = CACHE_FORMATS[name].entry
    rings, new = [_planes(codec, 512, 2, 64, 128)], [_planes(codec, 512, tokens)]
    running = projections = None
    if kind == "csa":
        rings += [_both(2, 64, 8, 2 * dim) for dim in (512, 128)]
        new += [_both(tokens, 2 * dim) for dim in (512, 128)]
    else:
        running, projections = _f32(2, 64, 3, 512), _both(tokens, 512)
    per_row = [_i32(rows)] * 4
    static = {"rate": 128, "max_count": tokens // rows, "backend": KERNEL}

    def append(state, new, projections, layer, *per_row):
        rings, running = state
        return pk.append_tokens(rings, new, running, projections, *per_row, layer=layer, **static)

    specs = ((rings, running), new, projections, _i32(), *per_row)
    return f"append_tokens {kind} {name} {tokens} tokens", append, specs, (0,)


def aot_encode(name, tokens):
    """`encode_window`; nothing is donated."""
    codec = CACHE_FORMATS[name].entry

    def encode(x):
        return pk.encode_window(x, codec=codec, rope_dim=64, backend=KERNEL)

    specs = (jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16),)
    return f"encode_window {name} {tokens} tokens", encode, specs


AOT_CASES = [
    aot_encode("fp8_ue8m0", 64),
    aot_csa("fp8_ue8m0", 64, 64),
    aot_csa("fp8_ue8m0_fp8_index", 8192, 1),
    aot_csa("fp8_per_entry", 64, 64),
    aot_hca("fp8_ue8m0", 64, 64),
    aot_hca("fp8_ue8m0", 8192, 1),
    aot_append("csa", "fp8_ue8m0", 64, 64),
    aot_append("hca", "fp8_ue8m0", 8192, 1),
]
"""Name, function and argument shapes, to compile for each GPU; argument 0 is donated."""
