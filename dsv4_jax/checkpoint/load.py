"""Loads a checkpoint from safetensors."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.checkpoint.engram_tables import open_tables, warn_of_memory
from dsv4_jax.checkpoint.find import SHIPPED_CHECKPOINT as SHIPPED_CHECKPOINT
from dsv4_jax.checkpoint.finite import find_not_finite
from dsv4_jax.checkpoint.named_sources import Source
from dsv4_jax.checkpoint.names import Target, dotted_path, get_leaf
from dsv4_jax.checkpoint.problems import list_problems
from dsv4_jax.checkpoint.shards import ShardedStack
from dsv4_jax.checkpoint.sources import open_checkpoint
from dsv4_jax.checkpoint.spread import count_rounded, warn_of_rounded
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.released import quantized_shape
from dsv4_jax.model.shardings import param_shardings
from dsv4_jax.model.weight_forms import STORED, WEIGHT_FORMS, dtype_beside
from dsv4_jax.progress import Progress
from pallas_kernels.common.weights import MXFP4, BlockFP8, is_quantized, weight_bytes

_LARGE_BYTES = 2**26
"""Leaves up to this size are stacked on the host. JAX may keep such a stack until its next call."""
_HOST_SIZE = 2**22  # elements


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    mesh: jax.sharding.Mesh | None = None,
    weights: str = STORED,
    dtype: Any = None,
    progress: bool = True,
    check_weights: bool | None = None,
    follow_links: bool = False,
    drafts: bool = True,
) -> tuple[DSV4Config, DSV4Params]:
    """Reads a checkpoint directory.

    Files are memory-mapped and tensors read one at a time, so that the host holds no more than one
    stacked leaf beside what it has loaded. DeepSeek's names, those that transformers has in memory
    and those that it writes all load. On a mesh a process reads what its own devices hold.

    Args:
      path: directory with a `config.json` and safetensors, single or sharded with an index.
      mesh: devices that hold the parameters, as `param_shardings` has it, from `make_mesh`; None is
        the default device.
      weights: "stored" keeps the bytes of FP8 and FP4 weights, as `BlockFP8` and `MXFP4`;
        "bfloat16" and "float32" decode them.
      dtype: dtype of activations and of the weights that are dense; what the release has in f32
        stays f32. None is that of decoded weights, or else bf16.
      progress: shows a bar on stderr, or where that is no terminal a line now and then.
      check_weights: refuses weights that hold NaN or infinity in `dtype`, all of which are listed.
        None does so where the files have at most `finite.CHECKED_BYTES` (64 MiB) of tensors.
        Scales and codes of quantised weights are checked in any case.
      follow_links: reads files that are links out of the directory. Those of a snapshot in a
        Hugging Face cache lead to blobs of that cache and are followed anyway.
      drafts: loads the draft that the files hold, an MTP block or DSpark stages. False leaves it
        out, of whichever kind and however broken it is, and what `config.json` says of it.

    Returns:
      The config and the parameters. If the files hold no draft (`mtp.`) tensor at all, the config
      has no draft, whatever `config.json` says; of DSpark stages it has as many as the files. Draft
      tensors where `config.json` has none, or whose stages read layers that were cut off, and what
      belongs to images are left out, and a `LeftOutWarning` says so. A `RoundedWeightsWarning`
      names FP4 weights that a GPU's kernels round, and a `HostMemoryWarning` comes first where the
      host has less memory free than Engram tables take.

    Raises:
      FileNotFoundError: there is no config, or no safetensors file, or a shard is missing.
      ValueError: `path` is none, there are no such `weights`, or `dtype` is none of f32, bf16 and
        f16 or not that of decoded weights; a file is damaged, truncated or a link that is not
        followed, or the index names one outside of the directory; or tensors are missing,
        unexpected, there twice, misshapen, of a wrong dtype, damaged or not finite, or a kind of
        layer stores a weight in two formats. What is wrong with tensors is listed by kind, in ten
        lines at most, of their values what this process reads. Or weights are stored in a format
        that is not supported, config and files hold drafts of different kinds or numbers of stages,
        or a size does not divide over the mesh.
    """
    weights = WEIGHT_FORMS.check("weights", weights)
    keep, dtype = weights == STORED, dtype_beside(weights, dtype)
    directory = checks.path("path", path)
    opened = open_checkpoint(
        directory,
        dtype,
        keep=keep,
        check_weights=check_weights,
        follow_links=follow_links,
        drafts=checks.flag("drafts", drafts),
    )
    warn_of_memory(opened.tables)
    config, shapes, by_leaf = opened.config, opened.shapes, opened.by_leaf()
    problems: list[str] = []
    wanted = {
        leaf: _wanted(get_leaf(shapes, leaf), tensors[0][1], keep=keep)
        for leaf, tensors in by_leaf.items()
    }
    open_stack = _stack_opener(config, shapes, wanted, mesh)
    filled: dict[str, Any] = {}
    rounded: dict[str, int] = {}
    with Progress(len(opened.targets), unit="tensor", doing="loading", shown=progress) as bar:
        for leaf, tensors in by_leaf.items():
            stack = open_stack(leaf)
            for target, source in tensors:
                bar.add()
                if not stack.holds(target.index):
                    continue
                damage = list(opened.find_damage(source, target))
                if not damage and (opened.checks_values or not problems):
                    arrays = _read(source, stack.wanted, target, quiet=opened.checks_values)
                    if opened.checks_values and not is_quantized(stack.wanted):
                        damage = find_not_finite(source.label, *arrays)
                    if not (problems or damage):
                        stack.add(target.index, arrays)
                        if isinstance(stack.wanted, MXFP4):
                            rounded[source.label] = count_rounded(arrays[1], arrays[0])
                problems += damage
            filled[leaf] = jax.block_until_ready(stack.finish())
            del stack  # the next one must not come on top
    if problems:
        raise ValueError(list_problems(directory, problems))
    warn_of_rounded(rounded)
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    params = jax.tree.unflatten(treedef, [filled[dotted_path(path)] for path, _ in leaves])
    tables = open_tables(directory, config, opened.tables, follow_links=follow_links)
    return config, dataclasses.replace(params, engram=tables)


def _read(source: Source, wanted: Any, target: Target, *, quiet: bool) -> tuple[np.ndarray, ...]:
    """A tensor for a leaf like `wanted`: its values, or codes and scales as they are stored.

    NumPy warns of values that the dtype cannot hold, unless it is to be `quiet`.
    """
    if isinstance(wanted, BlockFP8 | MXFP4):
        return source.read(), source.read_scale()
    with np.errstate(over="ignore" if quiet else "warn"):
        values = source.decode().astype(wanted.dtype, copy=False)
    return (values.reshape(wanted.shape[len(target.index) :]),)


class _HostStack:
    """Fills a leaf on the host: nothing is compiled for it."""

    def __init__(self, wanted: Any, device: Any):
        self.wanted = wanted
        self._device = device
        self._stack = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), wanted)

    def holds(self, index: tuple[int, ...]) -> bool:
        del index
        return True

    def add(self, index: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> None:
        for stack, array in zip(jax.tree.leaves(self._stack), arrays, strict=True):
            stack[index] = array

    def finish(self) -> Any:
        return jax.device_put(self._stack, self._device)


class _DeviceStack:
    """Fills a leaf on the device, so that the host holds one tensor; MXFP4 is rearranged there."""

    def __init__(self, wanted: Any, device: Any):
        self.wanted = wanted
        self._stack = jax.tree.map(
            lambda leaf: _zeros(leaf.shape, _bits(leaf.dtype), device), wanted
        )

    def holds(self, index: tuple[int, ...]) -> bool:
        del index
        return True

    def add(self, index: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> None:
        bits = tuple(np.ascontiguousarray(array).view(_bits(array.dtype)) for array in arrays)
        self._stack = _put(self._stack, np.asarray(index, np.int32), bits)

    def finish(self) -> Any:
        def restore(bits: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
            return bits if bits.dtype == wanted.dtype else bits.view(wanted.dtype)

        return jax.tree.map(restore, self._stack, self.wanted)


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
    """Small ones of a CPU come from its memory, where JAX would compile a program for a shape."""
    if jax.default_backend() == "cpu" and math.prod(shape) <= _HOST_SIZE:
        return jax.device_put(np.zeros(shape, dtype), device)
    return jnp.zeros(shape, dtype, device=device)


def _bits(dtype: Any) -> Any:
    """U8 for E4M3, of which XLA converts a whole stack on a CPU to write one tensor."""
    return np.uint8 if dtype == jnp.float8_e4m3fn else dtype


def _wanted(shape: jax.ShapeDtypeStruct, source: Source, *, keep: bool) -> Any:
    """The shapes of a leaf whose tensors are stored like this one."""
    if not keep or source.weight_format is None:
        return shape
    return quantized_shape(
        source.weight_format,
        shape.shape,
        shape.dtype,
        scale_dtype=source.scale_dtype,
        block=source.block,
    )


def _open_stack(wanted: Any, device: Any = None) -> _HostStack | _DeviceStack:
    """What fills a leaf; on the default device if none is named."""
    on_device = isinstance(wanted, MXFP4) or weight_bytes(wanted) > _LARGE_BYTES
    return (_DeviceStack if on_device else _HostStack)(wanted, device)


def _stack_opener(
    config: DSV4Config, shapes: DSV4Params, wanted: dict[str, Any], mesh: jax.sharding.Mesh | None
) -> Callable[[str], _HostStack | _DeviceStack | ShardedStack]:
    """What opens the stack of a leaf, by its dotted path.

    Raises:
      ValueError: a size does not divide over the mesh, or the mesh has no devices.
    """
    if mesh is None:
        return lambda leaf: _open_stack(wanted[leaf])
    paths = [dotted_path(path) for path, _ in jax.tree.leaves_with_path(shapes)]
    whole = jax.tree.unflatten(jax.tree.structure(shapes), [wanted[path] for path in paths])
    shardings = param_shardings(config, mesh, whole)
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(f"mesh must have devices, as make_mesh gives it, got {mesh!r}")
    return lambda leaf: ShardedStack(wanted[leaf], get_leaf(shardings, leaf), _open_stack)


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: Any, index: jax.Array, arrays: tuple[jax.Array, ...]) -> Any:
    """Writes a tensor, as it is stored, into a stack."""
    if isinstance(stack, MXFP4):
        fields = {n: getattr(stack, n) for n in ("dtype", "activations", "row_group")}
        weight = MXFP4.from_stored(*arrays, **fields)
        arrays = tuple(jax.tree.leaves(weight))
    stacks, treedef = jax.tree.flatten(stack)
    indices = [index[i] for i in range(index.shape[0])]

    def write(stack: jax.Array, array: jax.Array) -> jax.Array:
        start = [*indices, *[0] * array.ndim]
        return jax.lax.dynamic_update_slice(stack, array[(None,) * len(indices)], start)

    return jax.tree.unflatten(treedef, map(write, stacks, arrays))
