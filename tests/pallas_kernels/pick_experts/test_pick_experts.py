import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import tokens as cases
from helpers import slow
from pallas_kernels import pick_experts
from pallas_kernels.pick_experts import router_logits
from pallas_kernels.pick_experts.triton_gpu import MOST_TOKENS

E, K, SCALING = 24, 3, 2.5
jit_pick = jax.jit(
    functools.partial(pick_experts, count=K, scaling=SCALING), static_argnames="backend"
)
BACKENDS = ("reference", "triton_gpu")


def given(num_tokens, seed=0, spread=2.0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_tokens, E)) * spread
    return jnp.asarray(logits, jnp.float32), jnp.asarray(rng.normal(size=E) / 8, jnp.float32)


def oracle(logits, bias=None, ids=None):
    """Token by token in float64, from the formulas of deepseek_v4.md section 1.5."""
    scores = np.sqrt(np.log1p(np.exp(np.asarray(logits, np.float64))))
    if ids is None:
        ids = np.argsort(-(scores + np.asarray(bias, np.float64)), axis=1, kind="stable")[:, :K]
    picked = np.take_along_axis(scores, np.asarray(ids), axis=1)
    return ids, SCALING * picked / picked.sum(1, keepdims=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_against_the_formulas_in_float64(lane, backend):
    logits, bias = given(7)
    ids, weights = oracle(logits, bias)
    found = jit_pick(logits, bias=bias, backend=backend)
    np.testing.assert_array_equal(found[0], ids)
    np.testing.assert_allclose(found[1], weights, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hash_layers_weigh_what_they_are_given(lane, backend):
    logits, _ = given(5, seed=1)
    ids = np.stack([np.random.default_rng(t).permutation(E)[:K] for t in range(5)]).astype(np.int32)
    found = jit_pick(logits, expert_ids=jnp.asarray(ids), backend=backend)
    np.testing.assert_array_equal(found[0], ids)
    np.testing.assert_allclose(found[1], oracle(logits, ids=ids)[1], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equals_the_lower_number_and_nan_is_last(lane, backend):
    """Ties of all, of the last place, of infinities; rows with fewer numbers than places."""
    rows = np.full((5, E), -4.0, np.float32)
    rows[1, [20, 3, 11]] = 1.0, 1.0, 2.0
    rows[2, [4, 9, 17]] = np.nan, 5.0, 5.0
    rows[3] = np.nan
    rows[3, 7] = 0.0
    rows[4] = np.nan
    expected = [[0, 1, 2], [11, 3, 20], [9, 17, 0], [7, 0, 1], [0, 1, 2]]
    ids, weights = jit_pick(jnp.asarray(rows), bias=jnp.zeros(E), backend=backend)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(np.sum(weights[:3], axis=1), SCALING, rtol=1e-5)
    assert np.isnan(weights[3:, 1:]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_counts_from_its_first_expert(lane, backend):
    logits, bias = given(5)
    ids, weights = jit_pick(logits, bias=bias, backend=backend)
    found = jit_pick(logits, bias=bias, first=jnp.int32(7), backend=backend)
    np.testing.assert_array_equal(found[0], ids - 7)
    np.testing.assert_allclose(found[1], weights, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("first", slow.all_but([7], [None, 7]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_picks_no_expert(lane, backend, first):
    """Also where its logits are NaN, and with experts of a hash layer; the others stay."""
    logits, bias = given(5)
    segment_ids = jnp.asarray([0, -1, 0, 1, -1], jnp.int32)
    live, logits = np.array(segment_ids) >= 0, logits.at[1].set(jnp.nan)
    first = None if first is None else jnp.int32(first)
    hashed = jnp.asarray([[3, 1, 2]] * 5, jnp.int32)
    for how in ({"bias": bias}, {"expert_ids": hashed}):
        every = jit_pick(logits, **how, first=first, backend=backend)
        found = jit_pick(logits, **how, first=first, segment_ids=segment_ids, backend=backend)
        np.testing.assert_array_equal(found[0][live], every[0][live])
        np.testing.assert_allclose(found[1][live], every[1][live], rtol=1e-6)
        for cut, nothing in zip(found, (-1, 0), strict=True):
            np.testing.assert_array_equal(cut[~live], nothing)


def product(num_tokens, dim, seed=0):
    rng = np.random.default_rng(seed)
    rows, gate = rng.normal(size=(num_tokens, dim)), rng.normal(size=(E, dim)) * dim**-0.5
    return jnp.asarray(rows, jnp.bfloat16), jnp.asarray(gate, jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "dim"), slow.all_but([(19, 2304)], [(2, 320), (19, 2304)]))
def test_logits_come_in_parts_that_picking_adds_up(lane, num_tokens, dim):
    """Of 18 runs of inputs, parts of 3 and of 2."""
    x, gate = product(num_tokens, dim)
    parts = jax.jit(functools.partial(router_logits, backend="triton_gpu"))(x, gate)
    assert parts.shape == (num_tokens, {320: 3, 2304: 6}[dim], E)
    wanted = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    np.testing.assert_allclose(np.sum(parts, axis=1), wanted, atol=1e-5)
    bias = given(1)[1]
    ids, weights = oracle(np.sum(np.asarray(parts, np.float64), axis=1), bias)
    for backend in BACKENDS:
        found = jit_pick(parts, bias=bias, backend=backend)
        np.testing.assert_array_equal(found[0], ids)
        np.testing.assert_allclose(found[1], weights, rtol=1e-5)


def test_logits_of_a_token_do_not_depend_on_the_others(lane):
    x, gate = product(18, 640)
    multiply = jax.jit(functools.partial(router_logits, backend="triton_gpu"))
    together = multiply(x, gate)
    np.testing.assert_array_equal(multiply(jnp.roll(x, 5, axis=0), gate)[5:], together[:-5])


@pytest.mark.gpu
def test_a_gpu_leaves_few_tokens_logits_in_parts():
    ranks = {n: router_logits(*product(n, 4096)).ndim for n in (1, 2, MOST_TOKENS, MOST_TOKENS + 1)}
    assert ranks == {1: 2, 2: 3, MOST_TOKENS: 3, MOST_TOKENS + 1: 2}
    x, gate = product(8, 4096)
    assert router_logits(x.astype(jnp.float32), gate).ndim == 2
    wanted = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    np.testing.assert_allclose(np.sum(router_logits(x, gate), axis=1), wanted, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 256), (64, 256), (3, 384)])
def test_kernel_matches_reference_at_real_shapes(num_tokens, num_experts):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(num_tokens, num_experts)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=num_experts) / 8, jnp.float32)
    pick = jax.jit(functools.partial(pick_experts, count=6, scaling=1.5), static_argnames="backend")
    (ids, weights), (expected, shares) = (
        pick(logits, bias=bias, backend=name) for name in ("triton_gpu", "reference")
    )
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(weights, shares, rtol=2e-5)


def test_arguments_are_checked():
    logits, bias = given(2)
    sizes = {"count": K, "scaling": SCALING}
    with pytest.raises(ValueError, match="one of bias and expert_ids, got neither"):
        pick_experts(logits, **sizes)
    with pytest.raises(ValueError, match="bias"):
        pick_experts(logits, bias=bias[1:], **sizes)
    with pytest.raises(ValueError, match=r"count must be within 1 \.\. 24, got 25"):
        pick_experts(logits, bias=bias, **sizes | {"count": 25})
    with pytest.raises(ValueError, match="logits must be float32, got bfloat16"):
        pick_experts(logits.astype(jnp.bfloat16), bias=bias, **sizes)
    with pytest.raises(ValueError, match="expert_ids"):
        pick_experts(logits, expert_ids=jnp.zeros((2, K + 1), jnp.int32), **sizes)
    x, gate = product(2, 128)
    with pytest.raises(ValueError, match="gate"):
        router_logits(x, gate[:, 1:])
    with pytest.raises(NotImplementedError, match=r"takes bf16, got float32 and bfloat16"):
        router_logits(x.astype(jnp.float32), gate, backend="triton_gpu")


def _picked(logits, bias):
    return pick_experts(
        logits, bias=bias, count=cases.PICKS, scaling=cases.SCALING, backend="triton_gpu"
    )


def _aot_case(num_tokens, num_experts):
    specs = [
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((num_tokens, num_experts), (num_experts,))
    ]
    return (f"{num_tokens}x{num_experts}", _picked, specs)


def _routed(x, gate, bias):
    return _picked(router_logits(x, gate, backend="triton_gpu"), bias)


def _aot_case_in_parts(num_tokens, num_experts, dim):
    specs = [jax.ShapeDtypeStruct((n, dim), jnp.bfloat16) for n in (num_tokens, num_experts)]
    specs.append(jax.ShapeDtypeStruct((num_experts,), jnp.float32))
    return (f"{num_tokens}x{num_experts} of {dim} in parts", _routed, specs)


AOT_CASES = [
    *(_aot_case(*case) for case in cases.COMPILED_PICKED),
    *(_aot_case_in_parts(*case) for case in cases.COMPILED_ROUTED),
]
