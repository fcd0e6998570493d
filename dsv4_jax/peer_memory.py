"""Memory of GPUs that other GPUs, and other processes of the host, reach: calls of the CUDA driver.

XLA's own memory won't do: no handle opens it in another process.
"""

from __future__ import annotations

import ctypes
import pathlib
import socket
import weakref
from typing import Any

import jax
import numpy as np

from dsv4_jax import cuda_driver

SHARED_BYTES = 64
"""Of what `PeerMemory.share` gives, a handle of the driver."""
_LAZY_PEER_ACCESS = 1
_PEER_ACCESS_ALREADY_ENABLED = 704
_DLPACK_GPU, _DLPACK_INT = 2, 0


class PeerMemory:
    """Memory of a GPU of this process, zeros at first.

    It is freed when neither this nor an array of it is left.
    """

    def __init__(self, num_words: int, ordinal: int) -> None:
        """Allocates it.

        Args:
          num_words: of 32 bits.
          ordinal: of the GPU.

        Raises:
          RuntimeError: the driver has no such memory.
        """
        self.num_words, self.ordinal = num_words, ordinal
        driver, address = cuda_driver.driver(), ctypes.c_uint64()
        with cuda_driver.on_gpu(ordinal):
            _check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 * num_words)))
        self.address = address.value
        weakref.finalize(self, _free, self.address, ordinal).atexit = False
        self.fill(0, 0)

    def fill(self, word: int, first: int) -> None:
        """Writes one word from a place on, counted in words, to the end."""
        driver, pointer = cuda_driver.driver(), ctypes.c_uint64(self.address + 4 * first)
        with cuda_driver.on_gpu(self.ordinal):
            count = ctypes.c_size_t(self.num_words - first)
            _check(driver.cuMemsetD32_v2(pointer, ctypes.c_uint32(word), count))
            _check(driver.cuCtxSynchronize())

    def write(self, words: np.ndarray) -> None:
        """Writes i32[n] at the beginning."""
        words = np.ascontiguousarray(words, np.int32)
        driver, pointer = cuda_driver.driver(), ctypes.c_uint64(self.address)
        with cuda_driver.on_gpu(self.ordinal):
            source, size = ctypes.c_void_p(words.ctypes.data), ctypes.c_size_t(words.nbytes)
            _check(driver.cuMemcpyHtoD_v2(pointer, source, size))

    def share(self) -> bytes:
        """What another process of the host opens it with, SHARED_BYTES.

        Raises:
          RuntimeError: the driver refuses.
        """
        driver, handle = cuda_driver.driver(), _Handle()
        with cuda_driver.on_gpu(self.ordinal):
            pointer = ctypes.c_uint64(self.address)
            _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), pointer))
        return bytes(handle.bytes)

    def to_array(self) -> jax.Array:
        """The memory itself as i32[1, num_words] on its GPU.

        Raises:
          RuntimeError: JAX copied it.
        """
        array = jax.dlpack.from_dlpack(self, copy=False)
        if array.unsafe_buffer_pointer() != self.address:
            raise RuntimeError("JAX copied the memory of a peer buffer")
        return array

    def __dlpack_device__(self) -> tuple[int, int]:
        """See https://dmlc.github.io/dlpack."""
        return _DLPACK_GPU, self.ordinal

    def __dlpack__(self, **_: Any) -> Any:
        """A capsule that holds this until its consumer lets it go; nothing is written meanwhile."""
        exported = _Exported(self)
        address = ctypes.addressof(exported.tensor)
        _exported[address] = exported
        return _new_capsule(address, _CAPSULE_NAME, None)


def open_shared(shared: bytes, ordinal: int) -> int:
    """The address at which a GPU of this process reaches memory of another one.

    Args:
      shared: from `PeerMemory.share` there.
      ordinal: of the GPU here. It stays open until the process ends.

    Raises:
      RuntimeError: the driver refuses: the GPUs don't reach each other, or the other process has
        ended.
    """
    driver, address = cuda_driver.driver(), ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(shared)
    with cuda_driver.on_gpu(ordinal):
        _check(driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, _LAZY_PEER_ACCESS))
    return address.value


def find_unreachable(ordinals: list[int]) -> str | None:
    """Two GPUs of this process of which one can't reach the other's memory; None if all can."""
    driver = cuda_driver.driver()
    for one in ordinals:
        for other in ordinals:
            reaches = ctypes.c_int(1)
            if one != other:
                pair = cuda_driver.device_of(one), cuda_driver.device_of(other)
                _check(driver.cuDeviceCanAccessPeer(ctypes.byref(reaches), *pair))
            if not reaches.value:
                return f"GPU {one} can't reach the memory of GPU {other}"
    return None


def let_reach(ordinals: list[int]) -> None:
    """Lets GPUs of this process reach each other's `PeerMemory`.

    Raises:
      RuntimeError: the driver refuses.
    """
    driver = cuda_driver.driver()
    for other in ordinals:
        with cuda_driver.on_gpu(other) as context:
            for one in ordinals:
                if one != other:
                    with cuda_driver.on_gpu(one):
                        status = driver.cuCtxEnablePeerAccess(context, 0)
                    _check(0 if status == _PEER_ACCESS_ALREADY_ENABLED else status)


def host_name() -> str:
    """A name that processes of this host alone have, until it is started again."""
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    boot = path.read_text().strip() if path.exists() else ""
    return f"{socket.gethostname()} {boot}"


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * SHARED_BYTES),)


class _Tensor(ctypes.Structure):
    """A DLManagedTensor of DLPack."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


class _Exported:
    """What a DLPack tensor points to."""

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory
        self.shape = (ctypes.c_int64 * 2)(1, memory.num_words)
        kind, number = memory.__dlpack_device__()
        self.tensor = _Tensor(
            memory.address, kind, number, 2, _DLPACK_INT, 32, 1, self.shape, None, 0, None, _delete
        )


_exported: dict[int, _Exported] = {}
"""What consumers hold, by the address of its tensor."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    """Called by the last consumer, on a thread of its own."""
    _exported.pop(address, None)


_CAPSULE_NAME = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _free(address: int, ordinal: int) -> None:
    driver = cuda_driver.driver()
    with cuda_driver.on_gpu(ordinal):
        driver.cuMemFree_v2(ctypes.c_uint64(address))


def _check(status: int) -> None:
    cuda_driver.check(status, "to share memory between GPUs")
