"""YaRN, which stretches the compress RoPE table to longer contexts."""

from __future__ import annotations

import dataclasses

from dsv4_jax.config.limits import YARN_KINDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN interpolation of the compress RoPE table; it adds no attention factor.

    Attributes:
      factor: context extension factor.
      original_max_positions: context length before extension.
      beta_fast: rotations above which a frequency is left alone.
      beta_slow: rotations below which a frequency is divided by `factor`.

    Raises:
      ValueError: a value is no number or out of range; the message names the field.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what is no such number."""
        for name, kind in YARN_KINDS.items():
            object.__setattr__(self, name, kind.read(getattr(self, name), name))
