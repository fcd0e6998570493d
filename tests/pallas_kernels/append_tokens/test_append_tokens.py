import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import inputs, slow, token_oracle
from helpers.arrays import ones, zeros
from helpers.inputs import CASE_LAYER, LAYER, NUM_LAYERS, pack_call, poison, poisoned
from helpers.schedules import assert_same_bytes
from pallas_kernels import (
    CACHE_FORMATS,
    NormRope,
    append_tokens,
    encode_tokens,
    get_cache_format,
)
from pallas_kernels.append_tokens.reference import append_ring, append_running
from pallas_kernels.common.norm_rope import rms_norm, rms_norm_by_pairs, rotate

W, COMPRESSION_RATIO, C, ROPE = 8, 6, 12, 4
NUM_SLOTS, NUM_TOKENS, NUM_ROWS = 6, 32, 4
SLOTS = [3, 1, 4]  # 0, 2 and the last are nobody's
PLAIN = get_cache_format("f32").entry

jit_append_ring = jax.jit(append_ring)
jit_append_running = jax.jit(
    functools.partial(append_running, compression_ratio=COMPRESSION_RATIO, layer=CASE_LAYER)
)


def histories(rng, lengths, counts, width=C):
    sizes = (n + c for n, c in zip(lengths, counts, strict=True))
    return [rng.normal(size=(size, width)).astype(np.float32) for size in sizes]


def append_call(ring, call, rows):
    """The call as the cache makes it: of the tokens that share a row, the last one has a slot."""
    slots = call.last_of_each_row(W)
    return jit_append_ring(ring, rows, slots, call.positions, layer=CASE_LAYER)


@pytest.mark.parametrize("counts", [(1, 1, 1), (W - 1, W, W + 1), (0, 3 * W, 2)])
@pytest.mark.parametrize("length", [0, 1, W - 1, W, W + 1, 2 * W - 1, 129 * W, 2**20 - 1])
def test_a_ring_holds_the_last_tokens_as_if_they_came_one_by_one(length, counts):
    """Known bugs B17 and B20: every row, and every roll-over, of every slot."""
    rng = np.random.default_rng(length)
    lengths = [length, length + 3, max(0, length - 2)]
    call = pack_call(rng, SLOTS, lengths, counts, num_tokens=NUM_TOKENS)
    rows = {"values": rng.normal(size=(NUM_TOKENS, C)).astype(np.float32)}
    ring = poison(PLAIN.plane_shapes(C, ROPE), NUM_LAYERS, NUM_SLOTS, W)
    expected = token_oracle.append_ring(ring, rows, call.slots, call.positions, layer=LAYER)
    assert_same_bytes(append_call(ring, call, rows), expected)


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_every_plane_of_every_format_is_copied_exactly(name):
    """Known bug B9: guard rows, other slots and other layers keep every byte."""
    rng = np.random.default_rng(0)
    codec = get_cache_format(name).entry
    call = pack_call(rng, SLOTS, [0, 5, 90], [4, 5, 3], num_tokens=NUM_TOKENS)
    (rows,), _ = inputs.encode(codec, [rng.normal(size=(NUM_TOKENS, C))], ROPE)
    ring = poison(codec.plane_shapes(C, ROPE), NUM_LAYERS, NUM_SLOTS, W)
    expected = token_oracle.append_ring(ring, rows, call.slots, call.positions, layer=LAYER)
    assert_same_bytes(append_call(ring, call, rows), expected)


def test_a_ring_does_not_depend_on_the_order_of_tokens():
    rng = np.random.default_rng(1)
    call = pack_call(rng, SLOTS, [0, 5, 90], [8, 5, 3], num_tokens=NUM_TOKENS)
    rows = {"values": rng.normal(size=(NUM_TOKENS, C)).astype(np.float32)}
    ring = poison(PLAIN.plane_shapes(C, ROPE), NUM_LAYERS, NUM_SLOTS, W)
    order = rng.permutation(NUM_TOKENS)
    shuffled = {"values": rows["values"][order]}
    args = (call.slots[order], call.positions[order])
    assert_same_bytes(
        jit_append_ring(ring, shuffled, *args, layer=CASE_LAYER), append_call(ring, call, rows)
    )


def test_b5_a_call_of_padding_alone_writes_nothing():
    ring = poison(PLAIN.plane_shapes(C, ROPE), NUM_LAYERS, NUM_SLOTS, W)
    nothing = np.full(NUM_TOKENS, -1, np.int32)
    rows = {"values": np.zeros((NUM_TOKENS, C), np.float32)}
    positions = np.arange(NUM_TOKENS, dtype=np.int32)
    assert_same_bytes(jit_append_ring(ring, rows, nothing, positions, layer=CASE_LAYER), ring)
    running = poisoned(NUM_LAYERS, NUM_SLOTS, 3, C)
    idle = pack_call(np.random.default_rng(0), [], [], [], num_tokens=NUM_TOKENS, num_rows=NUM_ROWS)
    unchanged = append_running_call(running, idle, rows["values"], rows["values"])
    assert_same_bytes({"running": unchanged}, {"running": running})


def append_running_call(running, call, values, scores):
    indices = call.indices(max_row_tokens=NUM_TOKENS)
    return jit_append_running(running, {"values": values, "scores": scores}, indices)


@pytest.mark.parametrize(
    "count",
    [
        0,
        1,
        COMPRESSION_RATIO - 1,
        COMPRESSION_RATIO,
        COMPRESSION_RATIO + 1,
        2 * COMPRESSION_RATIO + 1,
    ],
)
@pytest.mark.parametrize(
    "length",
    [
        0,
        1,
        COMPRESSION_RATIO - 1,
        COMPRESSION_RATIO,
        COMPRESSION_RATIO + 1,
        129 * COMPRESSION_RATIO - 1,
    ],
)
def test_a_running_pool_is_the_softmax_of_the_open_window(length, count):
    """What lies before the window, a former tenant's pool too, is not read: known bug B32."""
    rng = np.random.default_rng(100 * length + count)
    lengths, counts = [length, length + 1, length + 4], [count, 3, 0]
    values, scores = (histories(rng, lengths, counts) for _ in range(2))
    call = pack_call(rng, SLOTS, lengths, counts, num_tokens=NUM_TOKENS, num_rows=NUM_ROWS)
    running = poisoned(NUM_LAYERS, NUM_SLOTS, 3, C)
    open_before = [n // COMPRESSION_RATIO * COMPRESSION_RATIO for n in lengths]
    for slot, begin, n, v, z in zip(SLOTS, open_before, lengths, values, scores, strict=True):
        if n > begin:
            running[LAYER, slot] = token_oracle.running_pool(v[begin:n], z[begin:n])
    actual = np.asarray(append_running_call(running, call, call.rows(values), call.rows(scores)))
    written = np.zeros(running.shape[:2], bool)
    for slot, v, z, added in zip(SLOTS, values, scores, counts, strict=True):
        if added:
            begin = len(v) // COMPRESSION_RATIO * COMPRESSION_RATIO
            expected = token_oracle.running_pool(v[begin:], z[begin:])
            # Six ulps cover two roundings and an exp per token, of a whole window at most.
            tolerance = 6 * 2.0**-23 * COMPRESSION_RATIO**0.5
            np.testing.assert_allclose(actual[LAYER, slot], expected, tolerance, tolerance)
            written[LAYER, slot] = True
    assert_same_bytes({"running": actual[~written]}, {"running": running[~written]})


def test_the_bound_on_running_pools_rejects_one_token_too_few():
    rng = np.random.default_rng(0)
    values, scores = (histories(rng, [0], [COMPRESSION_RATIO - 1]) for _ in range(2))
    call = pack_call(
        rng, [3], [0], [COMPRESSION_RATIO - 1], num_tokens=NUM_TOKENS, num_rows=NUM_ROWS
    )
    running = poisoned(NUM_LAYERS, NUM_SLOTS, 3, C)
    actual = append_running_call(running, call, call.rows(values), call.rows(scores))
    expected = token_oracle.running_pool(values[0][1:], scores[0][1:])
    tolerance = 6 * 2.0**-23 * COMPRESSION_RATIO**0.5
    assert not np.allclose(actual[LAYER, 3, 1:], expected[1:], tolerance, tolerance)


@pytest.mark.parametrize("name", slow.all_but(["fp8_per_entry"], list(CACHE_FORMATS)))
def test_tokens_are_normed_then_rotated_then_encoded(name):
    """As by three ops, but for the order in which squares are added."""
    rng, codec = np.random.default_rng(0), get_cache_format(name).entry
    heads, kv = (jnp.asarray(rng.normal(size=(5, *n, C)), jnp.float32) for n in ((3,), ()))
    weight, frequencies = jnp.asarray(rng.normal(size=C), jnp.float32), jnp.asarray([1.0, 0.1])
    positions = jnp.asarray([0, 1, 7, 127, 1_000_000], jnp.int32)
    norm_rope = NormRope(weight, frequencies, 1e-6)
    encode = jax.jit(functools.partial(encode_tokens, codec=codec))
    queries, rows = encode(heads, kv, norm_rope, positions)
    none, alone = encode(None, kv, norm_rope, positions)
    assert none is None
    jax.tree.map(np.testing.assert_array_equal, alone, rows)

    @jax.jit
    def by_three_ops(heads, kv):
        queries = rotate(rms_norm(heads, None, eps=1e-6), positions[:, None], frequencies)
        entries = rotate(rms_norm(kv, weight, eps=1e-6), positions, frequencies)
        return queries, codec.decode(codec.encode(entries, ROPE), C)

    wanted, expected = map(np.asarray, by_three_ops(heads, kv))
    np.testing.assert_allclose(queries, wanted, atol=4 * 2.0**-23, rtol=4 * 2.0**-23)
    found = np.asarray(jax.jit(codec.decode, static_argnums=1)(rows, C))
    np.testing.assert_allclose(found, expected, atol=4 * 2.0**-23, rtol=2.0**-3)
    assert np.mean(np.abs(found - expected) > 2.0**-18) <= 0.02


@pytest.mark.slow
def test_a_token_is_encoded_alike_in_any_company():
    rng, codec = np.random.default_rng(1), get_cache_format("f32").entry
    heads = jnp.asarray(rng.normal(size=(33, 3, C)), jnp.float32)
    positions = jnp.arange(33, dtype=jnp.int32)

    @jax.jit
    def encode(heads, positions):
        norm_rope = NormRope(jnp.ones(C), jnp.ones(2), 1e-6)
        return encode_tokens(heads, heads[:, 0], norm_rope, positions, codec=codec)

    together = encode(heads, positions)
    for token in range(0, 33, 8):
        alone = encode(heads[token : token + 1], positions[token : token + 1])
        jax.tree.map(
            lambda a, b, t=token: np.testing.assert_array_equal(a[0], b[t]), alone, together
        )


def test_a_row_of_any_width_is_normed_alike_in_any_company():
    """Of 12 dims the mean is a product, which XLA fused into the sum with eps, or did not."""
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(33, 3, 12)), jnp.float32)
    run = jax.jit(functools.partial(rms_norm_by_pairs, weight=None, eps=1e-6))
    together = np.asarray(run(rows))
    for number in range(33):
        np.testing.assert_array_equal(run(rows[number : number + 1])[0], together[number])


TOKENS_ERRORS = [
    ("rings", [], "rings and rows must be as many, got 0 and 1"),
    ("rows", [{"other": ones((3, 8))}], r"rows\[0\] must have the planes of rings\[0\]"),
    (
        "rows",
        [{"values": ones((3, 7))}],
        r"rows\[0\].* must hold rows of float32",
    ),
    (
        "rows",
        [{"values": ones((3, 8), jnp.bfloat16)}],
        r"rows\[0\].* must hold rows of",
    ),
    ("rows", [{"values": ones((2, 8))}], r"rows\[0\].* must agree on T"),
    ("running", ones((3, 3, 8)), "running must have rank 4"),
    ("running", None, "running and projections go together"),
    ("projections", {"values": ones((3, 8))}, "projections must be values and scores"),
    (
        "projections",
        dict.fromkeys(("values", "scores"), ones((3, 1))),
        "projections.* must be",
    ),
    ("call.row_slots", zeros(2, jnp.int8), "call.row_slots must be int32"),
    ("call.row_lengths", zeros(2), "call.row_lengths must be int32"),
    ("call.row_counts", zeros(3, jnp.int32), "call.row_counts.* must agree on B"),
    ("call.row_offsets", zeros((), jnp.int32), "call.row_offsets must have rank 1"),
]
ENCODE_ERRORS = [
    ("queries", ones((3, 8)), "queries must have rank 3"),
    ("queries", ones((3, 2, 8), jnp.bfloat16), "queries and kv must agree"),
    ("kv", ones((2, 8)), "kv.* must agree on T"),
    ("kv", ones((3, 7)), "kv must be"),
    ("norm_rope.weight", ones(1), "norm_rope.weight must be"),
    ("norm_rope.frequencies", ones((2, 2)), "frequencies must have rank 1"),
    ("norm_rope.frequencies", ones(5), "frequencies must have one for each pair of at most 8"),
    ("positions", zeros(3), "positions must be int32"),
]


@pytest.mark.parametrize(
    ("op", "name", "wrong", "message"),
    [(append_tokens, *error) for error in TOKENS_ERRORS]
    + [(encode_tokens, *error) for error in ENCODE_ERRORS],
)
def test_an_error_names_the_argument_that_is_wrong(op, name, wrong, message):
    arguments = inputs.valid_arguments(op.__name__)
    with pytest.raises(ValueError, match=message):
        op(**inputs.replace_argument(arguments, name, wrong))
