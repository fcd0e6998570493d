"""Attention whose entries are dealt over devices, each of which attends to its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import attention_cases, slow
from pallas_kernels import (
    CACHE_FORMATS,
    AttentionPart,
    attend_in_part,
    get_cache_format,
    join_parts,
)
from pallas_kernels.common.norm_rope import rotate
from pallas_kernels.sparse_attention import call_shapes, mosaic_blackwell, mosaic_hopper, op

pytestmark = pytest.mark.unoptimised

FEW = attention_cases.Sizes(
    dim=16, rope_dim=4, num_heads=3, window=8, compression_ratio=4, top_k=6, num_tokens=32
)
MANY_TOKENS = ((300, 9, 0), (7, 11, 9))
FOR_A_KERNEL = dataclasses.replace(attention_cases.SMALLEST_FOR_A_KERNEL, num_tokens=4)


def attend(case, parts, *, backend=None, join=None, sink=None, frequencies=None, holder=0):
    """Outputs of parts that have the entries of every so-manieth block; one has the window."""
    given, sizes = case.arguments, case.sizes
    sink = jnp.asarray(sizes.sink() if sink is None else sink)
    selected, call = np.asarray(given["selected"]), given["call"]
    rest = {name: value for name, value in given.items() if name not in ("selected", "call")}
    block = selected // next(iter(given["pool"].planes.values())).shape[2]

    @jax.jit
    def run(given):
        found = []
        for part in range(parts):
            mine = np.where(block % parts == part, selected, -1)
            positions = call.positions if part == holder else jnp.full_like(call.positions, -1)
            own = dataclasses.replace(call, visible=None, positions=positions)
            found.append(
                attend_in_part(**given, selected=mine, call=own, scale=sizes.scale, backend=backend)
            )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
        dtype = given["queries"].dtype
        return join_parts(stacked, sink, call.positions, frequencies, dtype=dtype, backend=join)

    return np.asarray(run(rest)).astype(np.float32)


@pytest.mark.parametrize("parts", slow.all_but([8], [1, 2, 8]))
@pytest.mark.parametrize("name", slow.all_but(["f32"], CACHE_FORMATS))
def test_parts_are_joined_to_attention_to_all_keys(name, parts):
    case = attention_cases.draw_case(FEW, get_cache_format(name).entry, *MANY_TOKENS)
    for sink in (None, np.full(3, -np.inf, np.float32)):
        actual = attend(case, parts, sink=sink, holder=parts - 1)
        assert case.ulps(actual, case.expected(sink)) < 1
        assert case.ulps(actual, case.expected(sink, window=FEW.window - 1)) > 1000
        assert case.ulps(actual, case.expected(sink, selected=slice(1, None))) > 1000


@pytest.mark.slow
def test_inverse_rope_follows():
    case = attention_cases.draw_case(FEW, get_cache_format("f32").entry, *MANY_TOKENS)
    frequencies = np.array([1.0, 0.1], np.float32)
    positions = case.call.positions[:, None]
    expected = rotate(np.float32(case.expected()), positions, frequencies, inverse=True)
    assert case.ulps(attend(case, 2, frequencies=frequencies), np.asarray(expected)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [mosaic_hopper, mosaic_blackwell])
@pytest.mark.parametrize(("parts", "heads"), [(2, 64), (8, 64), (2, 8)])
def test_the_kernels_give_parts_and_join_them(lane, monkeypatch, kernel, parts, heads):
    """The kernel of attention, of which each part takes splits, and the one that combines them."""
    if lane == "gpu" and op.choose_kernel() is not kernel:
        pytest.skip("is for another kind of GPU")
    monkeypatch.setattr(op, "choose_kernel", lambda: kernel)
    sizes = dataclasses.replace(FOR_A_KERNEL, num_heads=heads)
    codec = get_cache_format("fp8_ue8m0").entry
    case = attention_cases.draw_case(sizes, codec, (300, 9, 0), (1, 1, 1))
    allowed = 2.0**-7 * case.expected(absolute=True)
    for join in ("reference", "triton_gpu"):
        actual = attend(case, parts, backend="mosaic_gpu", join=join)
        off = np.abs(actual - case.expected()) / np.maximum(allowed, 1e-30)
        assert np.nan_to_num(off, nan=np.inf).max() < 1


def test_a_part_without_keys_counts_for_nothing():
    """Logits far apart, a part whose sums are no numbers, and rows without a key or a sink."""
    floor = np.float32(call_shapes.FLOOR)
    largest = np.array([[[3.0], [500.0], [floor]], [[floor], [-400.0], [floor]]], np.float32)
    total = np.array([[[2.0], [1.5], [0.0]], [[0.0], [3.0], [0.0]]], np.float32)
    sums = np.ones((2, 3, 1, 4), np.float32) * total[..., None]
    sums[1, 1] = np.inf
    parts = AttentionPart(jnp.asarray(sums), jnp.stack([largest, total], axis=2))
    positions = jnp.zeros(3, jnp.int32)
    actual = join_parts(parts, jnp.full(1, -jnp.inf), positions, dtype=jnp.float32)
    np.testing.assert_allclose(actual[:, 0, 0], [1, 1, 0], rtol=1e-6)


def test_shapes_that_do_not_fit_are_refused():
    parts = AttentionPart(jnp.zeros((2, 3, 4, 8)), jnp.zeros((2, 3, 2, 4)))
    positions = jnp.zeros(3, jnp.int32)
    for changed, where, text in (
        (parts._replace(statistics=parts.sums), positions, "statistics must be"),
        (parts, positions[:2], "T"),
        (parts._replace(sums=parts.sums[0]), positions, "sums"),
    ):
        with pytest.raises(ValueError, match=text):
            join_parts(changed, jnp.zeros(4), where, dtype=jnp.float32)
    with pytest.raises(ValueError, match="agree on H"):
        join_parts(parts, jnp.zeros(5), positions, dtype=jnp.float32)
    case = attention_cases.draw_case(FEW, get_cache_format("f32").entry, *MANY_TOKENS)
    wrong = case.arguments | {"selected": case.arguments["selected"][:5], "scale": 1.0}
    with pytest.raises(ValueError, match="agree on T"):
        attend_in_part(**wrong)
