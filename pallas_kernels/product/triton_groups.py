"""Triton kernel that rounds rows to E4M3 and back, with a scale for each group of some inputs.

    1,024 inputs of a row per program     -> largest of each group, codes, and what they stand for

For products that take rows in bf16, of more rows than each program of them rounds itself. Bytes:
the rows, in and out. It has run on no card.
Source: deepseek_v41.md section 10.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common import numbers, rows
from pallas_kernels.gpu import triton

Ref = Any
_INPUTS = 1024
_NUM_WARPS = 4


def round_groups(x: jax.Array, group: int) -> jax.Array:
    """bf16[..., in] -> the same shape, as `rows.round_rows`; `group` is a power of two."""
    dim = x.shape[-1]
    flat = x.reshape(-1, dim)

    def kernel(x: Ref, out: Ref) -> None:
        row = pl.program_id(0)
        lane = pl.program_id(1) * _INPUTS + jnp.arange(_INPUTS, dtype=jnp.int32)
        # Beyond the last input there are zeros, which count for no scale.
        values = triton.load_where(x, (row, lane), lane < dim).astype(jnp.float32)
        rounded = as_e4m3(values.reshape(-1, group)).reshape(-1)
        triton.store_where(out, (row, lane), rounded.astype(out.dtype), lane < dim)

    return triton.launch(
        kernel,
        grid=(flat.shape[0], pl.cdiv(dim, _INPUTS)),
        inputs=flat,
        outputs=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        num_warps=_NUM_WARPS,
        name="round_groups",
    ).reshape(x.shape)


def as_e4m3(groups: jax.Array) -> jax.Array:
    """f32[..., n], what E4M3 keeps of each group; in a kernel."""
    exponent = numbers.encode_ue8m0(rows.group_maximum(groups) * numbers.INV_448)
    # A power of two, so that multiplying by its inverse is exact.
    codes = triton.encode_e4m3(groups * numbers.invert_ue8m0(exponent)[..., None])
    return numbers.decode_e4m3(codes) * numbers.decode_ue8m0(exponent)[..., None]
