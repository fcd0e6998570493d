"""How the flush kernels are cut into programs and launches."""

from __future__ import annotations

import dataclasses

from pallas_kernels import tilings

_FEW_WINDOWS = 132  # of an H200's SMs


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Programs of one flush.

    Attributes:
      warps: of a program that takes a whole window; a power of two.
      apart: CSA: whether each compressor has a launch of its own, with warps as its lanes need.
      channels: of a program that pools; 0 pools and finishes a whole window in one program. Else
        means go through memory to a second launch, which finishes them.
      pool_warps: of a program that pools only; a power of two.
      programs: of a compressor, without `channels`, each with the next window's loads in flight
        while it finishes one; 0 for one per window.
      chunk: HCA: tokens whose loads are in flight.
    """

    warps: int
    apart: bool = False
    channels: int = 0
    pool_warps: int = 4
    programs: int = 0
    chunk: int = 1


def choose_csa(num_windows: int, tokens: int) -> Tiling:
    """For a number of windows, and tokens of the call."""
    return tilings.tune("flush_csa", Tiling(warps=4), windows=num_windows, tokens=tokens)


def choose_hca(num_windows: int, tokens: int) -> Tiling:
    """For a number of windows, and tokens of the call.

    Many tokens are in flight while a program has an SM to itself.
    """
    formula = Tiling(warps=8, chunk=16 if num_windows <= _FEW_WINDOWS else 8)
    return tilings.tune("flush_hca", formula, windows=num_windows, tokens=tokens)
