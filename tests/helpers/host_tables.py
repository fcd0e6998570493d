"""Tables in the host's memory, and their addresses as `gather_host_rows` takes them."""

import numpy as np

from helpers.arrays import on_device
from pallas_kernels.gather_host_rows.op import split_address

_kept = []


def table(count, row_bytes, rng, *, offset=0):
    """u8[count, row_bytes] of random bytes, which begins so many bytes after a multiple of 16."""
    memory = np.empty(count * row_bytes + 32, np.uint8)
    begin = -memory.ctypes.data % 16 + offset
    found = memory[begin : begin + count * row_bytes].reshape(count, row_bytes)
    found[:] = rng.integers(0, 256, found.shape)
    return found


def addresses_of(tables):
    """i32[L, P, 2] of P planes of each of L tables, which stay until the process ends."""
    _kept.append(tables)
    return on_device(
        [[split_address(p.ctypes.data) for p in planes] for planes in tables], np.int32
    )
