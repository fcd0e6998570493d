"""What the device's allocator says about its memory."""

from __future__ import annotations

import jax


def memory_limit() -> int | None:
    """Bytes that the device's allocator may take, or None if the device doesn't say."""
    return _stats().get("bytes_limit")


def peak_bytes() -> int | None:
    """The most bytes ever in use on the device, or None if the device doesn't say."""
    return _stats().get("peak_bytes_in_use")


def bytes_in_use() -> int:
    """Bytes in use on the device; those of all live arrays if the device doesn't say."""
    in_use = _stats().get("bytes_in_use")
    return sum(array.nbytes for array in jax.live_arrays()) if in_use is None else in_use


def _stats() -> dict[str, int]:
    return jax.devices()[0].memory_stats() or {}
