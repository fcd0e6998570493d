"""What a command is about to allocate, compared with what there is before it does."""

from __future__ import annotations

import math
import pathlib
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dsv4_jax.bench.engine_bytes import engine_bytes
from dsv4_jax.bench.placement import place
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.checkpoint.files import list_by_file
from dsv4_jax.checkpoint.inventory import read_inventory
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import mesh_sizes
from dsv4_jax.model.params import param_shapes
from dsv4_jax.model.weight_forms import STORED
from dsv4_jax.runtime import find_memory, shown_bytes
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.standard_streams import say

HOST_BYTES = 2**30
"""What XLA takes of a host to compile and run steps on a CPU."""


def check_memory(needs: dict[str, int], way_out: str, *, told: bool = True) -> None:
    """Says on stderr what is needed, or refuses; to be called before anything is allocated.

    Args:
      needs: {what for: bytes}.
      way_out: what takes less, as the rest of "take ...".
      told: whether it is said even if it fits.

    Raises:
      MemoryError: it is more than the device has free, or without one the host.
    """
    memory = find_memory()
    if memory is not None and memory.is_host:
        needs = needs | {"XLA": HOST_BYTES}
    needed = sum(needs.values())
    listed = ", ".join(f"{name} {shown_bytes(count)}" for name, count in needs.items())
    if memory is None:
        return  # nobody says what there is
    free, total = shown_bytes(memory.free_bytes), shown_bytes(memory.total_bytes)
    if needed > memory.free_bytes:
        raise MemoryError(
            f"needs {shown_bytes(needed)} ({listed}), and {memory.name} has {free} of {total} "
            f"free; take {way_out}"
        )
    if told:
        say(f"[needs {shown_bytes(needed)} ({listed}); {memory.name} has {free} of {total} free]")


class Loading(NamedTuple):
    """A checkpoint that is to be loaded.

    Attributes:
      checkpoint: the directory.
      dtype: dtype of dense weights.
      weights: as of `load_checkpoint`.
      follow_links: as of `load_checkpoint`.
      drafts: as of `load_checkpoint`.
    """

    checkpoint: pathlib.Path
    dtype: DTypeLike
    weights: str = STORED
    follow_links: bool = False
    drafts: bool = True


def check_engine_memory(
    config: DSV4Config, options: EngineOptions, loading: Loading, *, way_out: str
) -> None:
    """Does the same for a checkpoint that is to be loaded and an engine for it.

    What one device of the mesh takes is compared, or on CPUs, which share the host's memory, what
    those of this process take.

    Args:
      config: of what is loaded; its draft has a cache if it has one.
      options: those of the engine.
      loading: the checkpoint.
      way_out: as of `check_memory`.

    Raises:
      MemoryError: it does not fit.
      ValueError: a file of the checkpoint cannot be read, or steps cannot have such sizes.
    """
    checkpoint, weights, follow_links = loading.checkpoint, loading.weights, loading.follow_links
    if weights == STORED:
        count = stored_bytes(
            checkpoint, loading.dtype, follow_links=follow_links, drafts=loading.drafts
        )
    else:
        count = tree_bytes(param_shapes(config, loading.dtype))
    mesh = options.mesh
    data, model = (1, 1) if mesh is None else mesh_sizes(mesh)
    needs = {"weights": count} | engine_bytes(config, options, data=data, model=model).needs
    if mesh is not None:
        is_stored = weights == STORED and _has_codes(checkpoint, follow_links=follow_links)
        form = STORED if is_stored else np.dtype(loading.dtype).name
        needs["weights"] = int(count * weight_share(config, mesh, weights=form))
        if jax.default_backend() == "cpu":
            needs = {name: each * len(mesh.local_devices) for name, each in needs.items()}
    of_host = options.host_cache_bytes  # "auto" is a part of what is left
    if isinstance(of_host, int) and of_host and jax.default_backend() == "cpu":
        needs["prefixes on the host"] = of_host
    check_memory(needs, way_out)


def weight_share(config: DSV4Config, mesh: Mesh, *, weights: str) -> float:
    """The part of all bytes of parameters, as of `param_shapes`, that a device of a mesh holds."""

    def count(data: int, model: int) -> int:
        placed = place(config, data=data, model=model, gpu_bytes=0, context=1, weights=weights)
        return placed.weight_bytes

    return count(*mesh_sizes(mesh)) / count(1, 1)


def _has_codes(checkpoint: pathlib.Path, *, follow_links: bool) -> bool:
    """Whether some tensor is quantised, as the release's are."""
    files = list_by_file(checkpoint, follow_links=follow_links)
    return any(tensor.dtype.itemsize == 1 for tensors in files for tensor in tensors.values())


def check_weights_memory(checkpoint: pathlib.Path, dtype: DTypeLike, *, follow_links: bool) -> None:
    """Does the same for a checkpoint's trunk alone, beside which little else is allocated.

    Raises:
      MemoryError: it does not fit.
      ValueError: a file of the checkpoint cannot be read.
    """
    count = stored_bytes(checkpoint, dtype, follow_links=follow_links, drafts=False)
    needs = {"weights": count}
    check_memory(needs, "a smaller checkpoint or a larger device")


def stored_bytes(
    checkpoint: pathlib.Path, dtype: DTypeLike, *, follow_links: bool, drafts: bool
) -> int:
    """Bytes of a checkpoint's tensors once they are loaded.

    Those in floating point are in `dtype`, but for parameters that are f32 in any case.
    """
    size = np.dtype(dtype).itemsize
    inventory = read_inventory(checkpoint, follow_links=follow_links, drafts=drafts)
    dense = jax.tree.leaves(param_shapes(inventory.config, dtype))
    total = sum((4 - size) * leaf.size for leaf in dense if leaf.dtype == np.float32)
    for tensor in inventory.loaded.values():
        is_dense = tensor.dtype.itemsize > 1 and not np.issubdtype(tensor.dtype, np.integer)
        each = size if is_dense else min(tensor.dtype.itemsize, 4)
        total += math.prod(tensor.shape) * each
    return total


def largest_tensor_bytes(checkpoint: pathlib.Path, *, follow_links: bool) -> int:
    """Bytes of a checkpoint's largest tensor in f32."""
    return 4 * max(
        (
            math.prod(tensor.shape) * (2 if tensor.dtype.itemsize == 1 else 1)  # FP4 in pairs
            for tensors in list_by_file(checkpoint, follow_links=follow_links)
            for tensor in tensors.values()
        ),
        default=0,
    )
