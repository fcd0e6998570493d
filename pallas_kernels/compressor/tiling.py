"""How a flush is cut into programs and launches."""

from __future__ import annotations

import dataclasses

from pallas_kernels.gpu.devices import Device, current_device

_MANY_WINDOWS = 2048
_LONG_WINDOW = 16  # tokens


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Programs of one flush.

    Attributes:
      warps: of a program that takes a whole window; a power of two.
      apart: CSA: whether each compressor has a launch of its own, with `warps_apart`.
      channels: HCA: of a program that pools, at most; 0 pools and finishes a whole window in one
        program. Else means go through memory to a second launch, which finishes them.
      pool_warps: HCA: of a program that pools only; a power of two.
      chunk: HCA: tokens whose loads are in flight.
    """

    warps: int
    apart: bool = False
    channels: int = 0
    pool_warps: int = 4
    chunk: int = 1


def choose_csa(num_windows: int) -> Tiling:
    """For a number of windows.

    A launch costs what compressors gain by warps of their own for some 2,000 windows.
    """
    return Tiling(warps=4, apart=num_windows >= _MANY_WINDOWS)


def choose_hca(num_windows: int, tokens: int, device: Device | None = None) -> Tiling:
    """For a number of windows, and tokens of the call; None is the device at hand.

    Many tokens are in flight while a program has an SM to itself. Several SMs take a window where
    half of them would have none, if windows are long.
    """
    num_sms = (device or current_device()).num_sms
    formula = Tiling(warps=8, chunk=16 if num_windows <= num_sms else 8)
    if num_windows <= num_sms // 2 and tokens >= _LONG_WINDOW * num_windows:
        formula = dataclasses.replace(formula, channels=64, pool_warps=2, chunk=24)
    return formula


def warps_apart(lanes: int) -> int:
    """Warps of a program that has a launch to itself: two channels a lane of 512, four of fewer."""
    return max(1, lanes // 64 if lanes >= 512 else lanes // 128)
