"""The GPUs that kernels are cut for: the one table of what differs between them.

Their memory and rates are in `dsv4_jax/bench/gpus.py`, from which no kernel may import, and no cut
depends on them.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.common.backend import compute_capability


@dataclasses.dataclass(frozen=True)
class Device:
    """What the cut of a kernel depends on.

    Attributes:
      kind: as JAX names it, `device_kind`.
      capability_major: first number of its compute capability.
      num_sms: streaming multiprocessors.
      shared_memory_bytes: the most that one CTA can have.
      l2_bytes: of the L2 cache.
      has_tmem: whether its tensor cores leave products in a memory of their own (tcgen05);
        else they leave them in registers (wgmma).
    """

    kind: str
    capability_major: int
    num_sms: int
    shared_memory_bytes: int
    l2_bytes: int
    has_tmem: bool = False


H100 = Device("NVIDIA H100", 9, 132, 232_448, 50 * 2**20)
H200 = Device("NVIDIA H200", 9, 132, 232_448, 50 * 2**20)
B200 = Device("NVIDIA B200", 10, 148, 232_448, 132_644_864, has_tmem=True)
_BY_MAJOR = {9: H200, 10: B200}


def find_device(capability: tuple[int, int] | None) -> Device | None:
    """The device that kernels are cut for on a GPU of this compute capability; None for others."""
    return None if capability is None else _BY_MAJOR.get(capability[0])


def current_device() -> Device:
    """The device that a kernel traced now is cut for; an H200 where there is no GPU, or no kernel.

    `find_obstacle` says where there is no kernel.
    """
    return find_device(compute_capability()) or H200


def find_obstacle() -> str | None:
    """Why no kernel can run on the GPU at hand, as the rest of a sentence; None where one can."""
    capability = compute_capability()
    if capability is not None and find_device(capability) is None:
        return f"is for Hopper and Blackwell, got compute capability {capability}"
    return None
