"""Checks of products: rows and weights, dense or quantised."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.checks import (
    check_arrays,
    check_float_dtype,
    check_floats,
    check_integer,
    shown,
)
from pallas_kernels.common.pending import Pending
from pallas_kernels.common.weights import (
    ACTIVATIONS,
    FP8_BLOCKS,
    INPUTS,
    MXFP4,
    ROWS,
    BlockFP8,
    Weight,
)


def check_rows(name: str, x: jax.Array | Pending) -> None:
    """Floats, or what another product left of them."""
    if not isinstance(x, Pending):
        check_floats(**{name: x})


def check_weight(name: str, weight: Weight, rank: int | None = None) -> None:
    """A dense weight of floats, or a quantised one whose fields fit each other; of that rank."""
    if isinstance(weight, BlockFP8):
        _check_block_fp8(name, weight)
    elif isinstance(weight, MXFP4):
        _check_mxfp4(name, weight)
    else:
        check_floats(**{name: weight})
    ranks = (2, 3) if rank is None else (rank,)
    if weight.ndim not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ValueError(f"{name} must have rank {wanted}, got {name}.shape={weight.shape}")


def _check_block_fp8(name: str, weight: BlockFP8) -> None:
    codes, scale = weight.codes, weight.scale
    _check_form(name, weight)
    if codes.dtype != jnp.float8_e4m3fn or codes.ndim < 2:
        raise ValueError(
            f"{name}.codes must be float8_e4m3fn[..., out, in], got {codes.dtype}"
            f"{list(codes.shape)}"
        )
    *lead, out, into = codes.shape
    if not isinstance(weight.block, int) or weight.block not in FP8_BLOCKS:
        raise ValueError(f"{name}.block must be one of {FP8_BLOCKS}, got {shown(weight.block)}")
    wanted = (*lead, pl.cdiv(out, weight.block), pl.cdiv(into, weight.block))
    if scale.shape != wanted or scale.dtype not in (jnp.uint8, jnp.float32):
        raise ValueError(
            f"{name}.scale must be uint8 or float32{list(wanted)}, got {scale.dtype}"
            f"{list(scale.shape)}"
        )


def _check_mxfp4(name: str, weight: MXFP4) -> None:
    codes, scale, size = weight.codes, weight.scale, weight.size
    _check_form(name, weight)
    if not isinstance(size, tuple) or len(size) != 2:
        raise ValueError(f"{name}.size must be (out, in), got {shown(size)}")
    if not isinstance(weight.row_group, int) or weight.row_group not in FP8_BLOCKS:
        raise ValueError(
            f"{name}.row_group must be one of {FP8_BLOCKS}, got {shown(weight.row_group)}"
        )
    out, into = (check_integer(f"{name}.size", n, 1) for n in size)
    tiles = pl.cdiv(out, ROWS), pl.cdiv(into, INPUTS)
    lead = codes.shape[:-4]
    for field, array, dtype, shape in (
        ("codes", codes, jnp.uint8, (*lead, *tiles, ROWS, INPUTS // 2)),
        ("scale", scale, jnp.int32, (*lead, *tiles, ROWS)),
    ):
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(
                f"{name}.{field} must be {jnp.dtype(dtype)}{list(shape)} for a size of {size}, got "
                f"{array.dtype}{list(array.shape)}"
            )


def _check_form(name: str, weight: BlockFP8 | MXFP4) -> None:
    check_arrays(**{f"{name}.codes": weight.codes, f"{name}.scale": weight.scale})
    check_float_dtype(f"{name}.dtype", weight.dtype)
    form = weight.activations
    if not isinstance(form, str) or form not in ACTIVATIONS:
        raise ValueError(f"{name}.activations must be one of {ACTIVATIONS}, got {shown(form)}")


def check_projection(name: str, weight: Any, shape: tuple[int, ...], letters: str) -> None:
    """A weight of exactly that shape; `letters` spell it in the error."""
    check_weight(name, weight, len(shape))
    if weight.shape != shape:
        raise ValueError(
            f"{name} must be [{letters}] = {list(shape)}, got {name}.shape={weight.shape}"
        )
