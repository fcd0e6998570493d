"""Rows of tables that lie in the host's memory, read by the device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_indices,
    check_integer,
    check_list,
    check_rank,
    check_shape,
)
from pallas_kernels.gather_host_rows import reference, triton_gpu

_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.gather_host_rows,
    Backend.TRITON_GPU: triton_gpu.gather_host_rows,
}


def gather_host_rows(
    rows: jax.Array,
    addresses: jax.Array,
    *,
    row_bytes: Sequence[int],
    backend: Backend | None = None,
) -> tuple[jax.Array, ...]:
    """Reads rows of tables that no array holds, by the addresses at which they begin.

    The memory has to be pinned for the device (`cuMemHostRegister`), and a row's number to be one
    that its table has: nothing is checked, and what lies elsewhere ends the process.

    In plain JAX, if `planes` were arrays u8[L, R, row_bytes[p]]:

        table = jnp.arange(rows.shape[1])[:, None]                          # i32[L, 1]
        found = [plane[table, rows] for plane in planes]                    # u8[T, L, C, b] each

    Args:
      rows: i32[T, L, C], C rows of each of L tables for each of T tokens.
      addresses: i32[L, P, 2], where each plane of each table begins: the low and the high half.
      row_bytes: bytes of a row of each of P planes.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      A plane u8[T, L, C, row_bytes[p]] each.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v41.md section 9.
    """
    check_rank(3, rows=rows, addresses=addresses)
    check_indices(rows=rows, addresses=addresses)
    check_list("row_bytes", row_bytes, of="sizes")
    sizes = tuple(
        check_integer(f"row_bytes[{plane}]", size, 1) for plane, size in enumerate(row_bytes)
    )
    check_shape("addresses", addresses, (rows.shape[1], len(sizes), 2), "L, P, 2")
    implementation = resolve(
        "gather_host_rows", backend, _IMPLEMENTATIONS, arguments={"rows": rows}
    )
    return implementation(*jax_arrays(rows, addresses), row_bytes=sizes)


def split_address(address: int) -> tuple[int, int]:
    """The two halves of an address, as `addresses` has them."""
    low, high = np.array([address & 0xFFFFFFFF, address >> 32], np.uint32).view(np.int32).tolist()
    return low, high
