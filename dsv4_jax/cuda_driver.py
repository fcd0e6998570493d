"""Calls of the CUDA driver, for memory that XLA does not manage."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any


def driver() -> Any:
    """Its library.

    Raises:
      OSError: there is none on this machine.
    """
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raises where a call has failed.

    Args:
      status: what the call gave.
      what: what the driver refuses then, as in "to pin memory".

    Raises:
      RuntimeError: it is not 0.
    """
    if status:
        raise RuntimeError(f"the CUDA driver refuses {what}, error {status}")


def device_of(ordinal: int) -> ctypes.c_int:
    """The driver's own number of a GPU of this process."""
    device = ctypes.c_int()
    check(driver().cuDeviceGet(ctypes.byref(device), ordinal), f"GPU {ordinal}")
    return device


@contextlib.contextmanager
def on_gpu(ordinal: int) -> Iterator[ctypes.c_void_p]:
    """Makes the GPU's primary context, which is XLA's, that of this thread."""
    calls, device, context = driver(), device_of(ordinal), ctypes.c_void_p()
    name = f"the context of GPU {ordinal}"
    check(calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), name)
    check(calls.cuCtxPushCurrent_v2(context), name)
    try:
        yield context
    finally:
        calls.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        calls.cuDevicePrimaryCtxRelease_v2(device)
