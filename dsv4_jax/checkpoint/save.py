"""Saves a checkpoint as safetensors, in the naming that transformers loads."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dsv4_jax.checkpoint.names import Target, all_targets, dotted_path, get_leaf, saved_name
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.write_json import write_config
from dsv4_jax.model.params import DSV4Params, param_shapes

_INDEX = "model.safetensors.index.json"
_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def save_checkpoint(
    config: DSV4Config,
    params: DSV4Params,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a checkpoint that transformers loads, and `load_checkpoint` too, bit for bit.

    Files are written under other names first and renamed when complete, the config last. Weight
    files of an earlier save that the new one does not replace are removed, since readers would
    find them.

    Args:
      config: the model.
      params: model parameters.
      path: directory, made if it is not there; files of the same names are replaced.
      max_shard_bytes: larger checkpoints are cut into files of at most that many bytes of tensors
        (a larger tensor has a file of its own), and an index.

    Raises:
      ValueError: the parameters are not those of `config`; every difference is listed.
      NotADirectoryError: `path` is a file.
    """
    directory = pathlib.Path(path)
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; pass a directory")
    shapes = param_shapes(config, params.dtype)
    _check_params(params, shapes)
    targets = all_targets(config, shapes)
    shards = _shards(params, targets, max_shard_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    single = len(shards) == 1
    weight_map, written = {}, []
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = "model.safetensors" if single else file
        tensors = {saved_name(name): _tensor(params, targets[name]) for name in names}
        save_file(tensors, directory / f"{file}.partial", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        written.append(file)
    for file in written:
        os.replace(directory / f"{file}.partial", directory / file)
    if not single:
        index = {"metadata": {}, "weight_map": weight_map}
        _write_json(directory / _INDEX, index)
        written.append(_INDEX)
    for old in directory.iterdir():
        if _OUR_FILES.fullmatch(old.name) and old.name not in written:
            old.unlink()
    dtype = {"dtype": jnp.dtype(params.dtype).name}
    _write_json(directory / "config.json", write_config(config) | dtype)


def _check_params(params: DSV4Params, shapes: DSV4Params) -> None:
    found = {dotted_path(p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    wanted = {dotted_path(p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]}

    def describe(leaf: Any) -> str:
        return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"

    problems = [
        f"{name} must be {describe(wanted.get(name))}, is {describe(found.get(name))}"
        for name in sorted(found.keys() | wanted.keys())
        if describe(wanted.get(name)) != describe(found.get(name))
    ]
    if problems:
        raise ValueError("params are not those of config:\n  " + "\n  ".join(problems))


def _shards(
    params: DSV4Params, targets: dict[str, Target], max_shard_bytes: int
) -> list[list[str]]:
    """Names in groups of at most that many bytes; a larger tensor has a group of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, target in targets.items():
        itemsize = 8 if target.is_hash_table else get_leaf(params, target.leaf).dtype.itemsize
        count = math.prod(target.shape) * itemsize
        if shards[-1] and size + count > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    return shards


def _tensor(params: DSV4Params, target: Target) -> np.ndarray:
    values = np.asarray(get_leaf(params, target.leaf)[target.index])
    if target.is_hash_table:
        values = values.astype(np.int64)
    return np.ascontiguousarray(values)


def _write_json(file: pathlib.Path, data: dict[str, Any]) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(partial, file)
