"""Rows of stacked planes as bytes, on their way to the host and back, with checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.checks import (
    check_arrays,
    check_indices,
    check_list,
    check_rank,
    check_shape,
)
from pallas_kernels.pack_rows import reference, triton_gpu
from pallas_kernels.pack_rows.reference import plane_bytes

_PACK = {
    Backend.REFERENCE: reference.pack_rows,
    Backend.TRITON_GPU: triton_gpu.pack_rows,
}
_UNPACK = {
    Backend.REFERENCE: reference.unpack_rows,
    Backend.TRITON_GPU: triton_gpu.unpack_rows,
}
_SUM = {
    Backend.REFERENCE: reference.sum_rows,
    Backend.TRITON_GPU: triton_gpu.sum_rows,
}


def pack_rows(
    planes: Sequence[jax.Array], rows: jax.Array, *, backend: Backend | None = None
) -> tuple[jax.Array, jax.Array]:
    """Some rows of planes in one array, and the checksum of each, in one launch.

    A row is what all planes hold at one place of their second axis. Its bytes lie one plane after
    the other, layer after layer and without padding:

        row     plane 0: layer 0, layer 1, ..   plane 1: layer 0, ..   ..

    In plain JAX, of rows that are there:

        taken = [jnp.moveaxis(plane[:, rows], 1, 0) for plane in planes]     # [n, L, ...]
        bits = [jax.lax.bitcast_convert_type(x, jnp.uint8) for x in taken]   # [n, L, .., bytes]
        packed = jnp.concatenate([x.reshape(len(rows), -1) for x in bits], axis=1)

    Args:
      planes: [L, A, ...] each, of elements of 1, 2 or 4 bytes; L and what follows A may differ.
      rows: i32[n], places on A; of one outside 0 .. A - 1, as -1, the row is zeros.
      backend: implementation to use; None picks the fastest one that runs here. All give the same
        bits.

    Returns:
      u8[n, m], m the bytes of a row, and u32[n, 2], their checksums as `sum_rows` has them.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not for these planes.
    """
    _check_planes(planes)
    check_arrays(rows=rows)
    check_rank(1, rows=rows)
    check_indices(rows=rows)
    implementation = resolve(
        "pack_rows",
        backend,
        _PACK,
        obstacle=triton_gpu.find_obstacle(planes),
        arguments=_named(planes),
    )
    return implementation(*jax_arrays(list(planes), rows))


def unpack_rows(
    planes: Sequence[jax.Array],
    rows: jax.Array,
    packed: jax.Array,
    *,
    backend: Backend | None = None,
) -> list[jax.Array]:
    """Planes with rows in them that `pack_rows` took, of planes of the same shapes but for A.

    What the rows do not name keeps its content, and where the caller's jit donates the planes, it
    is not touched. In plain JAX, of planes of bytes and rows that are all there:

        widths = [plane[:, 0].size for plane in planes]
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]
        parts = jnp.split(packed, ends[:-1], axis=1)
        values = [
            jnp.moveaxis(part.reshape(len(rows), len(plane), *plane.shape[2:]), 0, 1)
            for part, plane in zip(parts, planes)
        ]
        written = [plane.at[:, rows].set(value) for plane, value in zip(planes, values)]

    Args:
      planes: [L, A, ...] each, of elements of 1, 2 or 4 bytes; L and what follows A may differ.
      rows: i32[n], places on A, none twice; one outside 0 .. A - 1, as -1, writes nothing.
      packed: u8[n, m], m the bytes of a row.
      backend: implementation to use; None picks the fastest one that runs here. All give the same
        bits.

    Returns:
      The planes.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not for these planes.
    """
    _check_planes(planes)
    check_arrays(rows=rows, packed=packed)
    check_rank(1, rows=rows)
    check_indices(rows=rows)
    _check_bytes(packed)
    width = sum(map(plane_bytes, planes))
    check_shape("packed", packed, (rows.shape[0], width), "n, bytes of a row")
    implementation = resolve(
        "unpack_rows",
        backend,
        _UNPACK,
        obstacle=triton_gpu.find_obstacle(planes),
        arguments=_named(planes),
    )
    return implementation(*jax_arrays(list(planes), rows, packed))


def sum_rows(packed: jax.Array, *, backend: Backend | None = None) -> jax.Array:
    """The checksum of each row of bytes: 64 bits, against damage by accident.

    In plain JAX, of rows of whole words:

        words = jax.lax.bitcast_convert_type(packed.reshape(len(packed), -1, 4), jnp.uint32)
        place, sums = jnp.arange(1, words.shape[1] + 1, dtype=jnp.uint32), []
        for factor in (0x9E3779B1, 0x85EBCA77):
            bits = words ^ (place * jnp.uint32(factor))
            bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
            bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
            sums.append(jnp.sum(bits ^ (bits >> 16), axis=1, dtype=jnp.uint32))
        sums = jnp.stack(sums, axis=1)

    Args:
      packed: u8[n, m].
      backend: implementation to use; None picks the fastest one that runs here. All give the same
        bits.

    Returns:
      u32[n, 2]: of the row's little-endian u32 words w_i, padded with zeros, the sums of
      mix(w_i ^ (i + 1) f), for two factors f; mix is MurmurHash3's last step.

    Raises:
      ValueError: it is no such array.
      NotImplementedError: the named backend can't run here, or not for rows of this width.
    """
    check_rank(2, packed=packed)
    _check_bytes(packed)
    implementation = resolve(
        "sum_rows",
        backend,
        _SUM,
        obstacle=triton_gpu.find_obstacle_of_width(packed.shape[1]),
        arguments={"packed": packed},
    )
    return implementation(jax_arrays(packed))


def _check_planes(planes: Sequence[jax.Array]) -> None:
    check_list("planes", planes, of="arrays [L, A, ...]")
    named = _named(planes)
    check_arrays(**named)
    for name, plane in named.items():
        if plane.ndim < 2:
            raise ValueError(f"{name} must have rank 2 or more, got {name}.shape={plane.shape}")
        if not jnp.issubdtype(plane.dtype, jnp.number) or plane.dtype.itemsize not in (1, 2, 4):
            raise ValueError(
                f"{name} must hold numbers of 1, 2 or 4 bytes, got {plane.dtype}; pass bool as "
                "uint8, and numbers of 8 bytes as two of 4"
            )
    if len({plane.shape[1] for plane in planes}) > 1:
        shapes = ", ".join(f"{name}.shape={plane.shape}" for name, plane in named.items())
        raise ValueError(f"planes must agree on A, their second axis, got {shapes}")


def _check_bytes(packed: jax.Array) -> None:
    if packed.dtype != jnp.uint8:
        raise ValueError(f"packed must be uint8, got {packed.dtype}")


def _named(planes: Sequence[jax.Array]) -> Mapping[str, jax.Array]:
    return {f"planes[{number}]": plane for number, plane in enumerate(planes)}
