"""The GPUs that are known by name: their memory, and what memory, matrix units and links reach.

Rates of an H200 were measured: a copy, large matrix products, and NVIDIA's figure of NVLink. Other
GPUs are taken to reach the same share of what NVIDIA states of them (dense products, one direction
of NVLink, SXM modules). What kernels are cut for (SMs, shared memory) is in
`pallas_kernels/gpu/devices.py`.
"""

from __future__ import annotations

import dataclasses

COPY_SHARE, BF16_SHARE, FP8_SHARE = 4.3 / 4.8, 820 / 989, 1600 / 1979
"""Of what NVIDIA states of an H200, what was measured on one."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one GPU.

    Attributes:
      bandwidth: bytes per second of its memory, read and written together.
      bf16_flops: operations per second of bf16 matrix products.
      fp8_flops: the same of FP8.
      link_bandwidth: bytes per second that it sends to its peers.
    """

    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    link_bandwidth: float


def _by_share(bandwidth: float, bf16_flops: float, fp8_flops: float, link: float) -> Rates:
    return Rates(bandwidth * COPY_SHARE, bf16_flops * BF16_SHARE, fp8_flops * FP8_SHARE, link)


@dataclasses.dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
      memory_bytes: its memory, as NVIDIA states it.
      rates: what it reaches.
    """

    memory_bytes: int
    rates: Rates


H200 = Rates(4.3e12, 820e12, 1600e12, 450e9)
GPUS = {
    "h100": GPU(80 * 10**9, _by_share(3.35e12, 989e12, 1979e12, 450e9)),
    "h200": GPU(141 * 10**9, H200),
    "b200": GPU(180 * 10**9, _by_share(8e12, 2250e12, 4500e12, 900e9)),
    "b300": GPU(288 * 10**9, _by_share(8e12, 2250e12, 4500e12, 900e9)),
}
