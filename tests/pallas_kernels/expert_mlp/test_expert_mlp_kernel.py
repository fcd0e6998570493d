"""The kernel of picked experts against the reference, at hostile routings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from pallas_kernels import expert_mlp
from pallas_kernels.block_linear.call_shapes import Tiling
from pallas_kernels.common import weights
from pallas_kernels.expert_mlp import mosaic_gpu
from pallas_kernels.expert_mlp.arguments import Arguments

E, WIDTH, D, K, LIMIT = 4, 96, 256, 2, 2.0
BOUND = {"interpreter": 1e-2, "gpu": 2e-2}
"""Relative to the largest result: hidden values are rounded to bf16 and E4M3 between the products,
where a last bit of f32 decides a tie."""


@functools.cache
def make(kind="mxfp4", activations="fp8"):
    quantize = {"mxfp4": weights.quantize_mxfp4, "fp8": weights.quantize_block_fp8}[kind]
    quantize = jax.jit(quantize, static_argnames=("dtype", "activations"))
    rng, shapes = np.random.default_rng(0), ((E, WIDTH, D), (E, WIDTH, D), (E, D, WIDTH))
    values = [rng.normal(size=shape) * 3 * shape[-1] ** -0.5 for shape in shapes]
    return [
        quantize(jnp.asarray(v, jnp.float32), dtype="bfloat16", activations=activations)
        for v in values
    ]


def routing(name, num_tokens):
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(num_tokens)]).astype(np.int32)
    if name == "one expert":
        ids[:] = [3, 0]
    if name == "none":
        ids[::2, 1] = -1
        ids[-1] = E
    return jnp.asarray(ids), jnp.asarray(rng.uniform(0.2, 1, ids.shape), jnp.float32)


@functools.partial(jax.jit, static_argnames="tilings")
def run(x, ids, share, w1, w3, w2, tilings=None):
    return mosaic_gpu.expert_mlp(Arguments(x, ids, share, w1, w3, w2, LIMIT), tilings=tilings)


def rows(num_tokens):
    return jnp.asarray(np.random.default_rng(2).normal(size=(num_tokens, D)), jnp.bfloat16)


def close(lane, found, expected):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(found, expected, atol=BOUND[lane] * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "num_tokens", "activations"),
    slow.all_but(
        [("none", 9, "fp8")],
        [
            ("random", 1, "fp8"),
            ("random", 9, "bfloat16"),
            ("one expert", 20, "fp8"),
            ("none", 9, "fp8"),
        ],
    ),
)
def test_results_are_the_reference_s(lane, name, num_tokens, activations):
    arguments = (rows(num_tokens), *routing(name, num_tokens), *make(activations=activations))
    expected = expert_mlp(*arguments, limit=LIMIT, backend="reference")
    close(lane, run(*arguments), expected)


@pytest.mark.slow
def test_fp8_experts(lane):
    w1, w3, w2 = (jax.tree.map(lambda leaf: leaf, w) for w in make_fp8())
    x = jax.random.normal(jax.random.key(2), (5, 128)).astype(jnp.bfloat16)
    ids, share = routing("random", 5)
    expected = expert_mlp(x, ids, share, w1, w3, w2, limit=LIMIT, backend="reference")
    close(lane, run(x, ids, share, w1, w3, w2), expected)


def make_fp8():
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        weights.quantize_block_fp8(jax.random.normal(key, (E, 128, 128)) / 5, dtype="bfloat16")
        for key in keys
    ]


@pytest.mark.slow
def test_tiles_of_an_expert_share_its_rows(lane):
    arguments = (rows(20), *routing("one expert", 20), *make())
    expected = expert_mlp(*arguments, limit=LIMIT, backend="reference")
    small, large = (Tiling(8, 2, 2), Tiling(8, 1, 2)), (Tiling(16, 1, 3),) * 2
    close(lane, run(*arguments, tilings=small), expected)
    np.testing.assert_array_equal(run(*arguments, tilings=small), run(*arguments, tilings=large))


@pytest.mark.slow
def test_an_expert_that_nobody_picked_is_never_seen(lane):
    ids, share = routing("one expert", 3)
    poisoned = [
        weights.MXFP4(
            codes=w.codes,
            scale=w.scale.at[jnp.array([1, 2])].set(-1),
            size=w.size,
            dtype=w.dtype,
            activations=w.activations,
        )
        for w in make()
    ]
    clean = run(rows(3), ids, share, *make())
    np.testing.assert_array_equal(run(rows(3), ids, share, *poisoned), clean)


@pytest.mark.slow
def test_a_token_gets_the_same_bits_whatever_else_is_in_the_call(lane):
    x, (ids, share) = rows(9), routing("random", 9)
    together = np.asarray(run(x, ids, share, *make()))
    order = np.random.default_rng(5).permutation(9)
    np.testing.assert_array_equal(run(x[order], ids[order], share[order], *make()), together[order])
    others, _ = routing("one expert", 9)
    others = others.at[7].set(ids[7])
    spoilt = x.at[jnp.arange(9) != 7].set(jnp.nan)
    np.testing.assert_array_equal(run(spoilt, others, share, *make())[7], together[7])


def _specs(num_tokens, num_experts, dim, width, activations="fp8"):
    def shape(*size, dtype):
        return jax.ShapeDtypeStruct(size, dtype)

    def weight(out, into):
        return weights.MXFP4(
            codes=shape(num_experts, out // 64, into // 128, 64, 64, dtype=jnp.uint8),
            scale=shape(num_experts, out // 64, into // 128, 64, dtype=jnp.int32),
            size=(out, into),
            dtype="bfloat16",
            activations=activations,
        )

    return [
        shape(num_tokens, dim, dtype=jnp.bfloat16),
        shape(num_tokens, 6, dtype=jnp.int32),
        shape(num_tokens, 6, dtype=jnp.float32),
        weight(width, dim),
        weight(width, dim),
        weight(dim, width),
    ]


def _experts(*arguments):
    return expert_mlp(*arguments, limit=10.0, backend="mosaic_gpu")


AOT_CASES = [
    (
        f"flash {num_tokens} {activations}@sm_90a",
        _experts,
        _specs(num_tokens, 256, 4096, 2048, activations),
    )
    for num_tokens, activations in ((1, "fp8"), (64, "bfloat16"), (8192, "fp8"))
]
