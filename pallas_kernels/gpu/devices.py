"""The GPUs that kernels are cut for: sizes that no kernel spells again."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """What the cut of a kernel depends on.

    Attributes:
      kind: as JAX names it, `device_kind`.
      capability_major: first number of its compute capability.
      num_sms: streaming multiprocessors.
      shared_memory_bytes: the most that one CTA can have.
      l2_bytes: of the L2 cache.
    """

    kind: str
    capability_major: int
    num_sms: int
    shared_memory_bytes: int
    l2_bytes: int


H100 = Device("NVIDIA H100", 9, 132, 232_448, 50 * 2**20)
H200 = Device("NVIDIA H200", 9, 132, 232_448, 50 * 2**20)
B200 = Device("NVIDIA B200", 10, 148, 232_448, 132_644_864)
_BY_MAJOR = {9: H200, 10: B200}


def find_device(capability: tuple[int, int] | None) -> Device | None:
    """The device that kernels are cut for on a GPU of this compute capability; None for others."""
    return None if capability is None else _BY_MAJOR.get(capability[0])
