"""Memory of the host that a GPU reads: pages that are pinned where they are, of mapped files too.

Nothing is copied. The driver reads what of a file is not in memory yet, and keeps all of it there
until the process ends: a program that is still running on a device may read it until then.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import jax
import numpy as np

from dsv4_jax import cuda_driver

_PORTABLE, _DEVICE_MAP, _READ_ONLY = 1, 2, 8
"""Of `cuMemHostRegister`: for all GPUs of the process, for kernels, and never written to."""
_PIECE_BYTES = 4 * 2**30
"""Of a call of the driver, between which Python hears signals."""


class PinError(RuntimeError):
    """The CUDA driver does not pin memory of the host."""


_kept: list[np.ndarray] = []
"""What is pinned, so that no other memory is mapped there."""
_pinned: list[tuple[int, int]] = []
"""Pages that are pinned: where runs of them begin and end."""


def pin(arrays: Sequence[np.ndarray], *, on_gpu: bool | None = None) -> list[int]:
    """Lets the GPUs of this process read arrays where they are.

    Args:
      arrays: contiguous ones, of which some may be pinned already.
      on_gpu: whether GPUs will; None is whether JAX's default device is one. For CPUs nothing needs
        to be done.

    Returns:
      Where each begins, in the host's memory and for every GPU.

    Raises:
      PinError: the driver refuses; what this call has pinned is free again.
    """
    assert all(array.flags.c_contiguous for array in arrays), "rows lie one after the other"
    if on_gpu is None:
        on_gpu = jax.default_backend() == "gpu"
    if on_gpu and _missing(_pages(arrays), _pinned):
        _kept.extend(arrays)  # before any page of theirs is pinned, whatever interrupts this
        before = list(_pinned)
        try:
            with cuda_driver.on_gpu(_first_gpu()):
                try:
                    _pin_pages(arrays)
                except BaseException:
                    _release([run for run in _pinned if run not in before])
                    raise
        except (RuntimeError, OSError) as error:
            raise PinError(f"{error}") from error
    return [array.ctypes.data for array in arrays]


def bytes_to_pin(arrays: Sequence[np.ndarray]) -> int:
    """Of pages that `pin` would add to those that are pinned."""
    return sum(end - begin for begin, end in _missing(_pages(arrays), _pinned))


def _first_gpu() -> int:
    """The driver's number of a GPU, whose context pins for all of them."""
    return jax.local_devices(backend="gpu")[0].local_hardware_id or 0


def _pin_pages(arrays: Sequence[np.ndarray]) -> None:
    """Pins what is not pinned yet; a GPU's context is that of the thread."""
    flags = _PORTABLE | _DEVICE_MAP
    if not all(array.flags.writeable for array in arrays):
        flags |= _READ_ONLY
    calls = cuda_driver.driver()
    for begin, end in _missing(_pages(arrays), _pinned):
        for first in range(begin, end, _PIECE_BYTES):
            size = min(_PIECE_BYTES, end - first)
            status = calls.cuMemHostRegister_v2(
                ctypes.c_void_p(first), ctypes.c_size_t(size), flags
            )
            cuda_driver.check(status, f"to pin {size:,} bytes of the host's memory")
            _pinned.append((first, first + size))
            seen = ctypes.c_uint64()
            status = calls.cuMemHostGetDevicePointer_v2(
                ctypes.byref(seen), ctypes.c_void_p(first), 0
            )
            cuda_driver.check(status, "the address of pinned memory")
            if seen.value != first:
                raise RuntimeError("GPUs of this machine see the host's memory elsewhere")


def _pages(arrays: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Runs of whole pages that hold some arrays; what two of them share comes once."""
    page, runs = mmap.PAGESIZE, []
    for array in arrays:
        begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
        runs.append((begin // page * page, -(-end // page) * page))
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(runs):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _missing(
    wanted: Sequence[tuple[int, int]], there: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """What of some runs of pages is not in others."""
    missing = []
    for begin, end in wanted:
        for first, last in sorted(there):
            if first < end and last > begin:
                if first > begin:
                    missing.append((begin, first))
                begin = max(begin, last)
        if begin < end:
            missing.append((begin, end))
    return missing


def _release(runs: Sequence[tuple[int, int]]) -> None:
    """Lets pages go, of which those that the driver keeps stay in the list."""
    for run in runs:
        if not cuda_driver.driver().cuMemHostUnregister(ctypes.c_void_p(run[0])):
            _pinned.remove(run)
