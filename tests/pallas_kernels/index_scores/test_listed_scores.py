"""Scores of listed entries: the definition, the kernel against it, and what rung 3 compiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import selection as cases
from benchmarks.cases.product import V41
from helpers import inputs, slow
from helpers.calls import call_specs, make_call
from helpers.inputs import CASE_LAYER, LAYER, NUM_LAYERS, poison, shuffled_table
from pallas_kernels import LayerPlanes, get_cache_format
from pallas_kernels.index_scores import listed_scores
from pallas_kernels.index_scores.reference import index_scores

pytestmark = pytest.mark.unoptimised

DIM, EB, VISIBLE = 128, 16, (150, 40, 0)
FORMATS = ["fp4_e4m3", "bf16", "fp8_ue8m0"]
TOLERANCE = 2.0**-19
"""Of what all products of |query| and |key|, and all |weight|, would give: sums in f32, of 128
products on a tensor core, and of 32 heads."""

run = jax.jit(listed_scores, static_argnames="backend")


def draw(name, num_heads=32, width=100):
    """Arguments by name, whose pools are poison where nothing is listed, and the listed keys."""
    codec, rng = get_cache_format(name).index_key, np.random.default_rng(len(name))
    num_blocks = [-(-v // EB) for v in VISIBLE]
    table = shuffled_table(rng, num_blocks, num_logical=max(num_blocks), num_physical=30)
    pool = poison(codec.plane_shapes(DIM, 0), NUM_LAYERS, 30, EB)
    vectors = [
        rng.normal(size=(v, DIM)) * np.exp2(rng.integers(-9, 10, (v, 4)).repeat(32, 1))
        for v in VISIBLE
    ]
    encoded, decoded = inputs.encode(codec, vectors, 0)
    order = np.array([2, 0, 1], np.int32)
    listed = np.full((3, width), -1, np.int32)
    for token, request in enumerate(order):
        count = min(VISIBLE[request], width - 7)
        listed[token, :count] = np.sort(rng.permutation(VISIBLE[request])[:count])
        for entry in listed[token, :count]:
            for plane, rows in encoded[request].items():
                block = table[request, entry // EB]
                pool[plane][LAYER, block, entry % EB] = rows[entry]
    queries = inputs.encode(codec, [rng.normal(size=(3 * num_heads, DIM))], 0)[1][0]
    arguments = {
        "queries": queries.reshape(3, num_heads, DIM),
        "weights": rng.normal(size=(3, num_heads)).astype(np.float32),
        "pool": LayerPlanes(pool, CASE_LAYER, codec),
        "call": make_call(table, order),
        "listed": listed,
    }
    keys = [np.append(decoded[r], np.zeros((1, DIM)), axis=0) for r in order]
    return arguments, [rows[chosen] for rows, chosen in zip(keys, listed, strict=True)]


def errors(arguments, keys, actual):
    """Deviations from the definition, in units of the tolerance."""
    norm = (arguments["queries"].shape[1] * DIM) ** -0.5
    for query, weight, key, row in zip(
        arguments["queries"], arguments["weights"], keys, actual, strict=True
    ):
        expected = index_scores(query, weight, key)
        allowed = (np.abs(key) @ np.abs(query).T) @ np.abs(weight) * norm * TOLERANCE
        yield np.nan_to_num(np.abs(row - expected) / np.maximum(allowed, 1e-30), nan=np.inf).max()


@pytest.mark.parametrize("backend", ["reference", "triton_gpu"])
@pytest.mark.parametrize("name", slow.all_but(["fp4_e4m3"], FORMATS))
def test_scores_are_those_of_the_keys_that_are_listed(lane, name, backend):
    arguments, keys = draw(name)
    actual = np.asarray(run(**arguments, backend=backend))
    assert max(errors(arguments, keys, actual)) < 1
    assert max(errors(arguments, keys, np.roll(actual, 1, axis=1))) > 100
    np.testing.assert_array_equal(actual[arguments["listed"] < 0], 0)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "width"), [(3, 64), (64, 65)])
def test_heads_and_places_of_any_number(lane, num_heads, width):
    arguments, keys = draw("fp4_e4m3", num_heads, width)
    assert max(errors(arguments, keys, np.asarray(run(**arguments, backend="triton_gpu")))) < 1


def test_what_the_kernel_cannot_serve_is_refused_by_name():
    arguments, _ = draw("fp8_ue8m0_fp8_index")
    with pytest.raises(NotImplementedError, match=r"takes keys in MXFP4 and bf16"):
        listed_scores(**arguments, backend="triton_gpu")
    with pytest.raises(ValueError, match="listed must have rank 2"):
        listed_scores(**arguments | {"listed": arguments["listed"][0]})


@pytest.mark.gpu
def test_a_gpu_takes_this_kernel_by_itself():
    arguments, _ = draw("fp4_e4m3")
    np.testing.assert_array_equal(run(**arguments), run(**arguments, backend="triton_gpu"))


def _specs(num_tokens, width):
    codec = get_cache_format("fp4_e4m3").index_key
    shapes = codec.plane_shapes(DIM, 0)
    planes = {
        n: jax.ShapeDtypeStruct((*cases.COMPILED_LISTED_POOL, *s.shape), s.dtype)
        for n, s in shapes.items()
    }
    return {
        "queries": jax.ShapeDtypeStruct((num_tokens, V41.indexer_num_heads, DIM), jnp.bfloat16),
        "weights": jax.ShapeDtypeStruct((num_tokens, V41.indexer_num_heads), jnp.float32),
        "pool": LayerPlanes(planes, jax.ShapeDtypeStruct((), jnp.int32), codec),
        "call": call_specs(num_tokens, cases.COMPILED_LISTED_LOGICAL),
        "listed": jax.ShapeDtypeStruct((num_tokens, width), jnp.int32),
    }


def _scored(arguments):
    return functools.partial(listed_scores, backend="triton_gpu")(**arguments)


AOT_CASES = [
    (f"{tokens}x{width}", _scored, [_specs(tokens, width)])
    for tokens, width in cases.COMPILED_LISTED
]
