"""The header of a safetensors file, as the `safetensors` package accepts it.

That package reads no FP8 or UE8M0 into NumPy, but it judges headers: at most 100 MB of JSON in
UTF-8, whole numbers, sizes that are shape times dtype, and tensors that follow each other from the
first byte of the data to the last, without holes or overlaps. What it accepts is read again here
for the offsets, which it does not tell; names that are there twice, of which it takes the last, are
refused.
"""

from __future__ import annotations

import math
import os
import pathlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dsv4_jax.config.json_file import MAX_JSON_BYTES, parse_json_object
from dsv4_jax.config.kinds import Fields, ListOf, Whole, Word, show
from dsv4_jax.regular_files import open_regular, show_path

DTYPES = {
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
MAX_TENSORS = 2**18
"""Of a checkpoint, and so of one file; all of Pro's are 143,000 with their scales."""

_ENTRY = Fields(
    {
        "dtype": Word(),
        "shape": ListOf(Whole(0, 2**64 - 1), 64),
        "data_offsets": ListOf(Whole(0, 2**64 - 1), 2),
    }
)
_MAX_NAME, _MAX_AXES, _MAX_AXIS = 512, 8, 2**31 - 1
_UNHELPFUL = "Error while deserializing header: "


class Entry(NamedTuple):
    """What a header says of one tensor; `begin` is the place of its first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int


def read_header(file: pathlib.Path) -> dict[str, Entry]:
    """Every tensor that a file has, by name.

    Raises:
      ValueError: the file is truncated or no safetensors file, or a tensor has a dtype, a shape or
        a name that is none of ours. File and tensor are named.
      OSError: it cannot be read.
    """
    shown = show_path(file)
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        count = int.from_bytes(stream.read(8), "little")
        if count > MAX_JSON_BYTES <= size:
            raise ValueError(
                f"{shown} is no safetensors file: its header must have at most "
                f"{MAX_JSON_BYTES:,} bytes, got {count:,}"
            )
        if size < 8 or 8 + count > size:
            raise ValueError(f"{shown} is truncated, or no safetensors file: its header is cut off")
        data = stream.read(count)
        _check_count(shown, data.count(b'"data_offsets"'))  # before all that takes time
        header = parse_json_object(data, f"{shown} is no safetensors file: its header")
        try:
            # By its descriptor: at the path there may be another file by now. It maps all of it.
            with safe_open(f"/dev/fd/{stream.fileno()}", "numpy"):
                judgement = None
        except SafetensorError as error:
            judgement = str(error).removeprefix(_UNHELPFUL)
    header.pop("__metadata__", None)
    if judgement is not None:
        _name_culprit(shown, header, 8 + count, size)
        raise ValueError(f"{shown} is damaged, or no safetensors file: {judgement[:300]}")
    _check_count(shown, len(header))
    return {name: _read_entry(shown, name, entry, 8 + count) for name, entry in header.items()}


def _check_count(file: str, count: int) -> None:
    if count > MAX_TENSORS:
        raise ValueError(f"{file} must have at most {MAX_TENSORS:,} tensors, got {count:,}")


def _read_entry(file: str, name: str, entry: dict, data_begin: int) -> Entry:
    """An entry whose types, sizes and offsets `safetensors` has accepted."""
    if not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
        raise ValueError(
            f"{file} has a tensor whose name is not 1 to {_MAX_NAME} printable characters: "
            f"{show(name)}"
        )
    if entry["dtype"] not in DTYPES:
        raise ValueError(_unknown_dtype(file, name, entry["dtype"]))
    shape = tuple(entry["shape"])
    if len(shape) > _MAX_AXES or max(shape, default=0) > _MAX_AXIS:
        raise ValueError(
            f"{name} in {file} must have at most {_MAX_AXES} axes of at most {_MAX_AXIS:,}, got "
            f"shape {show(list(shape))}"
        )
    return Entry(DTYPES[entry["dtype"]], shape, data_begin + entry["data_offsets"][0])


def _unknown_dtype(file: str, name: str, dtype: str) -> str:
    return f"{name} in {file} has dtype {show(dtype)[1:-1]}; known are {list(DTYPES)}"


def _name_culprit(file: str, header: dict, data_begin: int, size: int) -> None:
    """Raises ValueError about the tensor for which a header was refused, if one can be found."""
    last_name, last = "", -1
    for name, entry in header.items():
        shown = show(name)[1:-1]
        fields = _ENTRY.read(entry, f"{file} is damaged, or no safetensors file: {shown}")
        if missing := sorted(_ENTRY.kinds.keys() - fields.keys()):
            raise ValueError(f"{file} is damaged: {shown} lacks {', '.join(missing)}")
        if fields["dtype"] not in DTYPES:
            raise ValueError(_unknown_dtype(file, shown, fields["dtype"]))
        if len(fields["data_offsets"]) != 2:
            raise ValueError(
                f"{file} is damaged: {shown}.data_offsets must be begin and end, got "
                f"{fields['data_offsets']}"
            )
        begin, end = fields["data_offsets"]
        wanted = math.prod(fields["shape"]) * DTYPES[fields["dtype"]].itemsize
        if end - begin != wanted:
            raise ValueError(
                f"{file} is damaged: {shown} does not fill its bytes: dtype {fields['dtype']} and "
                f"shape {show(fields['shape'])} take {wanted:,}, data_offsets {[begin, end]} are "
                f"{end - begin:,}"
            )
        if end > last:
            last_name, last = shown, end
    if data_begin + last > size:
        raise ValueError(
            f"{file} is truncated: {last_name} ends at byte {data_begin + last:,} of {size:,}"
        )
