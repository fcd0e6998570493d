"""Shared memory of a CTA, by hand, and as the launch allocates it."""

import jax
import pytest

from pallas_kernels.product import BLACKWELL, Shapes, Tiling
from pallas_kernels.product.scratch import scratch_types, shared_bytes

CODES, WORDS = 2 * 64 * 128, 2 * 64 * 4
"""Bytes of a group of inputs: both consumers' E4M3 codes; MXFP4's scales, with half the codes."""
FP8 = Shapes(32, (64,), 1, is_gated=False, format="fp8")
GATED = Shapes(32, (32, 32), 1, is_gated=True, format="fp8")
MXFP4 = Shapes(32, (64,), 2, is_gated=False, format="mxfp4")
DENSE = Shapes(32, (64,), 1, is_gated=False, format="dense")
CASES = {
    "fp8": (FP8, Tiling(64, 256, 4), 4 * 2 * (CODES + 64 * 128 + 64 * 4)),
    "fewer rows than scales": (FP8, Tiling(8, 128, 2), 2 * (CODES + 8 * 128 + 32 * 4)),
    "two terms": (
        MXFP4,
        Tiling(16, 128, 3, split_k=2),
        3 * (CODES // 2 + WORDS + 2 * (16 * 128 + 32 * 4)),
    ),
    "dense": (DENSE, Tiling(32, 64, 2), 2 * (CODES + 32 * 128)),
    "gate and up": (GATED, Tiling(8, 128, 2), 2 * (CODES + 8 * 128 + 32 * 4) + 64 * 8 * 4),
    "rows on the left": (
        GATED,
        Tiling(128, 128, 6, swap_ab=False),
        6 * (CODES + 128 * 128 + 128 * 4),
    ),
    "rounds rows": (
        Shapes(8, (64,), 1, is_gated=False, format="fp8", rounds_rows=True),
        Tiling(8, 128, 2, split_k=2),
        2 * CODES + 4 * (8 * 128 + 32 * 4),
    ),
    "unpacked on Blackwell": (
        Shapes(32, (64,), 1, is_gated=False, format="mxfp4", core=BLACKWELL),
        Tiling(16, 128, 2),
        2 * (CODES // 2 + WORDS + 16 * 128 + 32 * 4) + 2 * 128 * (128 + 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_arrays(name):
    shapes, tiling, expected = CASES[name]
    assert shared_bytes(shapes, tiling) == expected


def test_barriers_and_tensor_memory_take_no_stage_s_room():
    shapes, tiling, _ = CASES["unpacked on Blackwell"]
    kinds = {type(leaf).__name__ for leaf in jax.tree.leaves(tuple(scratch_types(shapes, tiling)))}
    assert kinds == {"GPUMemoryRef", "Barrier"}
    more = Tiling(tiling.tile_m, tiling.tile_k, tiling.stages + 1)
    stage = shared_bytes(shapes, more) - shared_bytes(shapes, tiling)
    assert stage == CODES // 2 + WORDS + 16 * 128 + 32 * 4
