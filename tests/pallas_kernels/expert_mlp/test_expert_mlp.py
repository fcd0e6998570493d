"""The experts that tokens picked, at routings that a sorted list could get wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from helpers.arrays import ones, zeros
from helpers.quantised import quantize
from pallas_kernels import expert_mlp
from pallas_kernels.common import rows, weights
from pallas_kernels.expert_mlp.worklist import max_rows, max_tiles, sort_pairs

E, WIDTH, D, K, LIMIT = 6, 48, 64, 3, 1.5


def make_experts(kind="dense", activations="bfloat16"):
    rng = np.random.default_rng(0)
    shapes = (E, WIDTH, D), (E, WIDTH, D), (E, D, WIDTH)
    values = [rng.normal(size=shape) * 3 * shape[-1] ** -0.5 for shape in shapes]
    return [
        quantize(kind, v.astype(np.float32), dtype="float32", activations=activations)
        for v in values
    ]


jit_round_rows = jax.jit(rows.round_rows)
jit_expert_mlp = jax.jit(expert_mlp, static_argnames=("limit", "backend"))


def float64(x, ids, share, experts, rounds):
    """The formula, one pair after the other."""
    w1, w3, w2 = (np.asarray(jax.jit(weights.decode_weight)(w), np.float64) for w in experts)

    def taken(row):
        row = jnp.asarray(row, jnp.float32)
        return np.asarray(jit_round_rows(row) if rounds else row, np.float64)

    out = np.zeros(x.shape)
    for token, (picked, weight) in enumerate(zip(ids, share, strict=True)):
        row = taken(x[token])
        for e, w in zip(picked, weight, strict=True):
            if 0 <= e < E:
                gate, up = np.minimum(w1[e] @ row, LIMIT), np.clip(w3[e] @ row, -LIMIT, LIMIT)
                out[token] += w2[e] @ taken(w * gate / (1 + np.exp(-gate)) * up)
    return out


def routing(name, num_tokens):
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(num_tokens)]).astype(np.int32)
    if name == "one expert":
        ids = np.tile(np.array([[4, 0, 1]], np.int32), (num_tokens, 1))
    if name == "some without tokens":
        ids = np.tile(np.array([[5, 2, 0]], np.int32), (num_tokens, 1))
    if name == "none":
        ids[::2, 1] = -1
        ids[-1] = E
    return ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    slow.all_but(
        [("random", 40), ("one expert", 40)],
        list(
            itertools.product(["random", "one expert", "some without tokens", "none"], [1, 5, 40])
        ),
    ),
)
def test_against_float64(name, num_tokens):
    ids, share = routing(name, num_tokens)
    x = jax.random.normal(jax.random.key(2), (num_tokens, D))
    experts = make_experts()
    found = jit_expert_mlp(x, ids, share, *experts, limit=LIMIT)
    expected = float64(np.asarray(x), ids, share, experts, rounds=False)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "activations"),
    slow.all_but(
        [("mxfp4", "fp8")], list(itertools.product(["fp8", "mxfp4"], weights.ACTIVATIONS))
    ),
)
def test_quantised_experts_against_float64(kind, activations):
    ids, share = routing("random", 9)
    x = jax.random.normal(jax.random.key(2), (9, D))
    experts = make_experts(kind, activations)
    found = jit_expert_mlp(x, ids, share, *experts, limit=LIMIT)
    expected = float64(np.asarray(x), ids, share, experts, rounds=activations == "fp8")
    # Of what is rounded to E4M3 between the products, f32's last bit can decide a tie.
    assert np.quantile(np.abs(found - expected), 0.99) < 2e-5


@pytest.mark.slow
def test_an_expert_that_nobody_picked_is_never_seen():
    ids, share = routing("some without tokens", 5)
    x = jax.random.normal(jax.random.key(2), (5, D))
    experts = make_experts()
    poisoned = [w.at[jnp.array([1, 3, 4])].set(jnp.nan) for w in experts]
    clean = jit_expert_mlp(x, ids, share, *experts, limit=LIMIT)
    np.testing.assert_array_equal(jit_expert_mlp(x, ids, share, *poisoned, limit=LIMIT), clean)


@pytest.mark.slow
def test_a_token_gets_the_same_bits_whatever_else_is_in_the_call():
    x = jax.random.normal(jax.random.key(3), (12, D))
    ids, share = routing("random", 12)
    experts = make_experts("mxfp4", "fp8")
    run = jax.jit(lambda x, ids, share: expert_mlp(x, ids, share, *experts, limit=LIMIT))
    together = np.asarray(run(x, ids, share))
    order = np.random.default_rng(5).permutation(12)
    np.testing.assert_array_equal(run(x[order], ids[order], share[order]), together[order])
    others, _ = routing("one expert", 12)
    others[7] = ids[7]
    np.testing.assert_array_equal(run(x, others, share)[7], together[7])


@pytest.mark.parametrize("num_tokens", slow.all_but([9, 700], [1, 9, 700]))
@pytest.mark.parametrize("name", ["random", "one expert", "none"])
def test_every_pair_is_in_one_tile_of_its_expert(name, num_tokens):
    ids, _ = routing(name, num_tokens)
    work = jax.tree.map(np.asarray, jax.jit(sort_pairs, static_argnums=(1, 2))(ids, E, 8))
    assert len(work.expert) == max_tiles(ids.size, E, 8)
    assert len(work.token) == max_rows(ids.size, E)
    assert len(set(work.row.reshape(-1))) == ids.size
    np.testing.assert_array_equal(work.token[work.row], np.arange(num_tokens)[:, None] + 0 * ids)
    seen = np.zeros(len(work.token), int)
    for expert, first, count in zip(work.expert, work.first, work.num_rows, strict=True):
        assert count <= 8
        assert count == 0 or first % 8 == 0
        seen[first : first + count] += 1
        inside = (work.row >= first) & (work.row < first + count)
        assert np.all(ids[inside] == expert)
    valid = (ids >= 0) & (ids < E)
    np.testing.assert_array_equal(seen[work.row], valid)
    place = work.row - work.first[work.tile]
    assert np.all((place[valid] >= 0) & (place[valid] < work.num_rows[work.tile][valid]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_ids": zeros((5, K))}, "expert_ids must be int32"),
        ({"expert_weights": ones((5, 2))}, r"expert_weights must be \[T, k\]"),
        ({"expert_weights": ones((5, K), jnp.bfloat16)}, "expert_weights must be float32"),
        ({"w3": zeros((E, WIDTH, D + 1))}, r"w3 must be \[E, I, D\] = \[6, 48, 64\]"),
        ({"x": zeros((4, D))}, "must agree on T"),
        ({"picked_among": E - 1}, "picked_among must be at least the 6 experts of w1, got 5"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    w1, w3, w2 = make_experts()
    ids, share = routing("random", 5)
    arguments = {
        "x": jnp.zeros((5, D)),
        "expert_ids": jnp.asarray(ids),
        "expert_weights": jnp.asarray(share),
        "w1": w1,
        "w3": w3,
        "w2": w2,
    }
    with pytest.raises(ValueError, match=message):
        expert_mlp(**(arguments | change), limit=LIMIT)
