"""Peer buffers of a mesh: memory of each device into which the others write.

Collectives of a few rows are kernels that exchange them through it (`pallas_kernels/
peer_collectives`), so that a CUDA graph holds all of a step and the host launches none of them. A
buffer belongs to one axis of one mesh, and its first words are addresses; so it must stay where it
was made. Programs that use it must reach all devices in one order, as with NCCL.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dsv4_jax import peer_memory
from dsv4_jax.mesh import AXES, BY_DEVICE, DATA, MODEL, AnyMesh, fetch, mesh_sizes
from dsv4_jax.peer_memory import PeerMemory
from pallas_kernels.common.backend import FallbackWarning
from pallas_kernels.peer_collectives.buffer import EMPTY, MAX_DEVICES, PeerLayout

VARIABLE = "DSV4_JAX_PEER_BUFFERS"
"""Environment variable; 0 leaves all collectives to NCCL."""
_CHOICES = ("", "0")
_TEXT_BYTES = 256
_HERE: contextvars.ContextVar[PeerBuffers | None] = contextvars.ContextVar("peers", default=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PeerBuffers:
    """The peer buffers of a mesh, one a device for each axis of several devices.

    They hold their own addresses. So a copy of one goes through the original, as long as that is in
    memory: another mesh needs buffers of its own.

    Attributes:
      data: i32[devices, words] of the axis `data`, or None.
      model: those of the axis `model`, or None.
    """

    data: jax.Array | None = None
    model: jax.Array | None = None


def make_peer_buffers(mesh: Mesh) -> PeerBuffers | None:
    """Allocates them: on each device 18 MiB for an axis of two devices, 69 for one of eight.

    They need NVIDIA GPUs of one host that reach each other's memory, in one process or several.
    Where there are GPUs and an axis can't have buffers, a `FallbackWarning` says why, and its
    collectives are NCCL's. The memory is the driver's, beside what JAX takes for itself. All
    processes of the mesh call this.

    Args:
      mesh: from `make_mesh`.

    Returns:
      The buffers; None where all collectives are NCCL's, and without GPUs.

    Raises:
      ValueError: the variable is something else.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in _CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {list(_CHOICES)}, or not set, got {chosen!r}")
    if mesh.devices.flat[0].platform not in ("gpu", "cuda") or chosen == "0":
        return None
    sizes = dict(zip(AXES, mesh_sizes(mesh), strict=True))
    axes = [axis for axis in AXES if sizes[axis] > 1]
    hosts = _hosts(mesh) if axes else {}
    buffers = {}
    for axis in axes:
        try:
            _raise_of_any_process(mesh, _find_obstacle(mesh, axis, hosts))
            buffers[axis] = _allocate(mesh, axis)
        except _ObstacleError as obstacle:
            text = f"collectives over {axis!r} are NCCL's, slower for few rows: {obstacle}"
            warnings.warn(text, FallbackWarning, stacklevel=2)
    return PeerBuffers(**buffers) if buffers else None


def peer_buffer_shapes(mesh: AnyMesh) -> PeerBuffers:
    """What `make_peer_buffers` gives on GPUs, each a `jax.ShapeDtypeStruct` that lies there."""
    where = NamedSharding(mesh, BY_DEVICE)
    shapes = {
        axis: jax.ShapeDtypeStruct(
            (mesh.size, PeerLayout(size).num_words), jnp.int32, sharding=where
        )
        for axis, size in zip(AXES, mesh_sizes(mesh), strict=True)
        if size > 1
    }
    return PeerBuffers(**shapes)  # type: ignore[arg-type]


def _tell_all(mesh: Mesh, what: Callable[[Any], bytes]) -> dict[Any, bytes]:
    """{device: what its own process has for it}, in every process; all of one length."""
    devices = list(mesh.devices.flat)
    if len(mesh.local_devices) == mesh.size:
        return {device: what(device) for device in devices}
    mine = {device: np.frombuffer(what(device), np.uint8) for device in mesh.local_devices}
    (length,) = {len(row) for row in mine.values()}

    def row_of(part: Any) -> np.ndarray:
        return mine[devices[part[0].start]][None]

    where = NamedSharding(mesh, BY_DEVICE)
    rows = fetch(jax.make_array_from_callback((mesh.size, length), where, row_of))
    return {device: row.tobytes() for device, row in zip(devices, rows, strict=True)}


def _hosts(mesh: Mesh) -> dict[int, bytes]:
    """{process: a digest of its host's name}."""
    mine = hashlib.sha256(peer_memory.host_name().encode()).digest()
    return {device.process_index: name for device, name in _tell_all(mesh, lambda _: mine).items()}


class _ObstacleError(Exception):
    """Why an axis can have no buffers; every process of the mesh raises it."""


def _raise_of_any_process(mesh: Mesh, obstacle: str | None) -> None:
    """Raises the obstacle of the first process that has one, on all of them."""
    mine = (obstacle or "").encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    texts = [text.rstrip(b"\0") for text in _tell_all(mesh, lambda _: mine).values()]
    for text in filter(None, texts):
        raise _ObstacleError(text.decode(errors="ignore"))


def _attempt[Result](mesh: Mesh, run: Callable[[], Result]) -> Result:
    """What it returns; where the driver refuses it to some process, all raise that."""
    try:
        result = run()
    except RuntimeError as error:
        _raise_of_any_process(mesh, str(error) or type(error).__name__)
        raise
    _raise_of_any_process(mesh, None)
    return result


def _lines(mesh: Mesh, axis: str) -> np.ndarray:
    """Devices that differ in their place on the axis alone: [lines, n]."""
    return np.moveaxis(mesh.devices, AXES.index(axis), -1).reshape(-1, mesh.shape[axis])


def _find_obstacle(mesh: Mesh, axis: str, hosts: dict[int, bytes]) -> str | None:
    """Why an axis can have no buffers, as this process sees it; None if it can."""
    for line in _lines(mesh, axis):
        if len({hosts[device.process_index] for device in line}) > 1:
            return "its devices lie on several hosts"
    if mesh.shape[axis] > MAX_DEVICES:
        return f"an axis may have {MAX_DEVICES} devices, got {mesh.shape[axis]}"
    return peer_memory.find_unreachable([d.local_hardware_id for d in mesh.local_devices])


def _allocate(mesh: Mesh, axis: str) -> jax.Array:
    """The buffers of an axis, i32[devices, words], with their headers."""
    layout, where = PeerLayout(mesh.shape[axis]), NamedSharding(mesh, BY_DEVICE)
    here = {device: device.local_hardware_id for device in mesh.local_devices}
    lines = _lines(mesh, axis)

    def make() -> dict[Any, PeerMemory]:
        own = {device: PeerMemory(layout.num_words, number) for device, number in here.items()}
        peer_memory.let_reach(list(here.values()))
        for memory in own.values():
            memory.fill(EMPTY, layout.first_slot_word)
        return own

    def share() -> dict[Any, bytes]:
        return {device: memory.share() for device, memory in own.items()}

    def write_headers() -> list[jax.Array]:
        for line in lines:
            for rank, device in enumerate(line):
                if device in own:
                    at = [_reach(device, peer, own, shared) for peer in line]
                    own[device].write(layout.header(rank, at))
        return [memory.to_array() for memory in own.values()]

    own, shared = _attempt(mesh, make), {}
    if any(device.process_index != line[0].process_index for line in lines for device in line):
        shared = _tell_all(mesh, _attempt(mesh, share).__getitem__)
    parts = _attempt(mesh, write_headers)  # none sends before all headers are there
    return jax.make_array_from_single_device_arrays((mesh.size, layout.num_words), where, parts)


def _reach(device: Any, peer: Any, own: dict[Any, PeerMemory], shared: dict[Any, bytes]) -> int:
    """The address at which a device of this process reaches a peer's buffer."""
    if peer in own:
        return own[peer].address
    return peer_memory.open_shared(shared[peer], device.local_hardware_id)


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
