"""The form of activations that steps and forward passes take unless another is named."""

from __future__ import annotations

DEFAULT_ACTIVATIONS = "fp8"
"""The release's numerics: rows are rounded to E4M3 before every product with a quantised weight.

The same for prefill and decode, so that every split of a sequence gives the same result.
"""
