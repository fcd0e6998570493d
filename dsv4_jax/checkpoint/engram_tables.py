"""The Engram tables of a checkpoint, which stay in its files: rows are read as they are asked for.

Source: deepseek_v41.md sections 3 and 9.
"""

from __future__ import annotations

import math
import pathlib
import warnings
from collections.abc import Iterator

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv4_jax.checkpoint.layout import Entry, scale_name
from dsv4_jax.checkpoint.named_sources import UE8M0, Source
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.checkpoint_folder import find_file
from dsv4_jax.config.engram import GROUP, EngramConfig
from dsv4_jax.engram import EngramTable, EngramTables
from dsv4_jax.model.weight_forms import FLOATS
from dsv4_jax.regular_files import read_regular, show_path
from dsv4_jax.runtime import host_memory
from pallas_kernels.common.rows import quantize_rows

TOKENIZER = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 2**27
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def table_name(layer: int) -> str:
    """Of the table of a layer."""
    return f"layers.{layer}.engram.embed.weight"


def list_tables(config: DSV4Config) -> Iterator[Entry]:
    """The tables of a model as DeepSeek releases them, codes before scales."""
    if (engram := config.engram) is None:
        return
    for layer, rows in zip(engram.layers, engram.table_rows, strict=True):
        yield from table_entries(layer, rows, engram)


def table_entries(layer: int, rows: int, engram: EngramConfig) -> list[Entry]:
    """A table in E4M3, with a scale for each row and 32 columns."""
    name, groups = table_name(layer), -(-engram.head_dim // GROUP)
    return [
        Entry(name, _E4M3, (rows, engram.head_dim)),
        Entry(scale_name(name), UE8M0[0], (rows, groups)),
    ]


def take_tables(
    config: DSV4Config, sources: dict[str, Source]
) -> tuple[tuple[Source, ...], list[str]]:
    """The tables among the tensors of a checkpoint, which are no parameters, taken out of them.

    Args:
      config: of what is loaded.
      sources: tensors by canonical name; those of tables are removed.

    Returns:
      A source for each table, and what is wrong with them.
    """
    if (engram := config.engram) is None:
        return (), []
    found, problems = [], []
    for layer, rows in zip(engram.layers, engram.table_rows, strict=True):
        codes, scales = table_entries(layer, rows, engram)
        source = sources.pop(codes.name, None)
        if source is None:
            problems.append(f"missing: {codes.name} {list(codes.shape)}")
            continue
        found.append(source)
        if source.tensor.shape != codes.shape:
            problems.append(
                f"wrong shape: {source.name} must be {list(codes.shape)}, is "
                f"{list(source.tensor.shape)}"
            )
        if source.tensor.dtype != _E4M3:
            if source.tensor.dtype.name not in FLOATS:
                problems.append(f"wrong dtype: {source.name}, which is {source.tensor.dtype}")
        elif source.scale is None:
            problems.append(f"missing: scale of {source.name}, which is {source.tensor.dtype}")
        elif source.scale.shape != scales.shape:
            problems.append(
                f"wrong shape: scale of {source.name} must be {list(scales.shape)}, is "
                f"{list(source.scale.shape)}"
            )
        elif source.scale.dtype not in UE8M0:
            problems.append(f"wrong dtype: scale of {source.name}, which is {source.scale.dtype}")
    return tuple(found), problems


class HostMemoryWarning(UserWarning):
    """The host has less memory free than the Engram tables of a model take."""


def warn_of_memory(tables: tuple[Source, ...]) -> None:
    """Warns where tables do not fit the memory that is free; before anything is loaded.

    Args:
      tables: of `take_tables`.
    """
    stored = [part for one in tables for part in (one.tensor, one.scale) if part is not None]
    needed = sum(math.prod(part.shape) * part.dtype.itemsize for part in stored)
    memory = host_memory()
    if memory is None or memory.free_bytes >= needed:
        return
    warnings.warn(
        f"the Engram tables take {needed / 2**30:,.1f} GiB, and {memory.name} has "
        f"{memory.free_bytes / 2**30:,.1f} GiB of {memory.total_bytes / 2**30:,.1f} free: rows "
        "that are not in memory are read from the disk while a step waits for them, as "
        "engram_waits of an engine's metrics counts; free memory, or put the files on a fast disk",
        HostMemoryWarning,
        stacklevel=3,
    )


def open_tables(
    directory: pathlib.Path,
    config: DSV4Config,
    tables: tuple[Source, ...],
    *,
    follow_links: bool = False,
) -> EngramTables | None:
    """The tables of a checkpoint, mapped, with the normalised ids of its tokenizer.

    Args:
      directory: of the checkpoint.
      config: the model.
      tables: of `take_tables`, sound.
      follow_links: as in `load_checkpoint`.

    Returns:
      None of a model without tables.

    Raises:
      ValueError: the directory has no tokenizer, whose texts decide which rows a token reads, or
        one of another model.
    """
    if config.engram is None:
        return None
    file = find_file(directory, TOKENIZER, follow_links=follow_links)
    if not file.is_file():
        raise ValueError(
            f"{show_path(directory)} has no {TOKENIZER}, by whose texts tokens find their rows of "
            "the Engram tables; put that of the model beside its weights"
        )
    text = read_regular(file, _MAX_TOKENIZER_BYTES).decode()
    opened = tuple(_open(source) for source in tables)
    try:
        return EngramTables.make(config.engram, text, opened)
    except ValueError as error:
        raise ValueError(f"{show_path(file)}: {error}") from error


def table_arrays(source: Source, entries: list[Entry]) -> list[np.ndarray]:
    """A table in the form of these entries: as it is stored, decoded, or quantised as released."""
    table = _open(source)
    if len(entries) == 1:
        return [source.read() if table.scale is None else table.read(np.s_[:])]
    if table.scale is not None:
        return [table.values, table.scale]
    rounded = quantize_rows(jnp.asarray(table.read(np.s_[:])), GROUP)
    codes = np.asarray(rounded.codes).reshape(len(table.values), -1)
    return [codes[:, : entries[0].shape[1]], np.asarray(rounded.scale)]


def stored_entries(layer: int, table: EngramTable) -> list[Entry]:
    """The entries of a file that hold a table as it is."""
    name = table_name(layer)
    entries = [Entry(name, table.values.dtype, table.values.shape)]
    if table.scale is not None:
        entries.append(Entry(scale_name(name), UE8M0[0], table.scale.shape))
    return entries


def _open(source: Source) -> EngramTable:
    scale = None if source.scale is None else source.read_scale()
    return EngramTable(source.read(), scale)
