"""Tensors in safetensors files, memory-mapped, and the quantised weights among them decoded.

The `safetensors` package reads no FP8 or UE8M0 into NumPy; the format is a header and a flat body.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_FP8_BLOCK, _FP4_GROUP = 128, 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file; nothing is read until `read`.

    Attributes:
      file: path of the file.
      dtype: stored dtype.
      shape: stored shape.
      offset: place of its first byte in the file.
    """

    file: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """A view of the mapped file."""
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def find_weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a checkpoint directory: the index's shards, or all there are.

    Raises:
      FileNotFoundError: there are none, or a shard that the index names is missing.
      ValueError: the index is broken.
    """
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no *.safetensors in {path}; pass a checkpoint directory")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index with a weight_map: {error!r}") from error
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}")
    return [path / name for name in names]


def list_tensors(file: pathlib.Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, by name.

    Raises:
      ValueError: the file is truncated or is no safetensors file, or a dtype is unknown.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + header_size > size:
            raise ValueError(f"{file} is truncated, or no safetensors file: its header is cut off")
        try:
            header = dict(json.loads(stream.read(header_size)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{name} in {file} has dtype {entry['dtype']}; known are {list(_DTYPES)}"
            )
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if 8 + header_size + end > size:
            raise ValueError(
                f"{file} is truncated: {name} ends at byte {8 + header_size + end:,} of {size:,}"
            )
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{file} is damaged: {name} does not fill its bytes")
        tensors[name] = StoredTensor(file, dtype, shape, 8 + header_size + begin)
    return tensors


def write_tensors(
    file: pathlib.Path,
    header: Iterable[tuple[str, np.dtype, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Writes a file tensor by tensor, under another name until it is complete.

    Args:
      file: its path.
      header: name, dtype and shape of every tensor.
      arrays: their contents, in that order; each is made when it is written.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in _DTYPES.items()}
    end = 0
    for name, dtype, shape in header:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        offsets = [begin, end]
        entries[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            stream.write(np.ascontiguousarray(array).view(np.uint8).data)
        assert stream.tell() == 8 + len(text) + end
    os.replace(partial, file)


def decode_weight(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A quantised weight to f32[out, in]; a value is code times scale.

    Args:
      weight: E4M3 [out, in], or E2M1 pairs u8[out, in / 2].
      scale: scale of each 128 x 128 block, or of each 32 inputs of a row; UE8M0 as u8, or f32.

    Source: deepseek_v4.md section 4.5.
    """
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    if weight.dtype == np.uint8:
        codes = np.stack([weight & 15, weight >> 4], axis=-1).reshape(weight.shape[0], -1)
        return _E2M1[codes] * np.repeat(scale, _FP4_GROUP, axis=1)[:, : codes.shape[1]]
    out, into = weight.shape
    blocks = np.repeat(np.repeat(scale, _FP8_BLOCK, axis=0)[:out], _FP8_BLOCK, axis=1)[:, :into]
    return weight.astype(np.float32) * blocks
