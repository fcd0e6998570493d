"""Fills the parts of a leaf that the devices of a mesh hold, each from its part of the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels.common.weights import INPUTS, MXFP4, MXFP4_GROUP, ROWS, BlockFP8

Slices = tuple[slice, ...]


class ShardedStack:
    """Fills a leaf that lies on a mesh: what this process's devices hold of it.

    Devices that hold the same part of the leaf have it read once.
    """

    def __init__(self, wanted: Any, shardings: Any, open_stack: Callable[[Any, Any], Any]) -> None:
        """Opens a stack for each part.

        Args:
          wanted: the leaf, with shapes in place of arrays.
          shardings: the same, with `NamedSharding`s.
          open_stack: makes what fills a part on a device, from its shapes.
        """
        self.wanted = wanted
        self._shardings = jax.tree.leaves(shardings)
        shapes = jax.tree.leaves(wanted)
        places = [
            sharding.addressable_devices_indices_map(shape.shape)
            for sharding, shape in zip(self._shardings, shapes, strict=True)
        ]
        parts: dict[tuple[tuple[int, int], ...], tuple[Slices, list[Any]]] = {}
        for device, index in places[0].items():
            slices = _logical_slices(wanted, index)
            key = tuple((part.start, part.stop) for part in slices)
            parts.setdefault(key, (slices, []))[1].append(device)
        self._parts = [
            (slices, devices, open_stack(part_shape(wanted, slices), devices[0]))
            for slices, devices in parts.values()
        ]

    def holds(self, index: tuple[int, ...]) -> bool:
        """Whether a device of this process holds some of the tensor at that index of the leaf."""
        return any(_is_inside(index, slices) for slices, _, _ in self._parts)

    def add(self, index: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> None:
        """Writes a tensor, as it is stored, into the parts that hold some of it."""
        for slices, _, stack in self._parts:
            if _is_inside(index, slices):
                lead = slices[: len(index)]
                local = tuple(i - part.start for i, part in zip(index, lead, strict=True))
                stack.add(local, cut_stored(self.wanted, arrays, slices[len(index) :]))

    def finish(self) -> Any:
        """The leaf, of arrays on the mesh."""
        per_array: list[list[jax.Array]] = [[] for _ in self._shardings]
        while self._parts:
            _, devices, stack = self._parts.pop()
            leaves = jax.tree.leaves(stack.finish())
            for arrays, array in zip(per_array, leaves, strict=True):
                arrays += [jax.device_put(array, device) for device in devices]
        shapes, treedef = jax.tree.flatten(self.wanted)
        whole = [
            jax.make_array_from_single_device_arrays(shape.shape, sharding, arrays)
            for shape, sharding, arrays in zip(shapes, self._shardings, per_array, strict=True)
        ]
        return jax.tree.unflatten(treedef, whole)


def part_shape(wanted: Any, slices: Slices) -> Any:
    """The shapes of a part of a weight.

    Args:
      wanted: the weight [..., out, in], or any dense array, with shapes in place of arrays.
      slices: of each axis.

    Raises:
      ValueError: a part would begin or end within a block of scales, or a tile.
    """
    if not isinstance(wanted, BlockFP8 | MXFP4):
        return _shape(wanted, slices)
    *lead, rows, columns = slices
    if isinstance(wanted, BlockFP8):
        blocks = _units(rows, wanted.block), _units(columns, wanted.block)
        return dataclasses.replace(
            wanted,
            codes=_shape(wanted.codes, slices),
            scale=_shape(wanted.scale, (*lead, *blocks)),
        )
    tiles = _units(rows, ROWS), _units(columns, INPUTS)
    inside = tuple(slice(0, n) for n in wanted.codes.shape[-2:])
    return dataclasses.replace(
        wanted,
        codes=_shape(wanted.codes, (*lead, *tiles, *inside)),
        scale=_shape(wanted.scale, (*lead, *tiles, inside[0])),
        size=(rows.stop - rows.start, columns.stop - columns.start),
    )


def cut_stored(
    wanted: Any, arrays: tuple[np.ndarray, ...], slices: Slices
) -> tuple[np.ndarray, ...]:
    """A part of a tensor as it is stored: views of the given arrays.

    Args:
      wanted: the weight that it belongs to.
      arrays: its values, or its codes and scales.
      slices: of each axis of the tensor; of a quantised one, [out, in].
    """
    if isinstance(wanted, BlockFP8):
        codes, scale = arrays
        return codes[slices], scale[tuple(_units(part, wanted.block) for part in slices)]
    if isinstance(wanted, MXFP4):
        pairs, scale = arrays
        rows, columns = slices
        return pairs[rows, _units(columns, 2)], scale[rows, _units(columns, MXFP4_GROUP)]
    return (arrays[0][slices],)


def _logical_slices(wanted: Any, index: Slices) -> Slices:
    """Slices of [..., out, in] that a part of a weight's first array holds."""
    if not isinstance(wanted, MXFP4):
        return _filled(index, wanted.shape)
    *lead, rows, columns, _, _ = _filled(index, wanted.codes.shape)
    out, into = wanted.size
    return (
        *lead,
        slice(rows.start * ROWS, min(rows.stop * ROWS, out)),
        slice(columns.start * INPUTS, min(columns.stop * INPUTS, into)),
    )


def _filled(index: Slices, shape: tuple[int, ...]) -> Slices:
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def _is_inside(index: tuple[int, ...], slices: Slices) -> bool:
    return all(
        part.start <= i < part.stop for i, part in zip(index, slices[: len(index)], strict=True)
    )


def _units(part: slice, unit: int) -> slice:
    """Blocks of that many elements that a slice of elements takes; the last may be cut short."""
    if part.start % unit:
        raise ValueError(
            f"a device's part of a quantised weight must begin at a multiple of {unit}, whose "
            f"elements share a scale or a tile, got {part.start}..{part.stop}; take another mesh"
        )
    return slice(part.start // unit, -(-part.stop // unit))


def _shape(whole: Any, slices: Slices) -> Any:
    return jax.ShapeDtypeStruct(tuple(part.stop - part.start for part in slices), whole.dtype)
