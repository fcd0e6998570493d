"""What the device's allocator says about its memory."""

from __future__ import annotations

import jax

from dsv4_jax.runtime import find_memory


def memory_limit() -> int | None:
    """Bytes that all arrays together may take, on a CPU of the host's; None if nobody says."""
    memory = find_memory()
    return None if memory is None else memory.free_bytes + bytes_in_use()


def peak_bytes() -> int | None:
    """The most bytes ever in use on the device, or None if the device doesn't say."""
    return _stats().get("peak_bytes_in_use")


def bytes_in_use() -> int:
    """Bytes in use on the device; those of all live arrays if the device doesn't say."""
    in_use = _stats().get("bytes_in_use")
    return sum(array.nbytes for array in jax.live_arrays()) if in_use is None else in_use


def _stats() -> dict[str, int]:
    return jax.local_devices()[0].memory_stats() or {}
