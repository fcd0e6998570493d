"""How calls that were measured are cut for Hopper."""

import dataclasses
import functools

import pytest

from pallas_kernels.expert_mlp import mosaic_gpu
from pallas_kernels.product import Shapes, Tiling
from pallas_kernels.product.choose_tiling import choose_tiling, cuts_rows
from pallas_kernels.product.scratch import shared_bytes

GOES = {"persistent": 1, "packed_stores": True}
ON_LEFT = {"persistent": 1, "swap_ab": False}
MATRICES = {
    "queries": (Shapes(8, (640,), 1, is_gated=False, format="fp8"), 1),
    "wo_a": (Shapes(32, (16,), 2, is_gated=False, format="fp8"), 8),
    "wo_b": (Shapes(64, (64,), 1, is_gated=False, format="fp8"), 1),
    "shared w2": (Shapes(16, (64,), 1, is_gated=False, format="fp8"), 1),
}
"""Flash's, and weights of the stack: 40,960 x 1,024, 8 of 1,024 x 4,096, 4,096 x 8,192, 2,048."""
SHARED = Shapes(32, (32, 32), 1, is_gated=True, format="fp8")
PRO_QUERIES = Shapes(12, (1152,), 1, is_gated=False, format="fp8")
PRO_LATENT = Shapes(56, (32,), 1, is_gated=False, format="fp8")
PRO_W2 = Shapes(24, (112,), 1, is_gated=False, format="fp8")
PRO_SHARED = Shapes(56, (48, 48), 1, is_gated=True, format="fp8")
EXPERTS = (
    Shapes(32, (32, 32), 1, is_gated=True, format="mxfp4"),
    Shapes(16, (64,), 1, is_gated=False, format="mxfp4"),
)


def half(shapes):
    return dataclasses.replace(
        shapes, warpgroup_tiles=tuple(tiles // 2 for tiles in shapes.warpgroup_tiles)
    )


@pytest.mark.parametrize(
    ("name", "num_rows", "tiling"),
    [
        ("queries", 64, Tiling(64, 128, 6, **GOES)),
        ("queries", 256, Tiling(128, 128, 6, band=2, **ON_LEFT)),
        ("queries", 8192, Tiling(128, 128, 6, band=16, **ON_LEFT)),
        ("wo_a", 64, Tiling(64, 256, 3, split_k=2, **GOES)),
        ("wo_a", 128, Tiling(128, 128, 4, split_k=2, **ON_LEFT)),
        ("wo_a", 256, Tiling(128, 128, 4, band=2, **ON_LEFT)),
        ("wo_a", 8192, Tiling(128, 128, 4, band=16, **ON_LEFT)),
        ("wo_b", 64, Tiling(64, 256, 4, split_k=4, **GOES)),
        ("wo_b", 128, Tiling(64, 256, 4, split_k=2, band=2, **GOES)),
        ("wo_b", 256, Tiling(128, 128, 6, split_k=2, band=2, **ON_LEFT)),
        ("wo_b", 8192, Tiling(128, 128, 6, band=16, **ON_LEFT)),
        ("shared w2", 64, Tiling(64, 256, 4, split_k=4, **GOES)),
        ("shared w2", 128, Tiling(64, 256, 4, split_k=2, band=2, **GOES)),
        ("shared w2", 256, Tiling(64, 256, 4, band=4, **GOES)),
        ("shared w2", 512, Tiling(128, 128, 6, band=4, **ON_LEFT)),
    ],
)
def test_matrices_of_flash(name, num_rows, tiling):
    shapes, num_groups = MATRICES[name]
    assert choose_tiling(shapes, num_rows, num_groups, may_split=True) == tiling


def test_only_short_tiles_that_follow_each_other_take_few_stages():
    """Not longer ones, rows in two terms, or outputs of a quarter of the heads, a tile an SM."""
    queries, _ = MATRICES["queries"]
    others = PRO_QUERIES, dataclasses.replace(queries, warpgroup_tiles=(160,))
    for shapes in (*others, dataclasses.replace(queries, num_terms=2)):
        assert choose_tiling(shapes, 64, 1, may_split=True).tile_k == 256


@pytest.mark.parametrize(
    ("shapes", "num_rows", "tiling"),
    [
        (SHARED, 32, Tiling(8, 256, 4, band=4, **GOES)),
        (SHARED, 64, Tiling(16, 256, 4, band=4, **GOES)),
        (SHARED, 96, Tiling(24, 256, 4, band=4, **GOES)),
        (SHARED, 128, Tiling(32, 256, 4, band=4, **GOES)),
        (SHARED, 192, Tiling(48, 256, 4, band=4, **GOES)),
        (SHARED, 256, Tiling(64, 256, 4, band=4, **GOES)),
        (SHARED, 512, Tiling(128, 128, 6, band=4, **ON_LEFT)),
        (PRO_SHARED, 32, Tiling(16, 256, 4, band=2, **GOES)),
        (PRO_SHARED, 64, Tiling(32, 256, 4, band=2, **GOES)),
        (PRO_SHARED, 72, Tiling(40, 256, 4, band=2, **GOES)),
        (PRO_SHARED, 256, Tiling(128, 128, 6, band=2, **ON_LEFT)),
    ],
)
def test_gate_and_up_of_the_shared_expert(shapes, num_rows, tiling):
    assert choose_tiling(shapes, num_rows, 1, may_split=False) == tiling
    in_terms = dataclasses.replace(shapes, num_terms=2)
    assert not cuts_rows(in_terms, num_rows)
    assert choose_tiling(in_terms, num_rows, 1, may_split=False).tile_m >= min(128, num_rows)


@pytest.mark.parametrize(
    ("shapes", "num_rows"),
    [(SHARED, 8), (PRO_SHARED, 8), (half(SHARED), 64), (half(PRO_SHARED), 64)],
)
def test_inputs_of_gate_and_up_are_split_instead(shapes, num_rows):
    """Of rows that the kernel rounds, and of half of the weights, as one of two GPUs has them."""
    assert not cuts_rows(shapes, num_rows)
    assert cuts_rows(shapes, 2 * num_rows)


@pytest.mark.parametrize(("num_rows", "stages"), [(1, 6), (8, 6), (32, 5), (64, 8)])
def test_one_group_a_stage_where_two_would_leave_sms_without_a_tile(num_rows, stages):
    tiling = choose_tiling(PRO_LATENT, num_rows, 1, may_split=True)
    assert (tiling.tile_k, tiling.stages, tiling.split_k) == (128, stages, 8)


def test_a_tile_whose_cta_rounds_rows_has_fewer_stages_than_k_iters():
    rounding = dataclasses.replace(PRO_W2, rounds_rows=True)
    tilings = [choose_tiling(s, 8, 1, may_split=True) for s in (PRO_W2, rounding)]
    assert tilings == [Tiling(8, 256, n, split_k=4) for n in (3, 2)]
    assert PRO_W2.k_iters(tilings[0]) == 3


def test_two_ctas_fit_an_sm_where_each_rounds_a_long_row():
    """The shared expert's gate and up of Pro, as items of a launch whose inputs are not split."""
    rounding = dataclasses.replace(PRO_SHARED, rounds_rows=True)
    choose = functools.partial(choose_tiling, may_split=False, shares_items=True)
    tiling = choose(rounding, 1, 1)
    assert tiling == Tiling(8, 128, 2)
    assert choose(PRO_SHARED, 1, 1).tile_k == 256
    assert 2 * shared_bytes(rounding, tiling) < rounding.core.device.shared_memory_bytes


@pytest.mark.parametrize(
    ("num_tokens", "tilings"),
    [
        (1, (Tiling(8, 256, 4),) * 2),
        (256, (Tiling(16, 256, 4),) * 2),
        (2048, (Tiling(64, 256, 4, **GOES),) * 2),
        (4096, (Tiling(128, 128, 8, mma_rows=32, **GOES),) * 2),
        (8192, (Tiling(224, 128, 4, mma_rows=56, **GOES),) * 2),
        (10922, tuple(Tiling(144, 128, n, mma_rows=48, band=2, **GOES) for n in (4, 8))),
        (18688, (Tiling(240, 128, 4, mma_rows=48, band=2, **GOES),) * 2),
    ],
)
def test_experts_of_flash(num_tokens, tilings):
    rows = mosaic_gpu.expected_rows(num_tokens, 6, 256)
    found = [choose_tiling(s, rows, 256, may_split=False) for s in EXPERTS]
    assert tuple(found) == tilings


def test_sums_and_slices_of_any_number_of_rows_fit_into_registers():
    for rows in range(1, 1200):
        for shapes in EXPERTS:
            tiling = choose_tiling(shapes, rows, 256, may_split=False)
            slices = tiling.row_slices
            assert sum(width for _, width in slices) == tiling.tile_m
            assert tiling.tile_m + 2 * slices[0][1] <= 336 or len(slices) == 1
            if shapes.loads_ahead(
                tiling.tile_m
            ):  # the registers of the next tile, and a product that still runs
                assert tiling.tile_m + 2 * slices[0][1] + 48 <= 336
                assert len(slices) > 2


def test_rows_in_two_terms_leave_the_next_tile_no_registers():
    in_terms = dataclasses.replace(EXPERTS[0], num_terms=2)
    assert EXPERTS[0].loads_ahead(144)
    assert not in_terms.loads_ahead(144)
    tilings = [choose_tiling(s, 128, 256, may_split=False) for s in (EXPERTS[0], in_terms)]
    assert [(tiling.tile_m, tiling.mma_rows) for tiling in tilings] == [(128, 32), (128, 64)]
