"""The mesh of devices that a step runs on: its two axes, and what lies where.

    data    requests. Slots, rings, states and blocks lie on one data shard; ids are local to it.
    model   within a data shard: heads of attention, output groups, width of the shared expert and
            vocabulary are split; the cache is replicated, or its blocks are split.

Routed experts are split over both. A step is written for one device, with the collectives of
`collectives.py` where devices must agree. `on_mesh` runs such a function on every device, if its
arguments lie on a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax import checks

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)
BY_ROW = P(DATA)
"""First axis over `data`: rows, tokens, slots."""
BY_SLOT = P(None, DATA)
"""Second axis over `data`: slots or blocks of layers that are stacked."""
BY_BLOCK = P(None, (DATA, MODEL))
"""Second axis over all devices: blocks of layers that are stacked, where a cache is split."""
BY_DEVICE = P((DATA, MODEL))
"""First axis over all devices: what each of them found."""
type AnyMesh = Mesh | AbstractMesh

_MAX_DEVICES = 2**16


def make_mesh(
    data: int = 1, model: int = 1, *, devices: Sequence[Any] | np.ndarray | None = None
) -> Mesh:
    """A mesh with the axes `data` and `model`.

    Args:
      data: data shards; requests are spread over them.
      model: devices of a data shard; heads, vocabulary and the shared expert are split over them.
        Neighbours in `devices` belong to one data shard.
      devices: data times model of them, in a row, or as the array [data, model] that
        `jax.experimental.mesh_utils.create_device_mesh((data, model))` gives; None takes the first
        ones that JAX has.

    Raises:
      ValueError: a size is below 1, there are not so many devices, one is there twice, or their
        array has other axes.
    """
    data = checks.integer("data", data, 1, _MAX_DEVICES)
    model = checks.integer("model", model, 1, _MAX_DEVICES)
    chosen: Sequence[Any] = jax.devices()
    if devices is not None:
        if isinstance(devices, np.ndarray) and devices.ndim > 1:
            if devices.shape != (data, model):
                rule = f"devices in a row, or an array [data, model] = [{data}, {model}] of them"
                checks.refuse("devices", rule, devices)
            devices = devices.reshape(-1)
        chosen = checks.sequence("devices", devices, of="devices", limit=_MAX_DEVICES)
        for device in chosen:
            checks.instance("devices", device, jax.Device)
        if len(chosen) != data * model:
            rule = f"{data * model} devices, data={data} times model={model}"
            checks.refuse("devices", rule, devices, f"these are {len(chosen)}")
        if len(set(chosen)) < len(chosen):
            checks.refuse("devices", "devices that are all different", devices)
    if len(chosen) < data * model:
        raise ValueError(
            f"data={data} times model={model} must be at most the {len(chosen)} devices that JAX "
            "has; start it where there are more"
        )
    grid = np.array(chosen[: data * model], dtype=object).reshape(data, model)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def mesh_sizes(mesh: AnyMesh) -> tuple[int, int]:
    """(data, model): sizes of its axes.

    Raises:
      ValueError: it is no mesh with these axes, or one on which steps cannot run.
    """
    if not isinstance(mesh, Mesh | AbstractMesh) or not set(AXES) <= set(mesh.axis_names):
        checks.refuse("mesh", f"a jax.sharding.Mesh with the axes {list(AXES)}", mesh)
    if isinstance(mesh, Mesh):
        _check_devices(mesh)
    return mesh.shape[DATA], mesh.shape[MODEL]


@functools.lru_cache(maxsize=64)
def _check_devices(mesh: Mesh) -> None:
    """Refuses meshes that JAX takes, but no step: `make_mesh` gives none of them."""
    if set(mesh.axis_types) != {AxisType.Auto}:
        checks.refuse("mesh", "a mesh whose axes are all Auto", mesh, "make it with make_mesh")
    if len(set(mesh.devices.flat)) < mesh.size:
        checks.refuse("mesh", "a mesh of devices that are all different", mesh.devices)


def check_divides(
    mesh: AnyMesh, sizes: dict[str, int], axes: tuple[str, ...], *, unit: int = 1
) -> None:
    """Refuses sizes that a mesh cannot split evenly.

    Args:
      mesh: the mesh.
      sizes: what is to be split, by name.
      axes: over which axes.
      unit: what must stay together on one device.

    Raises:
      ValueError: a size is no multiple of the devices on these axes; the error names the numbers
        that would divide it.
    """
    mesh_sizes(mesh)
    shape = {name: mesh.shape[name] for name in axes}
    devices = math.prod(shape.values())
    for name, size in sizes.items():
        if devices > 1 and size % (devices * unit):
            most = min(size // unit, _MAX_DEVICES)
            fitting = [1] + [n for n in range(2, most + 1) if size % (n * unit) == 0]
            asked = " and ".join(f"{axis}={n}" for axis, n in shape.items())
            parts = f" in blocks of {unit}" if unit > 1 else ""
            raise ValueError(
                f"{name}={size} must divide over the mesh's {' times '.join(axes)}{parts}, got "
                f"{asked}; {' times '.join(axes)} may be {_listed(fitting)}"
            )


def _listed(numbers: list[int]) -> str:
    shown = [str(n) for n in numbers[:12]]
    return ", ".join(shown) + (", ..." if len(numbers) > len(shown) else "")


def axis_size(axis: str) -> int:
    """Devices on an axis, where a function runs on every device of a mesh; else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def place_on(*axes: str) -> jax.Array | int:
    """The number of this device on axes, the last one fastest; 0 without a mesh."""
    index: jax.Array | int = 0
    for axis in axes:
        if axis_size(axis) > 1:
            index = index * axis_size(axis) + jax.lax.axis_index(axis)
    return index


@functools.singledispatch
def specs_of(value: Any) -> Any:
    """How an argument of a step lies on a mesh: a prefix of its tree, of `PartitionSpec`.

    What no other rule is registered for has rows, tokens or slots on its first axis.
    """
    del value
    return BY_ROW


def shardings_of(value: Any, mesh: AnyMesh) -> Any:
    """`specs_of`, for each leaf of a value a `NamedSharding`."""
    specs = jax.tree.broadcast(specs_of(value), value)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _check_parts(name: str, value: Any, mesh: AnyMesh) -> None:
    """Refuses an argument that its axes do not cut into equal parts."""
    specs = jax.tree.leaves(jax.tree.broadcast(specs_of(value), value))
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(value), specs, strict=True):
        for axis, over in enumerate(spec):
            if over is not None:
                where = f"axis {axis} of {name}{jax.tree_util.keystr(path)}"
                axes = (over,) if isinstance(over, str) else over
                check_divides(mesh, {where: leaf.shape[axis]}, axes)


def _check_same_mesh(values: dict[str, Any], mesh: AnyMesh) -> None:
    """Refuses pools and parameters of which some lie elsewhere than the others.

    What has no rule of its own in `specs_of`, as a step's input, JAX brings to the mesh: its rows
    mean the same wherever they come from. A cache's slots and block ids are those of a data shard.
    """
    for name, value in values.items():
        if specs_of.dispatch(type(value)) is specs_of.dispatch(object):
            continue
        found = find_mesh(value)
        if found is None or not _is_same(found, mesh):
            raise ValueError(
                f"{name} must lie on the mesh of the other arguments, {dict(mesh.shape)}, got "
                f"{'no mesh' if found is None else f'another one, {dict(found.shape)}'}; make a "
                "cache with init_cache(..., mesh=mesh), and place parameters with "
                "jax.device_put(params, param_shardings(config, mesh, params))"
            )


def _is_same(one: AnyMesh, other: AnyMesh) -> bool:
    """Whether two meshes have the same devices, or sizes where those of one are not known."""
    return one == other if type(one) is type(other) else one.shape == other.shape


def find_mesh(*values: Any) -> AnyMesh | None:
    """The mesh that arrays lie on, tracers and shapes too; None on one device or inside a step."""
    if DATA in jax.sharding.get_abstract_mesh().manual_axes:
        return None
    for value in values:
        is_array = isinstance(value, jax.Array | jax.ShapeDtypeStruct)
        leaves = jax.tree.leaves(value) if is_array or dataclasses.is_dataclass(value) else []
        for leaf in leaves[:1]:
            sharding = getattr(leaf, "sharding", None)
            if isinstance(leaf, jax.core.Tracer):
                sharding = jax.typeof(leaf).sharding
            if isinstance(sharding, NamedSharding) and set(AXES) <= set(sharding.mesh.axis_names):
                return sharding.mesh
    return None


def put[T](value: T, mesh: AnyMesh | None) -> T:
    """An argument of a step, in NumPy and the same in every process, on the mesh.

    None is one device, where JAX puts it by itself.
    """
    if mesh is None:
        return value
    where = shardings_of(value, mesh)
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(where)):
        return jax.device_put(value, where)

    def make(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    return jax.tree.map(make, value, where)


def fetch[T](tree: T) -> T:
    """Arrays in NumPy, those parts included that lie in other processes, which all call this."""
    return read(gather(tree))


def gather[T](tree: T) -> T:
    """Begins what `read` ends, and waits for nothing; all processes call this.

    Arrays of which other processes hold parts are copied to every device. All others begin their
    way to the host.
    """
    leaves = jax.tree.leaves(tree)
    far = [leaf for leaf in leaves if not getattr(leaf, "is_fully_addressable", True)]
    if far:
        return _replicate(far[0].sharding.mesh)(tree)
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return tree


def read[T](tree: T) -> T:
    """What `gather` gave in NumPy, when it is there."""

    def local(leaf: Any) -> Any:
        return leaf if getattr(leaf, "is_fully_addressable", True) else leaf.addressable_data(0)

    return jax.device_get(jax.tree.map(local, tree))


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))


def on_mesh[**Args, Out](outputs: Any) -> Callable[[Callable[Args, Out]], Callable[Args, Out]]:
    """A function of arrays that runs on every device of the mesh that its arguments lie on.

    Each device sees its part of every argument, as `specs_of` says, and gives its part of the
    results. Where a cache, a store or parameters lie on a mesh, all of them must. Without a mesh it
    is the function itself. Arguments that are keyword-only are static. On a mesh values are not
    checked, as inside jit.

    Args:
      outputs: how results lie: `PartitionSpec`s, or the name of the argument whose place a result
        takes; a tuple for several results.
    """

    def decorate(function: Callable[Args, Out]) -> Callable[Args, Out]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Args.args, **kwargs: Args.kwargs) -> Out:
            mesh = find_mesh(*args, *kwargs.values())
            if mesh is None:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arrays = dict(zip(signature.parameters, bound.args, strict=False))
            _check_same_mesh(arrays, mesh)
            for name, value in arrays.items():
                _check_parts(name, value, mesh)

            def spec_of(output: Any) -> Any:
                return specs_of(arrays[output]) if isinstance(output, str) else output

            many = isinstance(outputs, tuple) and not isinstance(outputs, P)
            out_specs = tuple(map(spec_of, outputs)) if many else spec_of(outputs)
            local = jax.shard_map(
                functools.partial(function, **bound.kwargs),
                mesh=mesh,
                in_specs=tuple(specs_of(value) for value in arrays.values()),
                out_specs=out_specs,
                check_vma=False,
            )
            return local(*arrays.values())

        return run

    return decorate
