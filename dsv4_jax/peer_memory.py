"""Memory of GPUs that other GPUs, and other processes of the host, reach: calls of the CUDA driver.

JAX has no name for it. XLA lets the GPUs of a process reach each other's memory by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

HANDLE_BYTES = 64
SHARED_BYTES = HANDLE_BYTES + 8
"""Of what `share` gives."""
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


def find_unreachable(ordinals: list[int]) -> str | None:
    """Two GPUs of this process of which one can't reach the other's memory; None if all can."""
    driver = _driver()
    for one in ordinals:
        for other in ordinals:
            reaches = ctypes.c_int(1)
            if one != other:
                pair = _device(driver, one), _device(driver, other)
                _check(driver.cuDeviceCanAccessPeer(ctypes.byref(reaches), *pair))
            if not reaches.value:
                return f"GPU {one} can't reach the memory of GPU {other}"
    return None


def host_name() -> str:
    """A name that processes of this host alone have, until it is started again."""
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    boot = path.read_text().strip() if path.exists() else ""
    return f"{socket.gethostname()} {boot}"


def share(address: int, ordinal: int) -> bytes:
    """What another process of the host needs to open memory of a GPU of this one.

    Args:
      address: in memory that `cuMemAlloc` gave, as JAX's default allocator takes it.
      ordinal: of the GPU.

    Returns:
      SHARED_BYTES, a handle of the whole allocation and the address's distance from its beginning.

    Raises:
      RuntimeError: the driver refuses.
    """
    driver, base, size, handle = _driver(), ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with _on_gpu(driver, ordinal):
        place = ctypes.c_uint64(address)
        _check(driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), place))
        _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), base))
    return bytes(handle.bytes) + (address - base.value).to_bytes(8, "little")


def open_shared(shared: bytes, ordinal: int) -> int:
    """The address at which a GPU of this process reaches memory of another one.

    Args:
      shared: from `share` there.
      ordinal: of the GPU here. It stays open until the process ends.

    Raises:
      RuntimeError: the driver refuses: the GPUs don't reach each other, or the other process has
        ended.
    """
    driver, base = _driver(), ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(shared[:HANDLE_BYTES])
    with _on_gpu(driver, ordinal):
        _check(driver.cuIpcOpenMemHandle_v2(ctypes.byref(base), handle, _LAZY_PEER_ACCESS))
    return base.value + int.from_bytes(shared[HANDLE_BYTES:], "little")


@contextlib.contextmanager
def _on_gpu(driver: Any, ordinal: int) -> Iterator[None]:
    """Makes the GPU's primary context, which is XLA's, that of this thread."""
    device, context = _device(driver, ordinal), ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(driver.cuCtxPushCurrent_v2(context))
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _device(driver: Any, ordinal: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), ordinal))
    return device


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refuses to share memory between GPUs, error {status}")
