"""Bounds that several tests share, each with its reason."""

INTERMEDIATE = 2e-5
"""Between two f32 implementations of a small model, on any intermediate, absolute.

Values are below 20, whose ulp is 2e-6. Each is a handful of sums of a few hundred terms away from
the last norm, and norms stop errors from growing with depth, so a few ulps of the largest remain.
"""

INDEX_MARGIN = 1e-5
"""Selections are compared where the last selected score leads by more than this.

Index scores are below 1 and deviate by less than half of it.
"""
