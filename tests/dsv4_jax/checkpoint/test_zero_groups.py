"""Groups of zeros load whatever their scale is, are zero, and are not counted as rounded."""

import ml_dtypes
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint import convert_checkpoint
from dsv4_jax.checkpoint.spread import RoundedWeightsWarning, count_rounded
from dsv4_jax.checkpoint.zero_groups import find_bad_scales, holds_values
from helpers import slow
from helpers.checkpoints import read_tensors, released_tensors, write_released
from helpers.dspark import TRUNK
from pallas_kernels.common.weights import MXFP4, BlockFP8

EXPERT, DENSE = "layers.2.ffn.experts.5.w1", "layers.2.attn.wq_b"


def load(folder, **options):
    return ds.load_checkpoint(folder, progress=False, **options)[1]


def test_which_groups_hold_values():
    pairs = np.zeros((2, 40), np.uint8)  # 80 inputs, the last group of 16
    pairs[0, 15], pairs[0, 16], pairs[1, 39] = 0x80, 0x08, 0x10  # both signs of 0, and 0.5
    np.testing.assert_array_equal(
        holds_values(pairs), [[False, False, False], [False, False, True]]
    )
    codes = np.zeros((130, 260), np.uint8)
    codes[0, 0], codes[127, 128], codes[129, 259] = 0x80, 0x01, 0xFF
    np.testing.assert_array_equal(
        holds_values(codes.view(ml_dtypes.float8_e4m3fn)),
        [[False, True, False], [False, False, True]],
    )


@pytest.mark.parametrize(
    ("scale", "bad"),
    [
        (np.array([[0, 127]], np.uint8), 0),
        (np.array([[127, 0]], np.uint8), 1),  # beside a value
        (np.array([[255, 127]], np.uint8), 1),  # NaN, of zeros too
        (np.array([[0.0, 1.0]], np.float32), 0),
        (np.array([[1.0, 0.0]], np.float32), 1),
        (np.array([[-1.0, np.inf]], np.float32), 2),
        (np.array([[np.nan, 1.0]], np.float32), 1),
    ],
)
def test_scales_that_damage(scale, bad):
    pairs = np.zeros((1, 32), np.uint8)
    pairs[0, 20] = 1
    assert find_bad_scales(pairs, scale)[0] == bad


@pytest.mark.slow
@pytest.mark.parametrize("code", slow.all_but([0, 254], [0, 1, 254]))
def test_zeros_of_fp4_load_with_any_code(tmp_path, recwarn, code):
    tensors = released_tensors(TRUNK)
    pairs, scale = (tensors[f"{EXPERT}.{part}"].copy() for part in ("weight", "scale"))
    pairs[3, :16], scale.view(np.uint8)[3, 0] = 0, min(code, 127)
    tensors |= {f"{EXPERT}.weight": pairs, f"{EXPERT}.scale": scale}
    folder = write_released(tmp_path / "x", TRUNK, tensors)
    kept = load(folder).layers["hca_learned"].ffn.w1
    assert isinstance(kept, MXFP4)
    assert not recwarn.list
    for values in (
        kept.decode()[0, 5],
        load(folder, weights="float32").layers["hca_learned"].ffn.w1[0, 5],
    ):
        assert not np.asarray(values)[3, :32].any()
        assert np.isfinite(np.asarray(values)).all()
    ds.save_checkpoint(TRUNK, load(folder), tmp_path / "y")
    written = read_tensors(tmp_path / "y" / "model.safetensors")
    assert written == read_tensors(folder / "model.safetensors")  # bytes are kept


def test_a_zero_group_of_our_own_is_not_rounded(tmp_path, recwarn):
    """`convert` writes code 1 for it, far below its neighbours'."""
    tensors = released_tensors(TRUNK)
    pairs = tensors[f"{EXPERT}.weight"].copy()
    pairs[3, :16] = 0
    folder = write_released(tmp_path / "x", TRUNK, tensors | {f"{EXPERT}.weight": pairs})
    convert_checkpoint(folder, tmp_path / "dense", weights="bfloat16", progress=False)
    convert_checkpoint(tmp_path / "dense", tmp_path / "y", weights="stored", progress=False)
    _, _, codes = read_tensors(tmp_path / "y" / "model.safetensors")[f"{EXPERT}.scale"]
    assert codes[3 * 2] == 1
    load(tmp_path / "y")
    assert not recwarn.list


def test_a_zero_group_does_not_hide_others(tmp_path):
    """A large scale of zeros counts as the largest of a block, as kernels take it."""
    scale = np.full((8, 4), 120, np.uint8)
    pairs = np.full((8, 64), 0x11, np.uint8)
    scale[0, 0] = 100
    assert count_rounded(scale, pairs) == count_rounded(scale) == 1
    pairs[0, :16] = 0x80
    assert (count_rounded(scale, pairs), count_rounded(scale)) == (0, 1)
    scale[0, 0] = 140
    assert count_rounded(scale, pairs) == 31
    tensors = released_tensors(TRUNK)
    far = tensors[f"{EXPERT}.scale"].copy()
    far.view(np.uint8)[3, 0] = 90
    with pytest.warns(RoundedWeightsWarning, match="experts.5.w1"):
        load(write_released(tmp_path / "x", TRUNK, tensors | {f"{EXPERT}.scale": far}))


@pytest.mark.parametrize("scales", ["UE8M0", "F32"])
def test_zeros_of_fp8_load_with_a_scale_of_zero(tmp_path, scales):
    tensors = released_tensors(TRUNK, scales=scales)
    codes, scale = (tensors[f"{DENSE}.{part}"].copy() for part in ("weight", "scale"))
    codes.view(np.uint8)[:] = 0x80  # all of one block
    scale.view(np.uint8)[:] = 0
    zeros = tensors | {f"{DENSE}.weight": codes, f"{DENSE}.scale": scale}
    kept = load(write_released(tmp_path / "x", TRUNK, zeros)).layers["hca_learned"].attn.wq_b
    assert isinstance(kept, BlockFP8)
    assert not np.asarray(kept.decode()).any()
    codes.view(np.uint8)[5, 5] = 1
    with pytest.raises(ValueError, match=rf"damaged: scale of {DENSE}\.weight has 1 "):
        load(write_released(tmp_path / "y", TRUNK, zeros | {f"{DENSE}.weight": codes}))
