"""Good arguments of every op of `pallas_kernels`, and what is bad in the place of each of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from helpers.arrays import on_device, ones
from helpers.bad_inputs import Opaque
from helpers.calls import four_tokens
from helpers.host_tables import addresses_of
from pallas_kernels.common.weights import quantize_block_fp8, quantize_mxfp4

T, H, C, R, W, EB, LB, NB, NS, S, D, M, P, E, K = 4, 2, 8, 4, 4, 2, 3, 7, 5, 2, 6, 3, 9, 10, 11
INNER = 12
RNG = np.random.default_rng(0)
LAYER = on_device(1, jnp.int32)
PLAIN = pk.get_codec("f32")


def f32(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


def i32(values):
    return on_device(values, jnp.int32)


CALL = four_tokens(RNG.permutation(NB)[: 2 * LB].reshape(2, LB)[[0, 1, 0]])
ONE_EACH = dataclasses.replace(
    CALL,
    **{name: i32([0, 1, 2, 3]) for name in ("segment_ids", "slots", "row_slots", "row_offsets")},
    **{name: i32([9, 7, 12, 3]) for name in ("positions", "lengths", "row_lengths")},
    row_counts=i32([1] * T),
    block_table=i32([[0, 1, 2]] * T),
    max_row_tokens=1,
)
RING = pk.LayerPlanes({"values": f32(2, NS, W, C)}, LAYER, PLAIN)
POOL = pk.LayerPlanes({"values": f32(2, NB, EB, C)}, LAYER, PLAIN)
ROWS = {"values": f32(T, C)}
FREQUENCIES = on_device([1.0, 0.1], jnp.float32)
NORM_ROPE = pk.NormRope(f32(C), FREQUENCIES, 1e-6)
PLANES = [f32(2, NB, M, C), i32(RNG.integers(0, 9, (1, NB, M)))]
PACKED = on_device(RNG.integers(0, 256, (3, 2 * M * C * 4 + M * 4)), jnp.uint8)


def compressor(kind):
    """Of a CSA layer, whose state is a tail, or of an HCA layer, whose state is a pool."""
    width = 2 * C if kind == "csa" else C
    state = {name: f32(2, NS, 2 * M, width) for name in ("values", "scores")}
    rows = {name: f32(T, width) for name in ("values", "scores")}
    state = state if kind == "csa" else f32(2, NS, 3, C)
    return pk.Compressor(state, rows, f32(C), POOL.planes, PLAIN)


def experts(form):
    """Gate, up and down projections of E experts, and of one."""
    sizes = [(INNER, D), (INNER, D), (D, INNER)]
    many = [form(E, *size) for size in sizes]
    return dict(zip(("w1", "w3", "w2"), many, strict=True)), tuple(form(*size) for size in sizes)


@functools.cache
def quantized(quantize, *shape):
    """A weight whose codes and scales are ones of their dtypes; none is computed."""
    given = jax.ShapeDtypeStruct(shape, jnp.float32)
    specs = jax.eval_shape(functools.partial(quantize, dtype="float32"), given)
    return jax.tree.map(lambda leaf: ones(leaf.shape, leaf.dtype), specs)


block_fp8 = functools.partial(quantized, quantize_block_fp8)
mxfp4 = functools.partial(quantized, quantize_mxfp4)


def calls():
    """Good arguments: {what is called, with a word after it for a second form: arguments}."""
    layer_and_ratio = {"layer": LAYER, "compression_ratio": M}
    flush = {"call": CALL, "frequencies": FREQUENCIES, "eps": 1e-6} | layer_and_ratio
    tokens = {"queries": f32(T, H, C), "kv": f32(T, C), "norm_rope": NORM_ROPE}
    scores = {"queries": f32(T, H, C), "weights": f32(T, H), "pool": POOL, "call": CALL}
    attention = {"queries": f32(T, H, C), "ring": RING, "rows": ROWS, "pool": POOL, "call": CALL}
    attention |= {"selected": i32([[0, 2, -1]] * T), "scale": 0.5}
    picked = {"expert_ids": i32([[0, 2]] * T), "expert_weights": f32(T, 2), "x": f32(T, D)}
    many, shared = experts(f32)
    few, _ = experts(mxfp4)
    parts = pk.AttentionPart(f32(3, T, H, C), on_device(np.abs(f32(3, T, 2, H)), jnp.float32))
    found = {
        "append_and_flush": tokens | {
            "ring": RING, "compressors": [compressor("csa")], "call": ONE_EACH,
            "compression_ratio": M,
            "index_queries": f32(T, H, C), "index_codec": PLAIN},
        "append_tokens": layer_and_ratio | {
            "rings": [RING.planes], "rows": [ROWS], "call": CALL, "running": f32(2, NS, 3, C),
            "projections": {"values": f32(T, C), "scores": f32(T, C)}},
        "block_linear": {"x": f32(T, D), "weight": f32(P, D), "dtype": jnp.float32},
        "block_linear fp8": {"x": f32(T, D), "weight": block_fp8(P, D)},
        "block_linear mxfp4": {"x": f32(T, D), "weight": mxfp4(P, D)},
        "block_linears": {"x": f32(T, D), "weights": [f32(P, D), f32(E, D)],
                          "norms": [f32(P), f32(E)], "eps": 1e-6},
        "encode_tokens": tokens | {"positions": CALL.positions, "codec": PLAIN},
        "expert_mlp": picked | many | {"limit": 7.0, "picked_among": E},
        "expert_mlp mxfp4": picked | few | {"limit": 7.0},
        "mixture_mlp": picked | many | {"limit": 7.0, "shared": shared, "picked_among": E},
        "flush_csa": flush | {"compressors": [compressor("csa")]},
        "flush_hca": flush | {"compressor": compressor("hca")},
        "flush_write": {"pool": POOL.planes, "rows": ROWS, "block_table": CALL.block_table,
                        "segment_ids": CALL.segment_ids, "entries": i32([0, 3, 2, 1]),
                        "layer": LAYER},
        "gather_entries": {"pool": POOL, "call": CALL, "index": i32([[0, 3, 1]] * T), "dim": C,
                           "dtype": jnp.float32},
        "gather_host_rows": {"rows": i32([[[0, 1]]] * T), "row_bytes": [8],
                             "addresses": addresses_of([[np.zeros((2, 8), np.uint8)]])},
        "gather_window": {"ring": RING, "rows": ROWS, "call": CALL, "dim": C,
                          "dtype": jnp.float32},
        "get_cache_format": {"name": "f32"},
        "get_codec": {"name": "f32"},
        "hyper_connections": {
            "products": f32(T, 3, (2 + S) * S), "scale": f32(3), "base": f32((2 + S) * S),
            "streams": f32(T, S, D), "norm": f32(D), "iters": 3, "eps": 1e-2, "norm_eps": 1e-2},
        "hyper_connections shifted": {
            "products": f32(T, 3, (2 + S) * S), "scale": f32(3), "base": f32((2 + S) * S),
            "streams": f32(T, S, D), "norm": f32(D), "iters": 3, "eps": 1e-2, "norm_eps": 1e-2,
            "weights": f32(T, S)},
        "index_scores": scores,
        "index_topk": scores | {"k": 3},
        "join_parts": {"parts": parts, "sink": f32(H), "positions": CALL.positions,
                       "frequencies": FREQUENCIES, "dtype": jnp.float32},
        "joined_linears": {"x": f32(T, D), "weights": [f32(P, D)], "biases": [f32(M, P)],
                           "positions": CALL.positions, "dtypes": [jnp.float32]},
        "limit_tokens": {"scaled": f32(T, K), "top_k": i32([4, 0, 1, 3]), "top_p": f32(T)},
        "pack_rows": {"planes": PLANES, "rows": i32([4, -1, 0])},
        "PeerLayout": {"devices": 2, "lines": 128},
        "pick_experts": {"logits": f32(T, E), "bias": f32(E), "count": 2, "scaling": 1.5,
                         "first": on_device(0, jnp.int32), "segment_ids": CALL.segment_ids},
        "pick_experts hash": {"logits": f32(T, E), "expert_ids": i32([[0, 2]] * T), "count": 2,
                              "scaling": 1.5},
        "round_index_queries": {"queries": f32(T, H, C), "frequencies": FREQUENCIES,
                                "positions": CALL.positions, "codec": PLAIN},
        "select_top_k": {"scores": f32(T, K), "visible": i32([4, 9, 5, 3]), "k": 3},
        "sparse_attention": attention | {
            "sink": f32(H), "frequencies": FREQUENCIES, "query_eps": 1e-6},
        "attend_in_part": attention,
        "swiglu_linear": {"x": f32(T, D), "gate": f32(P, D), "up": f32(P, D), "limit": 7.0},
        "sum_rows": {"packed": PACKED},
        "unpack_rows": {"planes": PLANES, "rows": i32([4, -1, 0]), "packed": PACKED},
        "write_streams": {"streams": f32(T, S, D), "output": f32(T, D), "post": f32(T, S),
                          "comb": f32(T, S, S), "fn": f32(5, S * D)},
    }  # fmt: skip
    has_backend = {"get_cache_format", "get_codec", "PeerLayout"}
    return {
        name: given if name in has_backend else given | {"backend": "reference"}
        for name, given in found.items()
    }


def collectives():
    """Good arguments of one device of two, on an axis of `vmap` that is called `devices`."""
    axis = {"axis_name": "devices", "backend": "reference"}
    return {
        "all_reduce": {"x": (3, D), "plus": (3, D), "buffer": None} | axis,
        "reduce_scatter": {"x": (2, 2, D), "plus": (2, 2, D), "buffer": None} | axis,
        "all_to_all": {"x": (2, 2, D), "buffer": None} | axis,
    }


LEFT_OUT = {
    **dict.fromkeys(("CACHE_FORMATS", "CODECS", "FallbackWarning", "Planes"), "takes nothing"),
    **dict.fromkeys(
        ("AttentionPart", "Appended", "BlockFP8", "CallIndices", "Compressor", "LayerPlanes",
         "MXFP4", "NormRope"),
        "a pytree: JAX rebuilds it around tracers, so who takes it checks it",
    ),
    **dict.fromkeys(("Backend", "CacheFormat", "Codec"), "a type of what ops take"),
    **dict.fromkeys(("forbid_fallbacks", "gpu_interpreter"), "contexts"),
    "all_gather": "takes its arrays by place: test_a_collective_refuses_what_is_none",
}  # fmt: skip
"""Public names that are not called with bad arguments, and why."""

ANOTHER_SIZE = "another size of axis"
"""Of some axes it is as good; then it must not end in another error than `ValueError`."""

UNTRIED = {
    "attend_in_part": {"apart"},
    "block_linears": {"dtype", "may_stay_in_parts"},
    "mixture_mlp": {"may_stay_in_parts"},
    "sparse_attention": {"apart"},
}
"""Arguments without a bad value: what is true counts as true."""

OPTIONAL = {
    "backend", "bias", "biases[0]", "buffer", "call.visible", "codec", "dtype", "dtypes",
    "expert_ids", "first", "frequencies", "index_codec", "index_queries", "norms", "norms[0]",
    "norms[1]", "picked_among", "plus", "pool", "projections", "queries", "query_eps", "running",
    "selected", "weights",
}  # fmt: skip
"""Places where None is an argument like any other, or has to go with another one."""


ALSO_CALLED = {("get_cache_format", "name"): "cache_format", ("get_codec", "name"): "codec"}
"""What messages call an argument, by function."""

AS_GOOD = {("weight.scale", "floats"), ("logits", "one axis more")}
AS_GOOD |= {("planes[0]", "integers"), ("planes[1]", "floats")}
"""What an op takes: scales of both kinds, logits in parts, and planes of any numbers."""

AS_GOOD_FOR = {("pick_experts", "segment_ids", "None")}
"""What one op takes and others refuse: without segments no token is padding."""


def bad_values(value, place):
    """What may not stand where a value does: (a word for it, the bad value)."""
    yield "a text", "fp6 "
    yield "an object", Opaque()
    yield "another's object", NORM_ROPE if not isinstance(value, pk.NormRope) else CALL
    yield "a class", int
    if place.rpartition(".")[2] not in OPTIONAL and place not in OPTIONAL:
        yield "None", None
    if isinstance(value, jax.Array):
        yield from bad_arrays(np.asarray(value))
    else:
        yield "an array", np.ones((2, 2), np.float32)
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from bad_numbers(value)


def bad_arrays(good):
    """Other dtypes, ranks and sizes, and a list."""
    yield "a list", good.tolist() if good.ndim else [0]
    yield "objects", good.astype(object)
    yield "texts", np.full(good.shape, "fp6")
    yield "complex numbers", np.zeros(good.shape, np.complex64)
    if good.dtype.kind == "f" or good.dtype == jnp.float8_e4m3fn:
        yield "integers", np.zeros(good.shape, np.int32)
        yield "bools", np.ones(good.shape, bool)
    else:
        yield "floats", np.zeros(good.shape, np.float32)
        yield "int64", good.astype(np.int64)
    yield "one axis more", good[None]
    if good.ndim:
        yield "one axis less", good[0]
    for axis in range(good.ndim):
        yield f"{ANOTHER_SIZE} {axis}", np.repeat(good, 2, axis=axis)


def bad_numbers(good):
    yield "a list", [good]
    yield "a bool", True
    yield "a device's number", jnp.asarray(good)
    yield "a complex number", complex(good)
    yield "not a number", float("nan")
    if isinstance(good, int):
        yield "a float", good + 0.5
        yield "a negative number", -3
    else:
        yield "a text of a number", str(good)


def places(value, place):
    """(where it is, value, how it is put there) of a value and of all that is in it."""
    yield place, value, lambda new: new
    inner = []
    if isinstance(value, dict):
        inner = [
            (f"{place}[{key!r}]", one, lambda new, key=key: value | {key: new})
            for key, one in value.items()
        ]
    elif isinstance(value, pk.AttentionPart):
        inner = [
            (f"{place}.{name}", one, lambda new, name=name: value._replace(**{name: new}))
            for name, one in value._asdict().items()
        ]
    elif isinstance(value, list | tuple):
        inner = [
            (f"{place}[{n}]", one, lambda new, n=n: type(value)([*value[:n], new, *value[n + 1 :]]))
            for n, one in enumerate(value)
        ]
    elif dataclasses.is_dataclass(value) and not isinstance(value, pk.Codec):
        inner = [
            (
                f"{place}.{field.name}",
                getattr(value, field.name),
                lambda new, name=field.name: dataclasses.replace(value, **{name: new}),
            )
            for field in dataclasses.fields(value)
        ]
    for where, one, put in inner:
        for found, held, put_in in places(one, where):
            yield found, held, lambda new, put=put, put_in=put_in: put(put_in(new))


def cases(given):
    """(argument, where in it, a word for what is bad, the bad argument) of a call."""
    for name, argument in given.items():
        for place, value, put in places(argument, name):
            for word, bad in bad_values(value, place):
                if (place, word) not in AS_GOOD:
                    yield name, place, word, put(bad)


def trace(function, **given):
    """Calls it, but runs nothing: the shapes of the arrays that it gives."""
    return jax.eval_shape(
        lambda: [one for one in jax.tree.leaves(function(**given)) if isinstance(one, jax.Array)]
    )


def problem_with(function, given, name, place, word, bad):
    """What is wrong with how a call with one bad argument was refused; None if nothing is."""
    try:
        result = trace(function, **given | {name: bad})
    except ValueError as error:
        message = str(error)
        last = place.rpartition(".")[2].partition("[")[0]
        names = {last, name, ALSO_CALLED.get((function.__name__, name), name)}
        if ANOTHER_SIZE in word:
            names |= given.keys()  # sizes that do not fit each other
        if not any(one in message for one in names):
            return f"the message does not name it: {message}"
        if " must " not in message and " go" not in message and "give one" not in message:
            return f"the message has no rule: {message}"
        return f"the message has {len(message)} characters" if len(message) > 600 else None
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"
    if ANOTHER_SIZE in word or (function.__name__, place, word) in AS_GOOD_FOR:
        return None
    return f"was accepted and gave {str(jax.tree.map(jnp.shape, result))[:60]}"
