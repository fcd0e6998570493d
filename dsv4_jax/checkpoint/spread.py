"""Scales of MXFP4 that lie so far apart that a GPU's kernels round the smallest weights.

A kernel multiplies E4M3, into which it unpacks the 128 inputs of outputs i and i + 32 with one
scale, the largest of their eight. Weights whose scale is smaller by up to 2^14 are exact.
"""

from __future__ import annotations

import warnings

import numpy as np

from pallas_kernels.common.weights import INPUTS, MXFP4_GROUP, ROWS

EXACT_STEPS = 14
_NAMED = 3
"""Tensors that a warning names."""


class RoundedWeightsWarning(UserWarning):
    """A checkpoint has weights that a GPU's kernels round."""


def count_rounded(scale: np.ndarray) -> int:
    """Groups of 32 weights that are rounded.

    Args:
      scale: u8 or f32[out, ceil(in / 32)], UE8M0 codes or powers of two.
    """
    steps = scale if scale.dtype == np.uint8 else np.frexp(scale)[1]
    if not steps.size or int(steps.max()) - int(steps.min()) <= EXACT_STEPS:
        return 0  # which is quick to see; the rest takes longer
    outputs, groups = steps.shape
    together = INPUTS // MXFP4_GROUP
    padded = np.full((-(-outputs // ROWS) * ROWS, -(-groups // together) * together), -(2**15))
    padded[:outputs, :groups] = steps
    sharing = padded.reshape(-1, 2, ROWS // 2, padded.shape[1] // together, together)
    largest = sharing.max(axis=(1, 4), keepdims=True)
    present = sharing > -(2**15)
    return int(np.count_nonzero(present & (largest - sharing > EXACT_STEPS)))


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
