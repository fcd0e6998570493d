"""The few lines of plain JAX in an op's docstring give what the op gives."""

import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from helpers import slow
from helpers.arrays import on_device
from helpers.calls import four_tokens
from helpers.host_tables import addresses_of
from pallas_kernels.common.norm_rope import rms_norm, rotate
from pallas_kernels.pick_experts import router_logits

pytestmark = pytest.mark.unoptimised

T, H, C, R, W, EB, LB, NB, NS, S, D, M = 4, 2, 8, 4, 4, 2, 2, 7, 5, 2, 6, 3
E, SIZES = LB * EB, {"T": T, "H": H, "C": C, "R": R, "W": W, "E": LB * EB, "EB": EB, "S": S, "D": D}
SIZES |= {"IC": C, "IH": H, "M": M, "V": 9}
LAYER, RNG = on_device(1, jnp.int32), np.random.default_rng(0)
PLAIN = pk.get_cache_format("f32").entry
FREQUENCIES = on_device([1.0, 0.1], jnp.float32)
NORM_ROPE = pk.NormRope(on_device(RNG.normal(size=C), jnp.float32), FREQUENCIES, 1e-6)


def f32(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


def i32(values):
    return on_device(values, jnp.int32)


CALL = four_tokens(RNG.permutation(NB)[: 3 * LB].reshape(3, LB))
ONE_PROMPT = pk.CallIndices(
    segment_ids=i32([0] * 8),
    slots=i32([2] * 8),
    positions=i32(range(8)),
    lengths=i32([0] * 8),
    row_slots=i32([2]),
    row_lengths=i32([0]),
    row_counts=i32([8]),
    row_offsets=i32([0]),
    block_table=i32([[3, 1]]),
    max_row_tokens=8,
)
ONE_EACH = pk.CallIndices(
    segment_ids=i32([0, 1]),
    slots=i32([2, 0]),
    positions=i32([5, 7]),
    lengths=i32([5, 7]),
    row_slots=i32([2, 0]),
    row_lengths=i32([5, 7]),
    row_counts=i32([1, 1]),
    row_offsets=i32([0, 1]),
    block_table=i32([[3, 1], [0, 2]]),
    max_row_tokens=1,
)
RING = pk.LayerPlanes({"values": f32(2, NS, W, C)}, LAYER, PLAIN)
POOL = pk.LayerPlanes({"values": f32(2, NB, EB, C)}, LAYER, PLAIN)
ROWS = {"values": f32(T, C)}
TOKENS = {"call": CALL, "pool": POOL, "ring": RING, "rows": ROWS}


def run_docstring(op, **arguments):
    """The names that the docstring's code leaves, given sizes by their letters, and arguments."""
    paragraphs = op.__doc__.split("\n\n")
    first = next(i for i, p in enumerate(paragraphs) if "In plain JAX" in p)
    blocks = [p for p in paragraphs[first:] if p.startswith(" " * 8)]
    names = SIZES | {"jax": jax, "jnp": jnp} | vars(pk) | arguments
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(textwrap.dedent("\n\n".join(blocks)), names)
    return names


def case_of_select_top_k():
    given = {"scores": f32(T, 9), "visible": i32([4, 9, 5, 3]), "k": 3}
    return given, {"selected": pk.select_top_k(**given)}


def case_of_index_scores():
    given = {"queries": f32(T, H, C), "weights": f32(T, H), "pool": POOL, "call": CALL}
    return given, {"scores": pk.index_scores(**given)}


def case_of_index_topk():
    given, _ = case_of_index_scores()
    given |= {"k": 3}
    return given, {"selected": pk.index_topk(**given)}


def case_of_sparse_attention():
    given = {"queries": f32(T, H, C), "sink": f32(H), "selected": i32([[0, 2, -1]] * T)}
    given |= TOKENS | {"scale": 0.5, "call": dataclasses.replace(CALL, visible=None)}
    return given, {"attended": pk.sparse_attention(**given)}


def case_of_attend_in_part():
    given, _ = case_of_sparse_attention()
    names = run_docstring(pk.sparse_attention, **given)
    del given["sink"]
    part = pk.attend_in_part(**given)
    return names, {"sums": part.sums, "statistics": part.statistics}


def case_of_join_parts():
    parts = pk.AttentionPart(f32(3, T, H, C), jnp.abs(f32(3, T, 2, H)))
    given = {"parts": parts, "sink": f32(H), "positions": CALL.positions, "dtype": jnp.float32}
    return given, {"joined": pk.join_parts(**given)}


def case_of_gather_entries():
    given = {"pool": POOL, "call": CALL, "index": i32([[0, 3, 1]] * T), "dim": C}
    return given, {"dense": pk.gather_entries(**given)[0]}


def case_of_gather_window():
    given = {"ring": RING, "rows": ROWS, "call": CALL, "dim": C}
    return given, {"dense": pk.gather_window(**given)[0]}


def case_of_gather_host_rows():
    stored = [RNG.integers(0, 256, (2, 6, size)).astype(np.uint8) for size in (8, 4)]
    addresses = addresses_of([[plane[table] for plane in stored] for table in range(2)])
    given = {"rows": i32(RNG.integers(0, 6, (T, 2, 3))), "addresses": addresses}
    given |= {"row_bytes": (8, 4)}
    found = list(pk.gather_host_rows(**given))
    return given | {"planes": [on_device(plane, jnp.uint8) for plane in stored]}, {"found": found}


def case_of_hyper_connections():
    given = {"products": f32(T, 3, (2 + S) * S), "scale": f32(3), "base": f32((2 + S) * S)}
    given |= {"streams": f32(T, S, D), "norm": f32(D), "iters": 3, "eps": 1e-2, "norm_eps": 1e-2}
    given |= {"weights": f32(T, S)}
    return given, pk.hyper_connections(**given)._asdict()


def case_of_write_streams():
    given = {"streams": f32(T, S, D), "output": f32(T, D), "post": f32(T, S)}
    given |= {"comb": f32(T, S, S), "fn": f32(5, S * D)}
    written, parts = pk.write_streams(**given)
    return given, {"written": written, "products": jnp.sum(parts, axis=1)}


def case_of_router_logits():
    given = {"x": f32(T, D), "gate": f32(5, D)}
    return given, {"logits": router_logits(**given)}


def case_of_pick_experts():
    given = {"logits": f32(T, 5), "bias": f32(5), "count": 2, "scaling": 1.5}
    return given, dict(zip(("ids", "weights"), pk.pick_experts(**given), strict=True))


def case_of_limit_tokens():
    logits = f32(T, SIZES["V"])
    given = {"scaled": logits - jnp.max(logits, axis=1, keepdims=True)}
    given |= {"top_k": i32([3, 8, 1, 5]), "top_p": jnp.float32([0.7, 0.2, 0.95, 0.5])}
    return given, dict(zip(("least", "last"), pk.limit_tokens(**given), strict=True))


def case_of_encode_tokens():
    given = {"queries": f32(T, H, C), "kv": f32(T, C), "norm_rope": NORM_ROPE, "codec": PLAIN}
    given |= {"positions": CALL.positions}
    return given, dict(zip(("rotated", "rows"), pk.encode_tokens(**given), strict=True))


def case_of_round_index_queries():
    rope = run_docstring(pk.encode_tokens, **case_of_encode_tokens()[0])["rope"]
    codec = pk.get_cache_format("fp8_ue8m0_fp8_index").index_key
    given = {"queries": f32(T, H, C), "frequencies": FREQUENCIES, "codec": codec}
    given |= {"positions": CALL.positions}
    return given | {"rope": rope}, {"rounded": pk.round_index_queries(**given)}


def case_of_pack_rows():
    planes = [
        f32(2, NB, 3, C),
        i32(RNG.integers(0, 9, (1, NB, 3))),
        f32(3, NB).astype(jnp.bfloat16),
    ]
    given = {"planes": planes, "rows": i32([5, 0, 3])}
    return given, {"packed": pk.pack_rows(**given)[0]}


def case_of_unpack_rows():
    planes = [i32(RNG.integers(0, 256, (2, NB, *s))).astype(jnp.uint8) for s in ((3, C), (), (5,))]
    rows = i32([5, 0, 3])
    packed = i32(RNG.integers(0, 256, (3, 2 * (3 * C + 1 + 5)))).astype(jnp.uint8)
    given = {"planes": planes, "rows": rows, "packed": packed}
    return given, {"written": pk.unpack_rows(**given)}


def case_of_sum_rows():
    given = {"packed": i32(RNG.integers(0, 256, (3, 8))).astype(jnp.uint8)}
    return given, {"sums": pk.sum_rows(**given)}


def case_of_append_tokens():
    """Token 9 of request 0 opens a window of 3, and token 10 leaves it open."""
    projections = {"values": f32(T, C), "scores": f32(T, C)}
    running = f32(2, NS, 3, C)
    given = {
        "rings": [RING.planes],
        "rows": [ROWS],
        "call": CALL,
        "layer": LAYER,
        "compression_ratio": M,
    }
    rings, running = pk.append_tokens(**given, running=running, projections=projections)
    given |= {"ring": RING.planes, "new": ROWS} | {n: p[:2] for n, p in projections.items()}
    return given, {"appended": rings[0], "pool": running[LAYER, 3]}


def case_of_flush_write():
    given = {"pool": POOL.planes, "rows": ROWS, "block_table": CALL.block_table, "layer": LAYER}
    given |= {"segment_ids": CALL.segment_ids, "entries": i32([0, 3, 2, 1])}
    return given, {"written": pk.flush_write(**given)}


def finisher(norm):
    """What becomes of the mean of a window whose first token has position 3."""

    def finish(mean):
        return rotate(rms_norm(mean, norm, eps=1e-6)[None], i32([3]), FREQUENCIES)[0]

    return finish


def flushed(kind):
    """What a flush of a prompt of 8 tokens leaves, and the window of 3 that token 5 closes."""
    width = 2 * C if kind == "csa" else C
    rows, norm = {"values": f32(8, width), "scores": f32(8, width)}, f32(C)
    state = {name: f32(2, NS, 2 * M, width) for name in rows}
    state = state if kind == "csa" else f32(2, NS, 3, C)
    compressor = pk.Compressor(state, rows, norm, POOL.planes, PLAIN)
    options = {"layer": LAYER, "compression_ratio": M, "eps": 1e-6}
    if kind == "csa":
        (pool,) = pk.flush_csa([compressor], ONE_PROMPT, FREQUENCIES, **options)
    else:
        pool = pk.flush_hca(compressor, ONE_PROMPT, FREQUENCIES, **options)
    entry = pool["values"][LAYER, 3, 5 // M]
    return {"rows": rows, "t": 5}, {"mean": (finisher(norm), entry)}


def case_of_flush_csa():
    return flushed("csa")


def case_of_flush_hca():
    return flushed("hca")


def case_of_append_and_flush():
    """Token 5 of request 0 closes its second window, whose entry is the second of block 3."""
    given = {"queries": f32(2, H, C), "kv": f32(2, C), "norm_rope": NORM_ROPE}
    names = run_docstring(pk.encode_tokens, **given, codec=PLAIN, positions=ONE_EACH.positions)
    new, norm = {name: f32(2, 2 * C) for name in ("values", "scores")}, f32(C)
    state = {name: f32(2, NS, 2 * M, 2 * C) for name in new}
    given |= {
        "ring": RING,
        "compressors": [pk.Compressor(state, new, norm, POOL.planes, PLAIN)],
        "call": ONE_EACH,
        "index_queries": f32(2, H, C),
        "index_codec": pk.get_cache_format("fp8_ue8m0_fp8_index").index_key,
    }
    done = pk.append_and_flush(**given, compression_ratio=M)
    wanted = {"rotated": done.queries, "rows": done.rows, "window": done.ring}
    wanted |= {"state": done.states[0], "rounded": done.index_queries}
    entry = done.pools[0]["values"][LAYER, 3, 1]
    given |= {name: names[name] for name in ("norm", "rope")} | {"t": 0}
    return given, wanted | {"mean": (finisher(norm), entry)}


CASES = {
    name.removeprefix("case_of_"): case for name, case in globals().items() if "case_of_" in name
}
OPS = vars(pk) | {"router_logits": router_logits}


@pytest.mark.parametrize("name", slow.all_but(["select_top_k", "pick_experts"], list(CASES)))
def test_the_docstring_s_lines_give_what_the_op_gives(name):
    given, wanted = CASES[name]()
    found = run_docstring(OPS[name], **given)
    for variable, expected in wanted.items():
        actual = found[variable]
        if isinstance(expected, tuple):  # what follows the lines, and the op's
            finish, expected = expected
            actual = finish(actual)
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5), actual, expected
        )


COLLECTIVES = {
    "all_reduce": ({"x": (2, 3, D)}, "total"),
    "reduce_scatter": ({"x": (2, 2, D)}, "total"),
    "all_to_all": ({"x": (2, 2, D)}, "found"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_lines_of_a_collective_give_what_it_gives(name):
    """Of two devices, an axis of `vmap`."""
    shapes, variable = COLLECTIVES[name]
    op = getattr(pk, name)

    def both(x):
        lines = run_docstring(op, x=x, plus=None, axis_name="devices")[variable]
        return lines, op(x, "devices")

    actual, expected = jax.vmap(both, axis_name="devices")(f32(*shapes["x"]))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_the_lines_of_all_gather_give_what_it_gives():
    def both(x):
        lines = run_docstring(pk.all_gather, arrays=(x,), axis_name="devices")["gathered"]
        return lines, pk.all_gather(x, axis_name="devices")

    actual, expected = jax.vmap(both, axis_name="devices")(f32(2, 3, D))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_lines_that_were_wrong_would_be_seen():
    given, wanted = case_of_select_top_k()
    found = run_docstring(pk.select_top_k, **given | {"scores": -given["scores"]})
    assert np.any(found["selected"] != wanted["selected"])
