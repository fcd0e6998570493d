"""YaRN, which stretches the compress RoPE table to longer contexts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN interpolation of the compress RoPE table; it adds no attention factor.

    Attributes:
      factor: context extension factor.
      original_max_positions: context length before extension.
      beta_fast: rotations above which a frequency is left alone.
      beta_slow: rotations below which a frequency is divided by `factor`.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
