"""A layer's arrays and calls, for the kernels that append, compress and flush."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from helpers.arrays import on_device
from helpers.inputs import CASE_LAYER, NUM_LAYERS, pack_call, poison, poisoned
from helpers.schedules import assert_same_bytes
from pallas_kernels import CACHE_FORMATS
from pallas_kernels.common import codecs

C, IC, ROPE, HEADS, INDEX_HEADS, WINDOW, EPS = 12, 16, 4, 3, 9, 8, 1e-6
COMPRESSION_RATIOS = {"csa": 4, "hca": 18}
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


def empty_state(kind):
    """What a layer keeps, NaN all over: rings, states or a running pool."""
    if kind == "hca":
        return {"running": poisoned(NUM_LAYERS, NUM_SLOTS, 3, C)}
    shape = (NUM_LAYERS, NUM_SLOTS, 2 * COMPRESSION_RATIOS["csa"])
    return {
        name: {part: poisoned(*shape, 2 * dim) for part in ("values", "scores")}
        for name, dim in (("tail", C), ("index_tail", IC))
    }


def empty_layer(fmt, kind):
    """A layer's arrays, every byte 0xFF: window ring, compressor states and pools."""
    entry = fmt.entry.plane_shapes(C, ROPE)
    lead = (NUM_LAYERS, NUM_BLOCKS, EB)
    layer = {
        "window": poison(fmt.ring.plane_shapes(C, ROPE), NUM_LAYERS, NUM_SLOTS, WINDOW),
        "entries": poison(entry, *lead),
    }
    if kind == "csa":
        layer["index_keys"] = poison(fmt.index_key.plane_shapes(IC, 0), *lead)
    return jax.tree.map(jnp.asarray, layer | empty_state(kind))


def compressor_names(kind):
    """Of each compressor of a layer: its state and its pool in a layer, its rows in the tokens."""
    if kind == "hca":
        return [("running", "entries", "main")]
    return [("tail", "entries", "main"), ("index_tail", "index_keys", "index")]


@functools.partial(jax.jit, static_argnames=("name", "kind", "backend", "fused"))
def step(layer, new, call, norms, *, name, kind, backend, fused):
    """Encodes a call's tokens, flushes what they close and appends them, as a layer does.

    Returns the layer, and the queries as attention and, on CSA layers, as scores see them.
    """
    fmt, names, (kv_norm, *norms) = CACHE_FORMATS[name], compressor_names(kind), norms
    compressors = [
        pk.Compressor(layer[state], new[rows], norm, layer[pool], codec)
        for (state, pool, rows), norm, codec in zip(
            names, norms, (fmt.entry, fmt.index_key), strict=False
        )
    ]
    norm_rope = pk.NormRope(kv_norm, jnp.asarray(FREQUENCIES), EPS)
    run = append_and_flush if fused else encode_flush_and_append
    window, states, pools, queries = run(
        layer["window"],
        compressors,
        new,
        call,
        norm_rope,
        fmt,
        compression_ratio=COMPRESSION_RATIOS[kind],
        backend=backend,
    )
    layer = {"window": window}
    for (state, pool, _), new_state, new_pool in zip(names, states, pools, strict=True):
        layer |= {state: new_state, pool: new_pool}
    return layer, queries


def encode_flush_and_append(
    window, compressors, new, call, norm_rope, fmt, *, compression_ratio, backend
):
    """Window, states and pools after a call of any tokens, and its queries, by four ops."""
    where, frequencies = (
        {"layer": CASE_LAYER, "compression_ratio": compression_ratio},
        norm_rope.frequencies,
    )
    queries, rows = pk.encode_tokens(
        new["queries"],
        new["kv"],
        norm_rope,
        call.positions,
        codec=fmt.ring,
        backend=backend,
    )
    rotated, flushed = {"queries": queries}, where | {"eps": norm_rope.eps, "backend": backend}
    if "index_queries" in new:
        rotated["index_queries"] = pk.round_index_queries(
            new["index_queries"], frequencies, call.positions, codec=fmt.index_key, backend=backend
        )
    if len(compressors) == 1:
        (hca,) = compressors
        entries = pk.flush_hca(hca, call, frequencies, **flushed)
        (window,), running = pk.append_tokens(
            [window], [rows], hca.state, hca.rows, call, **where, backend=backend
        )
        return window, [running], [entries], rotated
    pools = pk.flush_csa(compressors, call, frequencies, **flushed)
    rings, rows = [window, *(c.state for c in compressors)], [rows, *(c.rows for c in compressors)]
    (window, *states), _ = pk.append_tokens(rings, rows, None, None, call, **where, backend=backend)
    return window, states, pools, rotated


def append_and_flush(window, compressors, new, call, norm_rope, fmt, *, compression_ratio, backend):
    """The same for one token per request, by one op."""
    index_queries = new.get("index_queries")
    done = pk.append_and_flush(
        new["queries"],
        new["kv"],
        pk.LayerPlanes(window, CASE_LAYER, fmt.ring),
        compressors,
        call,
        norm_rope,
        compression_ratio=compression_ratio,
        index_queries=index_queries,
        index_codec=None if index_queries is None else fmt.index_key,
        backend=backend,
    )
    assert (done.index_queries is None) == (index_queries is None)
    rotated = {"queries": done.queries}
    if index_queries is not None:
        rotated["index_queries"] = done.index_queries
    return done.ring, done.states, done.pools, rotated


def draw_histories(rng, kind, lengths, dtype=jnp.bfloat16):
    """Each request's queries, window entries and projections, as a layer projects them."""
    width = 2 if kind == "csa" else 1

    def activations(*shape):
        return [np.asarray(on_device(rng.normal(size=(n, *shape)), dtype)) for n in lengths]

    def projections(dim):
        drawn = [np.float32(rng.normal(size=(2, n, width * dim))) for n in lengths]
        return [{"values": 3 * values, "scores": scores} for values, scores in drawn]

    histories = {"queries": activations(HEADS, C), "kv": activations(C), "main": projections(C)}
    if kind == "csa":
        histories |= {"index": projections(IC), "index_queries": activations(INDEX_HEADS, IC)}
    return histories


def draw_norms(rng, kind, dtype):
    """Weights of the window entries' norm and of each compressor's."""
    dims = (C, C, IC) if kind == "csa" else (C, C)
    return tuple(on_device(1 + 0.2 * rng.normal(size=dim), dtype) for dim in dims)


def run(
    name,
    kind,
    histories,
    cuts,
    norms,
    *,
    num_tokens,
    num_rows=4,
    backend=KERNEL,
    fused=False,
    seed=0,
):
    """Appends each request's history in pieces of cuts[request]; the layer begins as poison.

    Returns:
      The layer, and each request's queries of either kind, {(kind, request): array}.
    """
    rng = np.random.default_rng(seed)
    layer, lengths = empty_layer(CACHE_FORMATS[name], kind), [0] * len(cuts)
    table = np.full((num_rows, LOGICAL), -1, np.int32)
    owned = np.random.default_rng(9).permutation(np.arange(1, NUM_BLOCKS - 1))
    for request in range(len(cuts)):
        table[request, : LOGICAL - request] = owned[request * 5 :][: LOGICAL - request]
    queries = collections.defaultdict(list)
    for number in range(max(map(len, cuts))):
        counts = [cut[number] if number < len(cut) else 0 for cut in cuts]
        call = pack_call(
            rng, SLOTS[: len(cuts)], lengths, counts, num_tokens=num_tokens, num_rows=num_rows
        )
        layer, rotated = step(
            layer,
            {key: call.rows(history[: len(cuts)]) for key, history in histories.items()},
            call.indices(table, max_row_tokens=num_tokens),
            norms,
            name=name,
            kind=kind,
            backend=backend,
            fused=fused,
        )
        for which, heads in rotated.items():
            for request in range(len(cuts)):
                mine = np.asarray(heads)[call.request_ids == request]
                queries[which, request].append(mine)
        lengths = [n + c for n, c in zip(lengths, counts, strict=True)]
    joined = {key: np.concatenate(found) for key, found in queries.items()}
    return jax.tree.map(np.asarray, layer), joined


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
    if isinstance(codec, codecs.PlainCodec) and codec.dtype == "float32":
        rounded = np.abs(b - np.float64(jnp.asarray(b, jnp.bfloat16))) > 0
        step = 2.0**-7 * magnitude if not rounded.any() else 2.0**-18 * largest
        return np.inf if np.any(difference > step) else 0.0
    step = {codecs.PlainCodec: 2.0**-7, codecs.FP4KeyCodec: 2.0**-1}.get(type(codec), 2.0**-3)
    allowed = step * (magnitude + largest / 8)
    return np.inf if np.any(difference > allowed) else float(np.mean(a != b))


CUTS = ([13, 20, 1, 5], [30], [4, 1, 1, 9])
LENGTHS = [sum(cut) for cut in CUTS]


def assert_stored_alike(fmt, actual, expected):
    """The layers hold the same but for roundings that MAX_SHARE and the pools' bound allow."""
    actual, expected = dict(actual), dict(expected)
    families = {
        "window": (fmt.ring, C),
        "entries": (fmt.entry, C),
        "index_keys": (fmt.index_key, IC),
    }
    for family, (codec, dim) in families.items():
        if family in expected:
            share = differing_share(codec, actual.pop(family), expected.pop(family), dim)
            assert share <= MAX_SHARE, family
    if "running" in expected:
        # exp differs by two ulps, for each of at most 18 tokens.
        running, wanted = actual.pop("running"), expected.pop("running")
        np.testing.assert_allclose(running, wanted, rtol=18 * 2.0**-21, atol=18 * 2.0**-21)
    assert_same_bytes(flat(actual), flat(expected))  # copies


def assert_index_queries_alike(actual, expected):
    """The same but for roundings that MAX_SHARE allows, of at most two steps of E2M1."""
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    difference = np.abs(actual - expected)
    assert np.all(difference <= largest / 2)
    assert np.mean(difference > 2.0**-18 * largest) <= MAX_SHARE
