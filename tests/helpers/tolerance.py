"""Bounds that several tests share, each with its reason."""

INTERMEDIATE = 2e-5
"""Between two f32 implementations of a small model, on any intermediate, absolute.

The largest values, streams and their sums, stay below 20, where an ulp is 1e-6 to 2e-6; every
sublayer adds about one rounding of that size, and the presets have up to 14 sublayers. Measured:
at most 8e-6, on such sums. Against a float64 run, transformers is as far off as we are.
"""

INDEX_MARGIN = 1e-5
"""Selections are compared where the last selected score leads by more than this.

Index scores reach 5 and were measured to deviate by at most 4e-6.
"""
