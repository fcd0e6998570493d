"""Saves a checkpoint as safetensors, in a naming that transformers loads."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from safetensors.numpy import save_file

from dsv4_jax import checks
from dsv4_jax.checkpoint.engram_tables import TOKENIZER, stored_entries, table_name
from dsv4_jax.checkpoint.files import INDEX
from dsv4_jax.checkpoint.layout import (
    MAX_SHARD_BYTES,
    OUR_FILES,
    SHARD_BYTES,
    as_stored,
    format_fields,
    list_arrays,
    list_entries,
    split_into_shards,
)
from dsv4_jax.checkpoint.names import all_targets, dotted_path, get_leaf, saved_name
from dsv4_jax.checkpoint.write_files import write_json
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.write_json import write_config
from dsv4_jax.engram import EngramTable
from dsv4_jax.model.params import DSV4Params, param_shapes
from dsv4_jax.model.released import quantized_shape, released_format
from pallas_kernels.common.weights import MXFP4, BlockFP8, is_quantized


def save_checkpoint(
    config: DSV4Config,
    params: DSV4Params,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a checkpoint that transformers loads, and `load_checkpoint` too, bit for bit.

    A dense model gets the names that transformers writes. Where weights are quantised, and of
    DeepSeek-V4.1, all tensors get DeepSeek's own names, and those weights the bytes that the
    release has. Beside Engram tables lies the tokenizer by which tokens find their rows.

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
      ValueError: an argument is of another type; or the parameters are not those of `config`, and
        every difference is listed.
      NotADirectoryError: `path` is a file.
    """
    max_shard_bytes = SHARD_BYTES.read(max_shard_bytes, "max_shard_bytes")
    checks.instance("config", config, DSV4Config)
    checks.instance("params", params, DSV4Params)
    directory = checks.path("path", path)
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; pass a directory")
    shapes = _shapes_like(params, config)
    _check_params(params, shapes)
    targets = all_targets(config, shapes)
    entries = {
        name: list_entries(name, target, get_leaf(shapes, target.leaf))
        for name, target in targets.items()
    }
    tables = _tables(config, params)
    for layer, table in tables.items():
        entries[table_name(layer)] = stored_entries(layer, table)
    arrays_of_tables = {
        table_name(layer): [a for a in (table.values, table.scale) if a is not None]
        for layer, table in tables.items()
    }
    formats = format_fields(jax.tree.leaves(shapes, is_leaf=is_quantized))
    shards = split_into_shards(entries, max_shard_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for file, names in shards.items():
        tensors = {}
        for name in names:
            if name in arrays_of_tables:
                arrays = [
                    as_stored(array, entry.dtype)
                    for array, entry in zip(arrays_of_tables[name], entries[name], strict=True)
                ]
            else:
                arrays = list_arrays(targets[name], get_leaf(params, targets[name].leaf))
            has_own_names = formats or config.sources is not None
            for entry, array in zip(entries[name], arrays, strict=True):
                tensors[entry.name if has_own_names else saved_name(entry.name)] = array
        save_file(tensors, directory / f"{file}.partial", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    written = [*shards]
    for file in written:
        os.replace(directory / f"{file}.partial", directory / file)
    if len(shards) > 1:
        write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})
        written.append(INDEX)
    for old in directory.iterdir():
        if OUR_FILES.fullmatch(old.name) and old.name not in written:
            old.unlink()
    if params.engram is not None:
        (directory / TOKENIZER).write_text(params.engram.tokenizer_json)
    dtype = {"dtype": jnp.dtype(params.dtype).name}
    write_json(directory / "config.json", write_config(config) | dtype | formats)


def _tables(config: DSV4Config, params: DSV4Params) -> dict[int, EngramTable]:
    """The Engram tables of each layer that has one.

    Raises:
      ValueError: the parameters have none, or those of another model.
    """
    if config.engram is None:
        return {}
    if params.engram is None or params.engram.config != config.engram:
        raise ValueError(
            "params.engram must be the Engram tables of config, got "
            f"{None if params.engram is None else params.engram.config}"
        )
    return dict(zip(config.engram.layers, params.engram.tables, strict=True))


def _shapes_like(params: DSV4Params, config: DSV4Config) -> DSV4Params:
    """The shapes of `config`, quantised where the parameters are and may be."""
    found = {dotted_path(p): leaf for p, leaf in _leaves(params)}

    def change(path: Any, shape: jax.ShapeDtypeStruct) -> Any:
        leaf = found.get(name := dotted_path(path))
        if released_format(name) is None or not isinstance(leaf, BlockFP8 | MXFP4):
            return shape
        scale = leaf.scale.dtype if isinstance(leaf, BlockFP8) else jnp.uint8
        return quantized_shape(
            type(leaf), shape.shape, shape.dtype, scale_dtype=scale, block=config.weight_block
        )

    return jax.tree.map_with_path(change, param_shapes(config, params.dtype))


def _check_params(params: DSV4Params, shapes: DSV4Params) -> None:
    found = {dotted_path(path): leaf for path, leaf in _leaves(params)}
    wanted = {dotted_path(path): leaf for path, leaf in _leaves(shapes)}

    def describe(leaf: Any) -> str:
        if is_quantized(leaf):
            arrays = ", ".join(describe(array) for array in jax.tree.leaves(leaf))
            return f"{type(leaf).__name__}{list(leaf.shape)} of {arrays}"
        return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"

    problems = [
        f"{name} must be {describe(wanted.get(name))}, is {describe(found.get(name))}"
        for name in sorted(found.keys() | wanted.keys())
        if describe(wanted.get(name)) != describe(found.get(name))
    ]
    if problems:
        raise ValueError("params are not those of config:\n  " + "\n  ".join(problems))


def _leaves(params: DSV4Params) -> list[tuple[Any, Any]]:
    return jax.tree.leaves_with_path(dataclasses.replace(params, engram=None), is_leaf=is_quantized)
