"""Measured tilings: for some shapes of some ops on one device, what beats the op's formula there.

A device's file, `data/tilings/<device>.json`, reads

    {"jax": "0.11.2", "date": "2026-01-31", "entries": [
      {"op": "flush_hca", "shape": {"windows": 64}, "tiling": {"channels": 128},
       "us": 12.1, "formula_us": 15.2}]}

An entry speaks for every shape of its class: sizes rounded up to powers of two. Fields of a tiling
that it does not name are the formula's. There is no entry where the formula is as fast.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

from pallas_kernels.backend import device_kind

_FIELDS = {"op": str, "shape": dict, "tiling": dict, "us": float, "formula_us": float}
ShapeClass = tuple[tuple[str, int], ...]


def tune[T](op: str, formula: T, **sizes: int) -> T:
    """The measured tiling of an op at these sizes on this device, else the formula's.

    Args:
      op: its name.
      formula: a frozen dataclass of ints and bools.
      **sizes: what the op's tilings depend on.

    Raises:
      ValueError: the device's file names a field that the tiling does not have.
    """
    device = device_kind()
    found = {} if device is None else _load(device).get((op, classify(sizes)), {})
    try:
        return dataclasses.replace(formula, **found)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise ValueError(f"tilings of {op} for {device}: {error}") from error


def classify(sizes: dict[str, int]) -> ShapeClass:
    """The class of a shape: each size rounded up to a power of two."""
    return tuple(sorted((name, 1 << max(size - 1, 0).bit_length()) for name, size in sizes.items()))


def file_name(device: str) -> str:
    """Of a device's tilings: "NVIDIA H200" is nvidia_h200.json."""
    return "_".join(device.lower().split()) + ".json"


def parse(text: str) -> dict[tuple[str, ShapeClass], dict[str, int]]:
    """A file's tilings, by op and class.

    Raises:
      ValueError: an entry lacks a field, has one of another type or is no gain, or comes twice.
    """
    tilings: dict[tuple[str, ShapeClass], dict[str, int]] = {}
    for entry in json.loads(text)["entries"]:
        _check(entry)
        key = (entry["op"], classify(entry["shape"]))
        if key in tilings:
            raise ValueError(f"two tilings for {key}")
        tilings[key] = entry["tiling"]
    return tilings


@functools.cache
def _load(device: str) -> dict[tuple[str, ShapeClass], dict[str, int]]:
    path = importlib.resources.files("pallas_kernels") / "data" / "tilings" / file_name(device)
    return parse(path.read_text()) if path.is_file() else {}


def _check(entry: dict[str, Any]) -> None:
    if entry.keys() != _FIELDS.keys():
        raise ValueError(f"a tiling has {sorted(_FIELDS)}, got {sorted(entry)}")
    for name, kind in _FIELDS.items():
        if not isinstance(entry[name], kind):
            raise ValueError(f"{name} of a tiling must be a {kind.__name__}, got {entry[name]!r}")
    for name in ("shape", "tiling"):
        if not all(isinstance(value, int) for value in entry[name].values()):
            raise ValueError(f"{name} of a tiling must hold whole numbers, got {entry[name]}")
    if entry["us"] >= entry["formula_us"]:
        raise ValueError(f"a tiling must beat the formula, got {entry}")
