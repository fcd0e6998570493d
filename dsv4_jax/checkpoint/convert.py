"""Converts a checkpoint to the formats of the release, or to BF16, one tensor at a time."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.checkpoint.conversion_record import ConversionRecord, alone_in
from dsv4_jax.checkpoint.engram_tables import table_arrays, table_entries, table_name
from dsv4_jax.checkpoint.files import INDEX, find_weight_files
from dsv4_jax.checkpoint.finite import find_not_finite
from dsv4_jax.checkpoint.layout import (
    MAX_SHARD_BYTES,
    SHARD_BYTES,
    Entry,
    as_stored,
    format_fields,
    list_entries,
    split_into_shards,
)
from dsv4_jax.checkpoint.named_sources import Source
from dsv4_jax.checkpoint.names import Target, get_leaf, saved_name
from dsv4_jax.checkpoint.problems import list_problems
from dsv4_jax.checkpoint.sources import OpenCheckpoint, open_checkpoint
from dsv4_jax.checkpoint.write_files import make_room, replacing, write_json, write_tensors
from dsv4_jax.config.checkpoint_folder import find_file
from dsv4_jax.config.draft import without_draft
from dsv4_jax.config.images import text_part
from dsv4_jax.config.json_file import read_json_object
from dsv4_jax.model.released import quantize_weight, quantized_shape, released_format
from dsv4_jax.model.weight_forms import RELEASE_FORMS, STORED
from dsv4_jax.progress import Progress
from dsv4_jax.regular_files import read_regular
from dsv4_jax.runtime import shown_bytes
from pallas_kernels.common.weights import MXFP4, BlockFP8

_MAX_COPIED_BYTES = 2**27
"""Of a tokenizer's file."""
_COPIED = ("tokenizer*", "generation_config.json", "*.jinja")


class _Tensor(NamedTuple):
    """One canonical tensor: where it comes from, and what is to be written."""

    source: Source
    target: Target
    leaf: Any  # a shape, or a quantised weight of shapes; None of an Engram table
    stored: list[Entry]


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    weights: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
    check_weights: bool | None = None,
    follow_links: bool = False,
    drafts: bool = True,
) -> None:
    """Writes a checkpoint in other formats.

    Only one tensor is in memory at a time. The config is written last. A conversion that was killed
    goes on where it stopped if it is started again, and ends with the same files as one that was
    not: each weight file that was finished is compared by size and SHA-256 with what was written
    (`conversion.json`), and made again where it differs. So is a complete conversion that is
    started again. To compare reads those files once, at some 1 GB/s a core.

    The tokenizer, if there is one, is copied. What `load_checkpoint` leaves out, such as what
    belongs to images, is not written, and the config does not announce it.

    Args:
      source: directory of the checkpoint.
      destination: directory to write, which must not hold another model.
      weights: "stored" quantises what the release stores quantised, and keeps the bytes of what is
        quantised already; "bfloat16" decodes. What the release has in f32 stays f32.
      max_shard_bytes: as in `save_checkpoint`.
      progress: shows a bar on stderr, or where that is no terminal a line now and then.
      check_weights: refuses NaN and infinity in dense tensors too, as in `load_checkpoint`; a
        quantised weight would hide them.
      follow_links: reads files that are links out of the source, as in `load_checkpoint`.
      drafts: writes the draft too, as in `load_checkpoint`; else it is left out.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: an argument is no path, or there are no such weights; the checkpoint does not fit
        its config or is damaged, which is listed by kind; the destination is the source, a file,
        holds another model, has too little space or is written by another process. Nothing has been
        written then.
      OSError: a file cannot be written.
    """
    weights = RELEASE_FORMS.check("weights", weights)
    source, destination = checks.path("source", source), checks.path("destination", destination)
    if destination.resolve() == source.resolve():
        raise ValueError(f"the destination must be another directory than the source, {source}")
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"{destination} is a file; pass a directory")
    max_shard_bytes = SHARD_BYTES.read(max_shard_bytes, "max_shard_bytes")
    copied = _read_copied(source, follow_links)
    opened = open_checkpoint(
        source,
        jnp.bfloat16,
        keep=False,
        check_weights=check_weights,
        follow_links=follow_links,
        drafts=checks.flag("drafts", drafts),
    )
    tensors = _plan(source, weights, opened)
    record = ConversionRecord(
        destination, _describe_conversion(source, weights, max_shard_bytes, follow_links, drafts)
    )
    entries = {name: tensor.stored for name, tensor in tensors.items()}
    shards = split_into_shards(entries, max_shard_bytes)
    has_own_names = weights == STORED or opened.config.sources is not None
    rename = str if has_own_names else saved_name
    whole = record.find_whole(shards, progress)
    todo = {file: names for file, names in shards.items() if file not in whole}
    _check_space(
        destination, [entry for names in todo.values() for n in names for entry in entries[n]]
    )

    destination.mkdir(parents=True, exist_ok=True)
    with alone_in(destination):
        if todo:
            make_room(destination / "config.json")
        record.keep(whole)
        with Progress(len(tensors), unit="tensor", doing="converting", shown=progress) as bar:
            for file, names in shards.items():
                if file not in todo:
                    bar.add(len(names))
                    continue
                header = [
                    (rename(entry.name), entry.dtype, entry.shape)
                    for name in names
                    for entry in entries[name]
                ]
                contents = _contents(tensors, names, bar.add)
                record.add(file, *write_tensors(destination / file, header, contents))
        if len(shards) > 1:
            weight_map = {
                rename(entry.name): file
                for file, names in shards.items()
                for name in names
                for entry in entries[name]
            }
            write_json(destination / INDEX, {"metadata": {}, "weight_map": weight_map})
        for name, data in copied.items():
            with replacing(destination / name) as stream:
                stream.write(data)
        write_json(destination / "config.json", _config(source, tensors))


def _plan(source: pathlib.Path, weights: str, opened: OpenCheckpoint) -> dict[str, _Tensor]:
    """Every tensor by canonical name, checked."""
    sources, problems = opened.sources, []
    for name, target in opened.targets.items():
        problems += opened.find_damage(sources[name], target)
        if opened.checks_values and sources[name].scale is None:
            problems += find_not_finite(sources[name].label, sources[name].read())
    if problems:
        raise ValueError(list_problems(source, problems))
    leaves = {}
    for leaf, tensors in opened.by_leaf().items():
        leaves[leaf] = get_leaf(opened.shapes, leaf)
        if weights == STORED:
            stored = [source for _, source in tensors]
            leaves[leaf] = _released_leaf(leaf, leaves[leaf], stored, opened.config.weight_block)
    tensors = {
        name: _Tensor(
            sources[name], target, leaves[target.leaf],
            list_entries(name, target, leaves[target.leaf]),
        )
        for name, target in opened.targets.items()
    }  # fmt: skip
    return tensors | _plan_tables(weights, opened)


def _plan_tables(weights: str, opened: OpenCheckpoint) -> dict[str, _Tensor]:
    """The Engram tables, which are no leaves of parameters."""
    if (engram := opened.config.engram) is None:
        return {}
    tables = {}
    for layer, rows, source in zip(engram.layers, engram.table_rows, opened.tables, strict=True):
        entries = table_entries(layer, rows, engram)
        if weights != STORED:
            entries = [dataclasses.replace(entries[0], dtype=np.dtype(jnp.bfloat16))]
        target = Target(leaf="engram", index=(), shape=entries[0].shape)
        tables[table_name(layer)] = _Tensor(source, target, None, entries)
    return tables


def _released_leaf(
    leaf: str, shape: jax.ShapeDtypeStruct, sources: list[Source], block: int
) -> Any:
    """What is quantised alike stays so; else the format of the release."""
    wanted, scale_dtype = released_format(leaf), np.uint8
    if wanted is None:
        return shape
    formats = {(s.weight_format, s.scale_dtype if s.scale else None) for s in sources}
    if len(formats) == 1:
        ((stored, stored_scale),) = formats
        if stored is not None and (stored is BlockFP8 or stored_scale is np.uint8):
            wanted, scale_dtype = stored, stored_scale
    if wanted is MXFP4 and shape.shape[-1] % 2:
        raise ValueError(
            f"{leaf} has {shape.shape[-1]} inputs, and MXFP4, which stores pairs, needs an even "
            "number"
        )
    return quantized_shape(wanted, shape.shape, shape.dtype, scale_dtype=scale_dtype, block=block)


def _contents(
    tensors: dict[str, _Tensor], names: list[str], advance: Callable[[], Any]
) -> Iterator[np.ndarray]:
    """The arrays of a file, made one after the other."""
    for name in names:
        source, _, leaf, entries = tensors[name]
        arrays = table_arrays(source, entries) if leaf is None else _convert(source, leaf)
        for entry, array in zip(entries, arrays, strict=True):
            yield as_stored(array, entry.dtype)
        advance()


def _convert(source: Source, leaf: Any) -> list[np.ndarray]:
    """A tensor in the format of its leaf, codes before scales."""
    if not isinstance(leaf, BlockFP8 | MXFP4):
        return [source.decode()]
    if isinstance(leaf, source.weight_format or ()) and _has_scale_of(source, leaf):
        return [source.read(), source.read_scale()]
    values = source.decode().astype(np.float32)
    return [np.asarray(array) for array in _quantize(values, type(leaf), leaf.row_group)]


def _has_scale_of(source: Source, leaf: BlockFP8 | MXFP4) -> bool:
    is_code = isinstance(leaf, MXFP4) or leaf.scale.dtype == jnp.uint8
    return (source.scale_dtype is np.uint8) == is_code


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(
    values: jax.Array, weight_format: type[BlockFP8] | type[MXFP4], block: int
) -> tuple[jax.Array, jax.Array]:
    weight = quantize_weight(values, weight_format, block)
    return weight.to_stored() if isinstance(weight, MXFP4) else (weight.codes, weight.scale)


def _describe_conversion(
    source: pathlib.Path, weights: str, max_shard_bytes: int, follow_links: bool, drafts: bool
) -> dict[str, Any]:
    files = [source / "config.json", *find_weight_files(source, follow_links=follow_links)]
    return {
        "source": str(source.resolve()),
        "weights": "released" if weights == STORED else weights,  # as in records that exist
        "max_shard_bytes": max_shard_bytes,
        **({} if drafts else {"drafts": False}),
        "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }


def _read_copied(source: pathlib.Path, follow_links: bool) -> dict[str, bytes]:
    """The contents of files that are copied, by name."""
    copied = {}
    for path in (path for pattern in _COPIED for path in sorted(source.glob(pattern))):
        if path.suffix or not path.is_dir():  # a folder of that name belongs to something else
            file = find_file(source, path.name, follow_links=follow_links)
            copied[path.name] = read_regular(file, _MAX_COPIED_BYTES)
    return copied


def _check_space(destination: pathlib.Path, entries: list[Entry]) -> None:
    existing = destination.resolve()
    while not existing.exists():
        existing = existing.parent
    free, needed = shutil.disk_usage(existing).free, sum(entry.num_bytes for entry in entries)
    if free < needed:
        raise ValueError(
            f"{destination} has {shown_bytes(free)} of free space, and "
            f"{shown_bytes(needed)} are still to be written"
        )


def _config(source: pathlib.Path, tensors: dict[str, _Tensor]) -> dict[str, Any]:
    """The config of the source, which says how the weights are stored now, and which there are."""
    fields = read_json_object(source / "config.json")
    if not any(name.startswith("mtp.") for name in tensors):
        fields = without_draft(fields)
    fields = text_part(fields)
    for name in ("quantization_config", "expert_dtype", "torch_dtype"):
        fields.pop(name, None)
    leaves = [tensor.leaf for tensor in tensors.values()]
    return fields | {"dtype": "bfloat16"} | format_fields(leaves)
