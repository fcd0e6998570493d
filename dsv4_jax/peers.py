"""Peer buffers of a mesh: memory of each device into which the others write.

Collectives of a few rows are kernels that exchange them through it (`pallas_kernels/
peer_collectives`), so that a CUDA graph holds all of a step and the host launches none of them. A
buffer belongs to one axis of one mesh, and its first words are addresses; so it must stay where it
was made. Programs that use it must reach all devices in one order, as with NCCL.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dsv4_jax.mesh import AXES, BY_DEVICE, DATA, MODEL, AnyMesh, mesh_sizes
from pallas_kernels.common.backend import FallbackWarning
from pallas_kernels.peer_collectives.buffer import EMPTY, MAX_DEVICES, PeerLayout

VARIABLE = "DSV4_JAX_PEER_BUFFERS"
"""Environment variable; 0 leaves all collectives to NCCL."""
_ALLOCATORS = ("", "default", "bfc")
_HERE: contextvars.ContextVar[PeerBuffers | None] = contextvars.ContextVar("peers", default=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PeerBuffers:
    """The peer buffers of a mesh, one a device for each axis of several devices.

    Attributes:
      data: i32[devices, words] of the axis `data`, or None.
      model: those of the axis `model`, or None.
    """

    data: jax.Array | None = None
    model: jax.Array | None = None


def make_peer_buffers(mesh: Mesh) -> PeerBuffers | None:
    """Allocates them: on each device 18 MiB for an axis of two devices, 69 for one of eight.

    They need NVIDIA GPUs of one host that reach each other's memory, all of this process, and
    memory from JAX's default allocator. Where there are GPUs and one of that is missing, a
    `FallbackWarning` says which, and collectives are NCCL's.

    Args:
      mesh: from `make_mesh`.

    Returns:
      The buffers; None where collectives are NCCL's, and without GPUs.
    """
    sizes = dict(zip(AXES, mesh_sizes(mesh), strict=True))
    on_gpus = mesh.devices.flat[0].platform in ("gpu", "cuda")
    if not on_gpus or mesh.size == 1 or os.environ.get(VARIABLE) == "0":
        return None
    if obstacle := _find_obstacle(mesh):
        text = f"collectives of this mesh are NCCL's, which is slower for few rows: {obstacle}"
        warnings.warn(text, FallbackWarning, stacklevel=2)
        return None
    return PeerBuffers(**{axis: _allocate(mesh, axis) for axis in AXES if sizes[axis] > 1})


def peer_buffer_shapes(mesh: AnyMesh) -> PeerBuffers:
    """What `make_peer_buffers` gives on GPUs, as `jax.ShapeDtypeStruct`s that lie there."""
    where = NamedSharding(mesh, BY_DEVICE)
    shapes = {
        axis: jax.ShapeDtypeStruct(
            (mesh.size, PeerLayout(size).num_words), jnp.int32, sharding=where
        )
        for axis, size in zip(AXES, mesh_sizes(mesh), strict=True)
        if size > 1
    }
    return PeerBuffers(**shapes)  # type: ignore[arg-type]


def _find_obstacle(mesh: Mesh) -> str | None:
    if len(mesh.local_devices) < mesh.size:
        return "its devices lie in several processes"
    if max(mesh_sizes(mesh)) > MAX_DEVICES:
        return f"an axis may have {MAX_DEVICES} devices, got {mesh_sizes(mesh)}"
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower()
    if allocator not in _ALLOCATORS:
        return f"devices may not reach memory of XLA_PYTHON_CLIENT_ALLOCATOR={allocator}"
    if "xla_gpu_command_buffer_update_mode=SKIP" in os.environ.get("XLA_FLAGS", ""):
        return "devices may not reach memory of the allocator that XLA_FLAGS asks for"
    return _find_unreachable([device.local_hardware_id for device in mesh.devices.flat])


def _find_unreachable(ordinals: list[int]) -> str | None:
    """Two GPUs of which one can't reach the other's memory; None if all can."""
    cuda = ctypes.CDLL("libcuda.so.1")
    handles = {}
    for ordinal in ordinals:
        handle = ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(handle), ordinal):
            return f"the driver knows no GPU {ordinal}"
        handles[ordinal] = handle
    for one in ordinals:
        for other in ordinals:
            reaches = ctypes.c_int(1)
            if one != other:
                cuda.cuDeviceCanAccessPeer(ctypes.byref(reaches), handles[one], handles[other])
            if not reaches.value:
                return f"GPU {one} can't reach the memory of GPU {other}"
    return None


def _allocate(mesh: Mesh, axis: str) -> jax.Array:
    """The buffers of an axis, i32[devices, words], with their headers."""
    devices = list(mesh.devices.flat)
    layout = PeerLayout(mesh.shape[axis])
    where = NamedSharding(mesh, BY_DEVICE)

    @functools.partial(jax.jit, out_shardings=where)
    def make() -> jax.Array:
        is_slot = jnp.arange(layout.num_words) >= layout.first_slot_word
        row = jnp.where(is_slot, EMPTY, 0).astype(jnp.int32)
        return jnp.broadcast_to(row, (len(devices), layout.num_words))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=where)
    def write(buffers: jax.Array, headers: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(buffers, headers, (0, 0))

    buffers = make()
    addresses = _addresses(buffers)
    headers: list[np.ndarray] = [np.empty(0)] * len(devices)
    lines = np.moveaxis(mesh.devices, AXES.index(axis), -1).reshape(-1, layout.devices)
    for line in lines:
        for place, device in enumerate(line):
            at = [addresses[peer] for peer in line]
            headers[devices.index(device)] = layout.header(place, at)
    buffers = write(buffers, jax.device_put(np.stack(headers), where))
    if _addresses(buffers) != addresses:
        raise RuntimeError("XLA moved the peer buffers; set DSV4_JAX_PEER_BUFFERS=0")
    return jax.block_until_ready(buffers)


def _addresses(buffers: jax.Array) -> dict[Any, int]:
    return {part.device: part.data.unsafe_buffer_pointer() for part in buffers.addressable_shards}


@contextlib.contextmanager
def using(peers: PeerBuffers | None) -> Iterator[None]:
    """Collectives traced inside go through these buffers; on a device of a mesh."""
    token = _HERE.set(peers)
    try:
        yield
    finally:
        _HERE.reset(token)


def own_buffer(axis: str) -> jax.Array | None:
    """i32[words], this device's buffer of an axis, where collectives go through one."""
    peers = _HERE.get()
    found = None if peers is None else {DATA: peers.data, MODEL: peers.model}[axis]
    return None if found is None else found[0]
