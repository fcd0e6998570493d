"""Scales of MXFP4 that lie so far apart that a GPU's kernels round the smallest weights.

Kernels multiply E4M3, into which they unpack a block of 128 outputs and 128 inputs with one scale,
the largest of its 512, where an expert has many rows; of fewer rows two outputs share one. Weights
whose scale is smaller by up to 2^14 are exact.
"""

from __future__ import annotations

import warnings

import numpy as np

from dsv4_jax.checkpoint.zero_groups import holds_values
from pallas_kernels.common.weights import FP8_BLOCK, MXFP4_GROUP

EXACT_STEPS = 14
_NAMED = 3
"""Tensors that a warning names."""


class RoundedWeightsWarning(UserWarning):
    """A checkpoint has weights that a GPU's kernels round."""


def count_rounded(scale: np.ndarray, pairs: np.ndarray | None = None) -> int:
    """Groups of 32 weights that are rounded; zeros are exact whatever their scale.

    Args:
      scale: u8 or f32[out, ceil(in / 32)], UE8M0 codes or powers of two.
      pairs: u8[out, in / 2], the weights; without them no group is taken for zeros.
    """
    steps = scale if scale.dtype == np.uint8 else np.frexp(scale)[1]
    if not steps.size or int(steps.max()) - int(steps.min()) <= EXACT_STEPS:
        return 0  # which is quick to see; the rest takes longer
    outputs, groups = steps.shape
    together = FP8_BLOCK // MXFP4_GROUP
    rows, columns = -(-outputs // FP8_BLOCK), -(-groups // together)
    padded = np.full((rows * FP8_BLOCK, columns * together), -(2**15))
    padded[:outputs, :groups] = steps
    sharing = padded.reshape(rows, FP8_BLOCK, columns, together)
    largest = sharing.max(axis=(1, 3), keepdims=True)
    present = sharing > -(2**15)
    too_small = present & (largest - sharing > EXACT_STEPS)
    if pairs is not None and too_small.any():
        padded[:outputs, :groups] = holds_values(pairs)
        too_small &= sharing == 1
    return int(np.count_nonzero(too_small))


def warn_of_rounded(counts: dict[str, int]) -> None:
    """Warns once of all tensors that have any, by name."""
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return
    names = ", ".join(f"{name} ({count:,})" for name, count in list(found.items())[:_NAMED])
    more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    warnings.warn(
        f"{sum(found.values()):,} groups of 32 FP4 weights have a scale more than 2^{EXACT_STEPS} "
        f"below that of others which a GPU's kernels unpack with them, and are rounded there: "
        f'{names}{more}. weights="bfloat16" keeps them exactly',
        RoundedWeightsWarning,
        stacklevel=3,
    )
