"""What sanitizers are given runs: each call here in the interpreter, on a GPU under their eyes."""

import dataclasses

import jax
import pytest

from pallas_kernels import gpu_interpreter
from pallas_kernels.expert_mlp import worklist
from pallas_kernels.hyper_connections import triton_gpu as hyper_connections
from pallas_kernels.product import Shapes, triton_rows
from pallas_kernels.product.choose_tiling import choose_tiling
from pallas_kernels.write_streams import triton_gpu as write_streams
from tools import kernels_alone, product_calls

pytestmark = pytest.mark.unoptimised


@pytest.mark.slow
@pytest.mark.parametrize("name", list(kernels_alone.CALLS))
def test_a_call_alone_runs(name):
    with gpu_interpreter():
        assert all(leaf.size for leaf in jax.tree.leaves(kernels_alone.CALLS[name]()))


def test_calls_of_many_are_of_many():
    """That is, the kernels take their other forms for them; each leaves a tile unfilled."""
    assert product_calls.MANY_TOKENS > write_streams.MAX_TOKENS
    assert product_calls.MANY_TOKENS > hyper_connections._MANY_TOKENS
    assert product_calls.MANY_TOKENS % hyper_connections._CONNECTED
    assert product_calls.MANY_TOKENS * product_calls.PICKED > worklist._FEW_PAIRS
    assert product_calls.MANY_TOKENS * product_calls.PICKED > triton_rows._MANY_ROWS
    assert product_calls.MANY_ROWS > triton_rows._MANY_ROWS


def test_calls_in_narrow_tiles_are_cut_into_them():
    tiles = -(-product_calls.OUT // 64)
    one = Shapes(product_calls.DIM // 128, (tiles,), 1, is_gated=False, format="fp8")
    both = dataclasses.replace(one, warpgroup_tiles=(tiles, tiles), is_gated=True)
    for shapes, tile_m in ((one, 64), (both, 8)):
        found = choose_tiling(shapes, product_calls.NARROW, 1, may_split=not shapes.is_gated)
        assert found.tile_m == tile_m


@pytest.mark.slow
def test_what_racecheck_has_to_find_can_still_be_planted():
    """Here barriers are nothing, and left out they change nothing."""
    with gpu_interpreter():
        expected, given = (
            kernels_alone.select(5000, 512),
            kernels_alone.PLANTED["without_barriers"](),
        )
    assert (given == expected).all()


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.11 prints a race and goes on")
def test_the_interpreter_sees_a_race_where_nobody_waits():
    """As racecheck does not: so the others of these calls have none."""
    with gpu_interpreter(), pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)race"):
        jax.block_until_ready(kernels_alone.PLANTED["without_waiting"]())
