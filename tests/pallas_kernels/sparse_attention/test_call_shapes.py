import pytest

from pallas_kernels.gpu.devices import H200
from pallas_kernels.sparse_attention import call_shapes

pytestmark = pytest.mark.unoptimised


def splits_of(programs, tiles):
    return call_shapes.choose_tiling(programs, tiles, num_sms=H200.num_sms, dim=512).splits


@pytest.mark.parametrize(
    ("programs", "tiles", "splits"),
    [
        *[(1, 2, 2), (16, 2, 2), (32, 2, 1)],
        *[(1, 3, 3), (16, 3, 3), (32, 3, 1)],
        *[(1, 10, 10), (8, 10, 10), (32, 10, 4), (64, 10, 2), (128, 10, 1), (256, 10, 1)],
        *[
            (1, 18, 18),
            (4, 18, 18),
            (16, 18, 6),
            (128, 18, 1),
            (1, 130, 65),
            (64, 130, 2),
            (0, 1, 1),
        ],
    ],
)
def test_splits_of_attention_fill_the_cores_once(programs, tiles, splits):
    assert splits_of(programs, tiles) == splits
