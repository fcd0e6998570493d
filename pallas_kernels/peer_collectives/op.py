"""Collectives over one axis of a mesh, by kernels where its devices have peer buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.backend import Backend, resolve
from pallas_kernels.common.checks import check_arrays, check_indices, check_rank
from pallas_kernels.common.pending import MaybeSplit, SplitSums, finish
from pallas_kernels.peer_collectives import reference, triton_gpu
from pallas_kernels.peer_collectives.buffer import LINE_BYTES, MAX_DEVICES, PeerLayout

_BROADCAST_BYTES = 3 << 19
"""Two launches take less time than one that would send so much more."""


def all_reduce(
    x: MaybeSplit,
    axis_name: str,
    *,
    plus: MaybeSplit | None = None,
    buffer: jax.Array | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """The sum of all devices of an axis, on each of them; inside `shard_map`.

    Parts are added in f32, in the order of the devices, and rounded once. So a row gets the same
    bits wherever it lies, and with either backend.

    In plain JAX:

        total = jax.lax.psum(x if plus is None else x + plus, axis_name)

    Args:
      x: [T, ...], or the parts that a product left of it; the kernel takes bf16, in whole lines of
        16 bytes.
      axis_name: the axis, of two devices or more; the kernel takes up to 8.
      plus: as `x`; what the device adds to it first, in f32, and rounds. None is nothing.
      buffer: i32[words], this device's peer buffer; see `buffer.py`, which says in what order
        collectives may go through it. None, or more than it can hold, is the reference.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      [T, ...].

    Raises:
      ValueError: `plus` is not as `x`, or the buffer has another size than one of this axis can
        have.
      NotImplementedError: the named backend can't run here.
    """
    _check_terms(x, plus)
    devices, num_bytes = _count_devices(axis_name), math.prod(x.shape) * x.dtype.itemsize
    more = num_bytes * (devices - 1) * (devices - 2) // devices
    parts = devices if more > _BROADCAST_BYTES and num_bytes % (devices * LINE_BYTES) == 0 else 1
    layout = _find_layout("all_reduce", x.dtype, num_bytes // parts, devices, buffer, backend)
    terms = [x] if plus is None else [x, plus]
    if layout is None or buffer is None:
        return reference.all_reduce(_sum_here(terms), axis_name)
    total = triton_gpu.add_up([term.reshape(parts, -1) for term in terms], buffer, layout)
    if parts > 1:
        [total] = triton_gpu.exchange([total[None]], buffer, layout)
    return total.reshape(x.shape)


def reduce_scatter(
    x: MaybeSplit,
    axis_name: str,
    *,
    plus: MaybeSplit | None = None,
    buffer: jax.Array | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """The sum of all devices of their parts for this one; inside `shard_map`.

    Parts are added as by `all_reduce`.

    In plain JAX:

        total = jax.lax.psum_scatter(x if plus is None else x + plus, axis_name)

    Args:
      x: [devices, ...], a part for each device of the axis, or what a product left of that; the
        kernel takes bf16, in whole lines of 16 bytes a part.
      axis_name: the axis.
      plus: as of `all_reduce`.
      buffer: as of `all_reduce`.
      backend: as of `all_reduce`.

    Returns:
      [...], without the first axis.

    Raises:
      ValueError: `x` has no part for each device, `plus` is not as `x`, or the buffer has another
        size.
      NotImplementedError: the named backend can't run here.
    """
    _check_terms(x, plus)
    sent, devices = _check_parts(x, axis_name), x.shape[0]
    layout = _find_layout("reduce_scatter", x.dtype, sent, devices, buffer, backend)
    terms = [x] if plus is None else [x, plus]
    if layout is None or buffer is None:
        return reference.reduce_scatter(_sum_here(terms), axis_name)
    rows = [term.reshape(devices, -1) for term in terms]
    return triton_gpu.add_up(rows, buffer, layout).reshape(x.shape[1:])


def all_gather(
    *arrays: jax.Array,
    axis_name: str,
    buffer: jax.Array | None = None,
    backend: Backend | None = None,
) -> tuple[jax.Array, ...]:
    """What all devices of an axis have, in their order, in one collective; inside `shard_map`.

    In plain JAX:

        gathered = tuple(jax.lax.all_gather(x, axis_name) for x in arrays)

    Args:
      *arrays: [T, ...] each, of 8, 16 or 32 bits. The kernel takes those of 16 and 32, and is given
        zeros behind what is no whole line of 16 bytes. It changes a bit of 32 that are EMPTY
        (`buffer.py`), a NaN.
      axis_name: the axis.
      buffer: as of `all_reduce`.
      backend: as of `all_reduce`.

    Returns:
      [devices, T, ...] each.

    Raises:
      ValueError: the buffer has another size.
      NotImplementedError: the named backend can't run here.
    """
    devices = _count_devices(axis_name)
    if not arrays:
        raise ValueError("arrays must be one or more, got none")
    check_arrays(**{f"arrays[{number}]": array for number, array in enumerate(arrays)})
    # What is gathered need not be whole lines; it is filled up, and cut off again.
    sizes = [pl.cdiv(x.nbytes, LINE_BYTES) * LINE_BYTES for x in arrays]
    layouts = [
        _find_layout("all_gather", x.dtype, size, devices, buffer, backend)
        for x, size in zip(arrays, sizes, strict=True)
    ]
    lines = sum(map(triton_gpu.num_lines, sizes))
    layout = layouts[0]
    if buffer is None or layout is None or None in layouts or lines > layout.lines:
        return reference.all_gather(*arrays, axis_name=axis_name)
    found = triton_gpu.exchange([_in_whole_lines(x) for x in arrays], buffer, layout)
    return tuple(
        every[:, : x.size].reshape(devices, *x.shape)
        for every, x in zip(found, arrays, strict=True)
    )


def all_to_all(
    x: jax.Array,
    axis_name: str,
    *,
    buffer: jax.Array | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """What each device of an axis has for this one; inside `shard_map`.

    In plain JAX:

        found = jax.lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0)

    Args:
      x: [devices, ...], a part for each device; the kernel takes what that of `all_gather` does.
      axis_name: the axis.
      buffer: as of `all_reduce`.
      backend: as of `all_reduce`.

    Returns:
      [devices, ...], in the order of the devices.

    Raises:
      ValueError: `x` has no part for each device, or the buffer has another size.
      NotImplementedError: the named backend can't run here.
    """
    check_arrays(x=x)
    sent = _check_parts(x, axis_name)
    devices = x.shape[0]
    layout = _find_layout("all_to_all", x.dtype, sent, devices, buffer, backend)
    if layout is None or buffer is None:
        return reference.all_to_all(x, axis_name)
    [found] = triton_gpu.exchange([x.reshape(devices, -1)], buffer, layout)
    return found.reshape(x.shape)


def _in_whole_lines(x: jax.Array) -> jax.Array:
    """[1, N], the elements in lines of 16 bytes, the last one filled up with zeros."""
    return jnp.pad(x.reshape(1, -1), ((0, 0), (0, -x.size % (LINE_BYTES // x.dtype.itemsize))))


def _check_parts(x: MaybeSplit, axis_name: str) -> int:
    """Bytes of a part."""
    devices = _count_devices(axis_name)
    if not x.shape or x.shape[0] != devices:
        raise ValueError(
            f"x must be [{devices}, ...], a part for each device on {axis_name!r}, got {x.shape}"
        )
    return math.prod(x.shape) * x.dtype.itemsize // devices


def _count_devices(axis_name: str) -> int:
    """Devices of the axis."""
    try:
        if isinstance(axis_name, str):
            return jax.lax.axis_size(axis_name)
    except NameError:  # which JAX says of an axis that is none
        pass
    raise ValueError(
        f"axis_name must be an axis of the mesh over which a shard_map runs here, got {axis_name!r}"
    )


def _check_terms(x: MaybeSplit, plus: MaybeSplit | None) -> None:
    for name, term in (("x", x), ("plus", plus)):
        if not isinstance(term, SplitSums) and (term is not None or name == "x"):
            check_arrays(**{name: term})
    if plus is not None and (plus.shape, plus.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"plus must be {x.dtype}{list(x.shape)} as x, got {plus.dtype}{list(plus.shape)}"
        )


def _sum_here(terms: Sequence[MaybeSplit]) -> jax.Array:
    """What this device adds up before it sends."""
    first, *others = map(finish, terms)
    return sum(others, first)


def _find_layout(
    op: str,
    dtype: jnp.dtype,
    sent_bytes: int,
    devices: int,
    buffer: jax.Array | None,
    backend: Backend | None,
) -> PeerLayout | None:
    """The layout of the buffers through which the kernel goes; None is the reference."""
    layout, obstacle = None, "needs a peer buffer"
    if buffer is not None:
        check_rank(1, buffer=buffer)
        check_indices(buffer=buffer)
    if devices > MAX_DEVICES:
        obstacle = f"takes up to {MAX_DEVICES} devices, got {devices}"
    elif buffer is not None:
        layout = PeerLayout.of(devices, buffer.size)
        obstacle = _obstacle(dtype, sent_bytes, layout, adds="reduce" in op)
    if backend is None and obstacle is not None:  # NCCL is the choice there, and no way out
        return None
    choices = {Backend.REFERENCE: lambda: None, Backend.TRITON_GPU: lambda: layout}
    return resolve(op, backend, choices, obstacle=obstacle)()


def _obstacle(dtype: jnp.dtype, sent_bytes: int, layout: PeerLayout, *, adds: bool) -> str | None:
    if adds and dtype != jnp.bfloat16:
        return f"adds bfloat16, got {dtype}"
    if dtype.itemsize not in (2, 4):
        return f"takes elements of 16 and 32 bits, got {dtype}"
    if sent_bytes % LINE_BYTES or not 0 < sent_bytes <= layout.slot_bytes:
        return (
            f"sends a multiple of {LINE_BYTES} bytes up to {layout.slot_bytes} to each device, got "
            f"{sent_bytes}"
        )
    return None
