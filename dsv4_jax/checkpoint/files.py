"""Tensors in safetensors files, memory-mapped, and the quantised weights among them decoded."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from dsv4_jax.checkpoint.header import MAX_TENSORS, read_header
from dsv4_jax.config.checkpoint_folder import find_file
from dsv4_jax.config.json_file import read_json_object
from dsv4_jax.config.kinds import show
from dsv4_jax.regular_files import open_regular, show_path
from pallas_kernels.common.weights import FP8_BLOCK

INDEX = "model.safetensors.index.json"
MAX_FILES = 10_000
"""That an index may name; Pro has 64."""

_SHOWN = 10
_FP4_GROUP = 32
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
        with open_regular(self.file) as stream:
            return np.memmap(stream, self.dtype, "r", self.offset, self.shape)


def find_weight_files(path: pathlib.Path, *, follow_links: bool = False) -> list[pathlib.Path]:
    """The safetensors files of a checkpoint directory: the index's shards, or all there are.

    Args:
      path: the directory.
      follow_links: as in `dsv4_jax.config.checkpoint_folder.find_file`.

    Raises:
      FileNotFoundError: there are none, a shard that the index names is missing, or a link leads
        to nothing.
      ValueError: the index is broken, names too many files, one outside of the directory or what is
        no safetensors file by its name; or a file is a link that is not followed, or no regular
        file.
    """
    index = find_file(path, INDEX, follow_links=follow_links)
    if not index.is_file():
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(
                f"no *.safetensors in {show_path(path)}; pass a checkpoint directory"
            )
        return _find_all(path, names, f"{show_path(path)} has", "links to", follow_links)
    weight_map, shown = read_json_object(index).get("weight_map"), show_path(index)
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{shown} must have a weight_map, an object of tensors' files, got {show(weight_map)}"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{shown}: weight_map[{show(tensor)}] must be a text, got {show(name)}"
            )
    names = sorted(set(weight_map.values()))
    try:
        return _find_all(path, names, shown, "names", follow_links)
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from error


def _find_all(
    path: pathlib.Path, names: list[str], where: str, verb: str, follow_links: bool
) -> list[pathlib.Path]:
    """The files of these names; `where` and `verb` say in errors who names them."""
    if len(names) > MAX_FILES:
        raise ValueError(f"{where} must name at most {MAX_FILES:,} files, got {len(names):,}")
    files = [find_file(path, name, follow_links=follow_links) for name in names]
    if others := [name for name in names if not name.endswith(".safetensors")]:
        raise ValueError(f"weights must be in *.safetensors files, got {show_some(others)}")
    missing = [name for name, file in zip(names, files, strict=True) if not file.is_file()]
    if missing:
        told = f"{where} {verb} files that are not there"
        raise FileNotFoundError(f"{told}: {show_some(missing)}")
    return files


def show_some(names: list[str]) -> str:
    """The first of many names of files, cut where they are long, and how many others there are."""
    others = len(names) - _SHOWN
    shown = ", ".join(show(name)[1:-1] for name in names[:_SHOWN])
    return shown + (f" and {others:,} more" if others > 0 else "")


def list_tensors(file: pathlib.Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, by name.

    Raises:
      ValueError: as in `dsv4_jax.checkpoint.header.read_header`.
    """
    return {
        name: StoredTensor(file, entry.dtype, entry.shape, entry.begin)
        for name, entry in read_header(file).items()
    }


def list_by_file(
    path: pathlib.Path, *, follow_links: bool = False
) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of each file of a checkpoint directory, by name.

    Args:
      path: the directory.
      follow_links: as of `find_weight_files`.

    Raises:
      FileNotFoundError: as of `find_weight_files`.
      ValueError: as there and of `list_tensors`, or the files hold too many tensors together.
    """
    count = 0
    for file in find_weight_files(path, follow_links=follow_links):
        tensors = list_tensors(file)
        count += len(tensors)
        if count > MAX_TENSORS:
            raise ValueError(
                f"{show_path(path)} must have at most {MAX_TENSORS:,} tensors in all files"
            )
        yield tensors


def decode_weight(weight: np.ndarray, scale: np.ndarray, *, block: int = FP8_BLOCK) -> np.ndarray:
    """A quantised weight to f32[out, in]; a value is code times scale.

    Args:
      weight: E4M3 [out, in], or E2M1 pairs u8[out, in / 2].
      scale: scale of each square block, or of each 32 inputs of a row; UE8M0 as u8, or f32.
      block: outputs and inputs of a block.

    Source: deepseek_v4.md section 4.5.
    """
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    if weight.dtype == np.uint8:
        codes = np.stack([weight & 15, weight >> 4], axis=-1).reshape(weight.shape[0], -1)
        return _E2M1[codes] * np.repeat(scale, _FP4_GROUP, axis=1)[:, : codes.shape[1]]
    out, into = weight.shape
    blocks = np.repeat(np.repeat(scale, block, axis=0)[:out], block, axis=1)[:, :into]
    return weight.astype(np.float32) * blocks
