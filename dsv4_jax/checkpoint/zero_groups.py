"""Groups of quantised weights that are all zero, which are zero whatever their scale is."""

from __future__ import annotations

import numpy as np

from pallas_kernels.common.weights import FP8_BLOCK, MXFP4_GROUP


def holds_values(stored: np.ndarray, *, block: int = FP8_BLOCK) -> np.ndarray:
    """Which groups hold a weight that is not zero: bool, of the shape of the scales.

    Args:
      stored: E4M3 [out, in], of which a square block shares a scale, or E2M1 pairs
        u8[out, in / 2], of which 32 inputs of a row do.
      block: outputs and inputs of a block of E4M3.
    """
    if stored.dtype == np.uint8:
        found, steps = (stored & 0x77) != 0, (1, MXFP4_GROUP // 2)  # without both signs
    else:
        found, steps = (stored.view(np.uint8) & 0x7F) != 0, (block, block)
    for axis, step in enumerate(steps):
        if step > 1:
            found = np.logical_or.reduceat(found, np.arange(0, found.shape[axis], step), axis=axis)
    return found


def find_bad_scales(
    stored: np.ndarray, scale: np.ndarray, *, block: int = FP8_BLOCK
) -> tuple[int, str]:
    """How many scales damage the weights, and what is wrong with them.

    A scale of zero, as f32, or of UE8M0's code 0, which some kernels take for zero, is good for a
    group of zeros alone: there others write it.

    Args:
      stored: as of `holds_values`.
      scale: its scales, f32 or UE8M0 as u8.
      block: as of `holds_values`.
    """
    if scale.dtype == np.uint8:
        bad, rule = scale == 255, "UE8M0 codes of 0 or 255"
    else:
        bad = ~(np.isfinite(scale) & (scale >= 0))
        rule = "values that are not positive numbers"
    if (empty := scale == 0).any():
        bad |= empty & holds_values(stored, block=block)
    return int(np.count_nonzero(bad)), rule
