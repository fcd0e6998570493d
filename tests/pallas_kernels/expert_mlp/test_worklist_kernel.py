"""The kernel that sorts pairs by expert against its definition."""

import functools

import jax
import numpy as np
import pytest

from benchmarks.cases.expert_mlp import COMPILED_SORTED
from helpers import slow
from pallas_kernels.expert_mlp import triton_counting, triton_worklist
from pallas_kernels.expert_mlp.worklist import sort_pairs

pytestmark = pytest.mark.unoptimised

SPARE = 3


def routing(name, num_tokens, picks, num_experts):
    rng = np.random.default_rng(num_tokens)
    ids = np.stack([rng.permutation(num_experts)[:picks] for _ in range(num_tokens)])
    if name == "one expert":
        ids[:] = np.arange(picks) + 1
    if name == "none":
        ids[::2, 1:] = -1
        ids[-1] = num_experts + 7
    return ids.astype(np.int32), rng.uniform(size=ids.shape).astype(np.float32)


SIZES = [(1, 6, 256, 8), (9, 6, 7, 8), (32, 6, 192, 16), (64, 8, 384, 64)]
CASES = [(triton_worklist.sort_few_pairs, *sizes) for sizes in SIZES]
CASES += [
    (triton_counting.sort_many_pairs, *sizes)
    for sizes in (*SIZES[1:3], (200, 6, 13, 32), (1365, 6, 384, 64))
]


@pytest.mark.parametrize("name", ["random", "one expert", "none"])
@pytest.mark.parametrize(
    ("sort", "num_tokens", "picks", "num_experts", "tile_rows"),
    slow.all_but([CASES[1], CASES[6]], CASES),
)
def test_pairs_rows_and_tiles_are_the_definition_s(
    lane, name, sort, num_tokens, picks, num_experts, tile_rows
):
    del lane
    ids, weights = routing(name, num_tokens, picks, num_experts)
    sizes = {"num_experts": num_experts, "tile_rows": tile_rows, "spare": SPARE}
    found = jax.jit(functools.partial(sort, **sizes))(ids, weights)
    token, row, expert, first, num_rows, share = map(np.asarray, found)
    work = jax.jit(sort_pairs, static_argnums=(1, 2))(ids, num_experts, tile_rows)
    work = jax.tree.map(np.asarray, work)
    np.testing.assert_array_equal(row, work.row)
    np.testing.assert_array_equal(token[row], work.token[work.row])
    np.testing.assert_array_equal(share[row], weights)
    assert len(share) == len(work.token) + SPARE
    np.testing.assert_array_equal(num_rows, work.num_rows)
    np.testing.assert_array_equal(expert, work.expert)
    has_rows = work.num_rows > 0
    np.testing.assert_array_equal(first[has_rows], work.first[has_rows])


def _aot_case(num_tokens, num_experts):
    def call(ids, weights):
        return triton_counting.sort_many_pairs(ids, weights, num_experts, 64, 64)

    specs = [jax.ShapeDtypeStruct((num_tokens, 6), dtype) for dtype in (np.int32, np.float32)]
    return (f"{num_tokens} of {num_experts} by counting", call, specs)


AOT_CASES = [_aot_case(*case) for case in COMPILED_SORTED]
