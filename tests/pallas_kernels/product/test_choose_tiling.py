"""How calls that were measured are cut for Hopper."""

import dataclasses
import functools

import pytest

from pallas_kernels.expert_mlp import mosaic_gpu
from pallas_kernels.product.call_shapes import Shapes, Tiling
from pallas_kernels.product.choose_tiling import choose_tiling, cuts_rows

GOES = {"programs": 1, "packs": True}
ON_LEFT = {"programs": 1, "rows_on_left": True}
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
    return dataclasses.replace(shapes, tiles=tuple(tiles // 2 for tiles in shapes.tiles))


@pytest.mark.parametrize(
    ("name", "num_rows", "tiling"),
    [
        ("queries", 64, Tiling(64, 1, 6, **GOES)),
        ("queries", 256, Tiling(128, 1, 6, band=2, **ON_LEFT)),
        ("queries", 8192, Tiling(128, 1, 6, band=16, **ON_LEFT)),
        ("wo_a", 64, Tiling(64, 2, 3, splits=2, **GOES)),
        ("wo_a", 128, Tiling(128, 1, 4, splits=2, **ON_LEFT)),
        ("wo_a", 256, Tiling(128, 1, 4, band=2, **ON_LEFT)),
        ("wo_a", 8192, Tiling(128, 1, 4, band=16, **ON_LEFT)),
        ("wo_b", 64, Tiling(64, 2, 4, splits=4, **GOES)),
        ("wo_b", 128, Tiling(64, 2, 4, splits=2, band=2, **GOES)),
        ("wo_b", 256, Tiling(128, 1, 6, splits=2, band=2, **ON_LEFT)),
        ("wo_b", 8192, Tiling(128, 1, 6, band=16, **ON_LEFT)),
        ("shared w2", 64, Tiling(64, 2, 4, splits=4, **GOES)),
        ("shared w2", 128, Tiling(64, 2, 4, splits=2, band=2, **GOES)),
        ("shared w2", 256, Tiling(64, 2, 4, band=4, **GOES)),
        ("shared w2", 512, Tiling(128, 1, 6, band=4, **ON_LEFT)),
    ],
)
def test_matrices_of_flash(name, num_rows, tiling):
    shapes, num_groups = MATRICES[name]
    assert choose_tiling(shapes, num_rows, num_groups, may_split=True) == tiling


def test_only_short_tiles_that_follow_each_other_take_few_stages():
    """Not longer ones, rows in two parts, or outputs of a quarter of the heads, a tile an SM."""
    queries, _ = MATRICES["queries"]
    others = PRO_QUERIES, dataclasses.replace(queries, tiles=(160,))
    for shapes in (*others, dataclasses.replace(queries, num_parts=2)):
        assert choose_tiling(shapes, 64, 1, may_split=True).blocks == 2


@pytest.mark.parametrize(
    ("shapes", "num_rows", "tiling"),
    [
        (SHARED, 32, Tiling(8, 2, 4, band=4, **GOES)),
        (SHARED, 64, Tiling(16, 2, 4, band=4, **GOES)),
        (SHARED, 96, Tiling(24, 2, 4, band=4, **GOES)),
        (SHARED, 128, Tiling(32, 2, 4, band=4, **GOES)),
        (SHARED, 192, Tiling(48, 2, 4, band=4, **GOES)),
        (SHARED, 256, Tiling(64, 2, 4, band=4, **GOES)),
        (SHARED, 512, Tiling(128, 1, 6, band=4, **ON_LEFT)),
        (PRO_SHARED, 32, Tiling(16, 2, 4, band=2, **GOES)),
        (PRO_SHARED, 64, Tiling(32, 2, 4, band=2, **GOES)),
        (PRO_SHARED, 72, Tiling(40, 2, 4, band=2, **GOES)),
        (PRO_SHARED, 256, Tiling(128, 1, 6, band=2, **ON_LEFT)),
    ],
)
def test_gate_and_up_of_the_shared_expert(shapes, num_rows, tiling):
    assert choose_tiling(shapes, num_rows, 1, may_split=False) == tiling
    in_parts = dataclasses.replace(shapes, num_parts=2)
    assert not cuts_rows(in_parts, num_rows)
    assert choose_tiling(in_parts, num_rows, 1, may_split=False).columns >= min(128, num_rows)


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
    assert (tiling.blocks, tiling.stages, tiling.splits) == (1, stages, 8)


def test_a_tile_whose_cta_rounds_rows_has_fewer_stages_than_turns():
    rounding = dataclasses.replace(PRO_W2, rounds_rows=True)
    tilings = [choose_tiling(s, 8, 1, may_split=True) for s in (PRO_W2, rounding)]
    assert tilings == [Tiling(8, 2, n, splits=4) for n in (3, 2)]
    assert PRO_W2.turns(tilings[0]) == 3


def test_two_ctas_fit_an_sm_where_each_rounds_a_long_row():
    """The shared expert's gate and up of Pro, as items of a launch whose inputs are not split."""
    rounding = dataclasses.replace(PRO_SHARED, rounds_rows=True)
    choose = functools.partial(choose_tiling, may_split=False, shares_items=True)
    tiling = choose(rounding, 1, 1)
    assert tiling == Tiling(8, 1, 2)
    assert choose(PRO_SHARED, 1, 1).blocks == 2
    used = tiling.stages * rounding.stage_bytes(tiling) + rounding.fixed_bytes(tiling)
    assert 2 * used < rounding.core.device.shared_memory_bytes


@pytest.mark.parametrize(
    ("num_tokens", "tilings"),
    [
        (1, (Tiling(8, 2, 4),) * 2),
        (256, (Tiling(16, 2, 4),) * 2),
        (2048, (Tiling(64, 2, 4, **GOES),) * 2),
        (4096, (Tiling(128, 1, 8, piece=32, **GOES),) * 2),
        (8192, (Tiling(224, 1, 4, piece=56, **GOES),) * 2),
        (10922, tuple(Tiling(144, 1, n, piece=48, band=2, **GOES) for n in (4, 8))),
        (18688, (Tiling(240, 1, 4, piece=48, band=2, **GOES),) * 2),
    ],
)
def test_experts_of_flash(num_tokens, tilings):
    rows = mosaic_gpu.expected_rows(num_tokens, 6, 256)
    found = [choose_tiling(s, rows, 256, may_split=False) for s in EXPERTS]
    assert tuple(found) == tilings


def test_sums_and_pieces_of_any_number_of_rows_fit_into_registers():
    for rows in range(1, 1200):
        for shapes in EXPERTS:
            tiling = choose_tiling(shapes, rows, 256, may_split=False)
            pieces = tiling.pieces
            assert sum(width for _, width in pieces) == tiling.columns
            assert tiling.columns + 2 * pieces[0][1] <= 336 or len(pieces) == 1
            if shapes.loads_ahead(
                tiling.columns
            ):  # the registers of the next tile, and a product that still runs
                assert tiling.columns + 2 * pieces[0][1] + 48 <= 336
                assert len(pieces) > 2


def test_rows_in_two_parts_leave_the_next_tile_no_registers():
    in_parts = dataclasses.replace(EXPERTS[0], num_parts=2)
    assert EXPERTS[0].loads_ahead(144)
    assert not in_parts.loads_ahead(144)
    tilings = [choose_tiling(s, 128, 256, may_split=False) for s in (EXPERTS[0], in_parts)]
    assert [(tiling.columns, tiling.piece) for tiling in tilings] == [(128, 32), (128, 64)]
