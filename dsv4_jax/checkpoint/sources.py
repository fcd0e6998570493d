"""The tensors of a checkpoint by DeepSeek's names: fused ones apart, quantised ones with scales."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from dsv4_jax.checkpoint.files import StoredTensor, decode_weight, find_weight_files, list_tensors
from dsv4_jax.checkpoint.finite import CHECKED_BYTES
from dsv4_jax.checkpoint.header import MAX_TENSORS
from dsv4_jax.checkpoint.names import Target, all_targets, canonical_name
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params, param_shapes
from dsv4_jax.model.released import released_format
from pallas_kernels.common.weights import FP8_BLOCK, MXFP4, MXFP4_GROUP, BlockFP8

_E4M3 = "float8_e4m3fn"
_PACKED = ("int8", "uint8")
_UE8M0 = ("float8_e8m0fnu", "uint8")
_MAX_LISTED = 1000


@dataclasses.dataclass(frozen=True)
class Source:
    """A canonical tensor in a file: a whole stored one, or a part of one.

    Attributes:
      tensor: the stored tensor.
      name: its name in the file.
      part: index into it; () for all of it.
      scale: its stored scale, if it is quantised.
      scale_part: index into that.
      halves: matrices that the stored tensor holds one above the other.
    """

    tensor: StoredTensor
    name: str
    part: tuple[Any, ...] = ()
    scale: StoredTensor | None = None
    scale_part: tuple[Any, ...] = ()
    halves: int = 1

    @property
    def label(self) -> str:
        """Its name in the file, and which part of it, for a message."""
        if not self.part:
            return self.name
        expert, rows = self.part
        return f"{self.name}[{expert}, {rows.start}:{rows.stop}]"

    @property
    def weight_format(self) -> type[BlockFP8] | type[MXFP4] | None:
        """How it is quantised; None is dense."""
        if self.tensor.dtype.name == _E4M3:
            return BlockFP8
        return MXFP4 if self.tensor.dtype.name in _PACKED else None

    @property
    def scale_dtype(self) -> type[np.generic]:
        """The dtype of scales in memory: u8 for UE8M0."""
        assert self.scale is not None
        return np.uint8 if self.scale.dtype.name in _UE8M0 else np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: packed FP4 holds two values a byte."""
        shape = self.tensor.shape
        if self.part:
            _, rows = self.part
            shape = (rows.stop - rows.start, *shape[2:])
        return (*shape[:-1], *(2 * n for n in shape[-1:])) if self.weight_format is MXFP4 else shape

    def wanted_scale_shape(self) -> tuple[int, ...]:
        """The shape that the stored scale must have, fused as the weight is."""
        *lead, out, into = self.tensor.shape
        if self.weight_format is MXFP4:
            return (*lead, out, -(-2 * into // MXFP4_GROUP))
        rows = self.halves * -(-(out // self.halves) // FP8_BLOCK)
        return (*lead, rows, -(-into // FP8_BLOCK))

    def read(self) -> np.ndarray:
        """The stored values, a view of the mapped file; packed FP4 as u8."""
        stored = self.tensor.read()[self.part]
        return stored.view(np.uint8) if self.weight_format is MXFP4 else stored

    def read_scale(self) -> np.ndarray:
        """Its scales, f32 or UE8M0 as u8."""
        assert self.scale is not None
        scale = self.scale.read()[self.scale_part]
        is_code = self.scale_dtype is np.uint8
        return scale.view(np.uint8) if is_code else scale.astype(np.float32)

    def decode(self) -> np.ndarray:
        """Its values; of a quantised one, f32."""
        stored = self.read()
        return stored if self.scale is None else decode_weight(stored, self.read_scale())


@dataclasses.dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose tensors are those that its model wants; most values are not read yet.

    Attributes:
      config: of the model.
      shapes: the parameters, as shapes.
      targets: where each tensor goes, by canonical name.
      sources: where it comes from; the same names.
      checks_values: dense tensors are looked through for NaN and infinity.
    """

    config: DSV4Config
    shapes: DSV4Params
    targets: dict[str, Target]
    sources: dict[str, Source]
    checks_values: bool

    def by_leaf(self) -> dict[str, list[tuple[Target, Source]]]:
        """The tensors of each leaf."""
        found: dict[str, list[tuple[Target, Source]]] = {}
        for name, target in self.targets.items():
            found.setdefault(target.leaf, []).append((target, self.sources[name]))
        return found

    def find_damage(self, source: Source, target: Target) -> Iterator[str]:
        """What is wrong with the values of a tensor, beside those that `checks_values` asks for."""
        return _find_damage(source, target, self.config.num_routed_experts)


def open_checkpoint(
    directory: pathlib.Path,
    dtype: DTypeLike,
    *,
    keep: bool,
    check_weights: bool | None,
    follow_links: bool,
) -> OpenCheckpoint:
    """Compares what is there with what the model has.

    If the files hold no draft tensor, the config has no draft block; where the config has none,
    draft tensors are left out.

    Args:
      directory: of the checkpoint.
      dtype: as of `param_shapes`.
      keep: whether quantised weights are to stay as they are, which not every tensor may.
      check_weights: as in `load_checkpoint`.
      follow_links: as there.

    Raises:
      FileNotFoundError: there is no config, or no safetensors file, or a shard is missing.
      ValueError: the config, the index or a file cannot be read, or is a link out of the directory
        that is not followed; or a tensor does not fit: all that is wrong is listed, damaged values
        too.
    """
    config, sources, problems = _find_sources(directory, follow_links=follow_links)
    shapes = param_shapes(config, dtype)
    found = OpenCheckpoint(
        config, shapes, all_targets(config, shapes), sources, _is_checked(sources, check_weights)
    )
    _check_sources(found, problems, directory, keep=keep)
    return found


def _find_sources(
    directory: pathlib.Path, *, follow_links: bool
) -> tuple[DSV4Config, dict[str, Source], list[str]]:
    """The config, the tensors by canonical name, and which names are there twice."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory; pass one that holds a config.json")
    config = DSV4Config.from_hf(directory, follow_links=follow_links)
    stored: dict[str, StoredTensor] = {}
    problems = []
    for file in find_weight_files(directory, follow_links=follow_links):
        tensors = list_tensors(file)
        problems += [
            f"twice: {name}, in {stored[name].file.name} and {file.name}"
            for name in sorted(stored.keys() & tensors.keys())
        ]
        stored |= tensors
        if len(stored) > MAX_TENSORS:
            raise ValueError(f"{directory} must have at most {MAX_TENSORS:,} tensors in all files")
    scales: dict[str, str] = {}
    for name in stored:
        if (scale := canonical_name(name)).endswith(".scale"):
            if scale in scales:
                problems.append(f"twice: {scale}, as {scales[scale]} and {name}")
            scales[scale] = name
    sources: dict[str, Source] = {}
    for name, source in _named_sources(stored, config.num_routed_experts):
        if name in sources:
            problems.append(f"twice: {name}, as {sources[name].name} and {source.name}")
        sources[name] = source
    has_draft = any(name.startswith("mtp.") for name in sources)
    if not (has_draft and config.num_mtp_layers):
        config = dataclasses.replace(config, num_mtp_layers=0)
        sources = {name: s for name, s in sources.items() if not name.startswith("mtp.")}
    return config, sources, problems


def _named_sources(
    stored: dict[str, StoredTensor], num_experts: int
) -> Iterator[tuple[str, Source]]:
    """Scales join their quantised weights, fused experts come apart."""
    by_name = {canonical_name(name): tensor for name, tensor in stored.items()}
    for original, tensor in stored.items():
        name = canonical_name(original)
        base, _, kind = name.rpartition(".")
        if kind == "scale":
            weights = [by_name[n] for n in (f"{base}.weight", base) if n in by_name]
            if weights and _may_be_quantised(weights[0]):
                continue
        fused = re.search(r"\.experts\.(gate_up|down)_proj$", name) and len(tensor.shape) == 3
        scale = by_name.get(f"{name if fused else base}.scale")
        scale = scale if _may_be_quantised(tensor) else None
        if fused:
            yield from _fused_experts(name, Source(tensor, original, scale=scale), num_experts)
        else:
            yield name, Source(tensor, original, scale=scale)


def _may_be_quantised(tensor: StoredTensor) -> bool:
    return tensor.dtype.name in (_E4M3, *_PACKED)


def _fused_experts(name: str, whole: Source, num_experts: int) -> Iterator[tuple[str, Source]]:
    """[E, D, I] into w2 of each expert; [E, 2 * I, D] into w1, the first I rows, and w3.

    Of more than `num_experts` experts the first that is too many is given, to be refused.
    """
    found_experts, rows = whole.tensor.shape[:2]
    scale_rows = whole.scale.shape[1] if whole.scale and len(whole.scale.shape) == 3 else 0
    names = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
    count = len(names)
    stem = name.rpartition(".")[0]
    for expert in range(min(found_experts, num_experts + 1)):
        for i, w in enumerate(names):
            yield (
                f"{stem}.{expert}.{w}.weight",
                dataclasses.replace(
                    whole,
                    part=(expert, slice(i * rows // count, (i + 1) * rows // count)),
                    scale_part=(
                        expert,
                        slice(i * scale_rows // count, (i + 1) * scale_rows // count),
                    ),
                    halves=count,
                ),
            )


def _check_sources(
    found: OpenCheckpoint, problems: list[str], directory: pathlib.Path, *, keep: bool
) -> None:
    """Raises if something does not fit; `problems` are those that are known already."""
    sources, targets = found.sources, found.targets
    problems = problems + [
        f"missing: {name} {list(target.shape)}"
        for name, target in targets.items()
        if name not in sources
    ]
    sound: list[tuple[Target, Source]] = []
    formats: dict[str, dict[str, str]] = {}  # of each leaf, with the first tensor that has it
    for name, source in sources.items():
        if name not in targets:
            problems.append(f"unexpected: {source.name} {list(source.tensor.shape)}")
            continue
        misfits = list(_misfits(source, targets[name], keep=keep))
        problems += misfits
        if not misfits:
            sound.append((targets[name], source))
            found_formats = formats.setdefault(targets[name].leaf, {})
            found_formats.setdefault(_describe(source), source.name)
    if keep:
        problems += [
            f"mixed formats: layers of a kind must store {leaf} alike, but "
            + ", ".join(f"{name} is {text}" for text, name in stored.items())
            + '; load it with weights="bfloat16"'
            for leaf, stored in formats.items()
            if len(stored) > 1
        ]
    if problems:
        for target, source in sound:
            problems += found.find_damage(source, target)
        raise ValueError(list_problems(directory, problems))


def _find_damage(source: Source, target: Target, num_experts: int) -> Iterator[str]:
    """What is wrong with the values of a tensor whose shapes and dtypes are right."""
    if target.is_hash_table:
        table = source.read()
        if table.min() < 0 or table.max() >= num_experts:
            yield (
                f"{source.name} must hold experts 0..{num_experts - 1}, "
                f"got {table.min()}..{table.max()}"
            )
    if source.scale is None:
        return
    scale, where = source.read_scale(), source.label
    if scale.dtype == np.uint8:
        bad, rule = (scale == 0) | (scale == 255), "UE8M0 codes of 0 or 255"
    else:
        bad, rule = ~(np.isfinite(scale) & (scale > 0)), "values that are not positive numbers"
    if bad.any():
        yield f"damaged: scale of {where} has {int(bad.sum())} {rule}"
    if source.weight_format is BlockFP8:
        count = int(np.count_nonzero((source.read().view(np.uint8) & 0x7F) == 0x7F))
        if count:
            yield f"damaged: {where} has {count} codes of NaN"


def _is_checked(sources: dict[str, Source], check_weights: bool | None) -> bool:
    """Whether dense tensors are looked through for NaN; None is whether they are few."""
    if check_weights is not None:
        return check_weights
    tensors = {id(source.tensor): source.tensor for source in sources.values()}.values()
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors) <= CHECKED_BYTES


def list_problems(directory: pathlib.Path, problems: list[str]) -> str:
    """The message of an error about all of them."""
    lines = list(dict.fromkeys(problems))
    if len(lines) > _MAX_LISTED:
        lines[_MAX_LISTED:] = [f"and {len(lines) - _MAX_LISTED:,} more"]
    listed = "\n  ".join(lines)
    return f"{directory} does not fit its config.json:\n  {listed}"


def _misfits(source: Source, target: Target, *, keep: bool) -> Iterator[str]:
    """What does not fit about dtypes and shapes."""
    tensor, scale, name, shape = source.tensor, source.scale, source.name, target.shape
    quantised = source.weight_format is not None
    if quantised and len(shape) != 2:
        yield f"wrong dtype: {name}, which is {tensor.dtype}"
    elif quantised and scale is None:
        yield f"missing: scale of {name}, which is {tensor.dtype}"
    elif not quantised and (
        tensor.dtype.name in _UE8M0
        or target.is_hash_table != np.issubdtype(tensor.dtype, np.integer)
    ):
        yield f"wrong dtype: {name}, which is {tensor.dtype}"
    elif source.weight_format is MXFP4 and shape[-1] % 2:
        yield f"odd width: {name} must have {shape[-1]} inputs, and packed FP4 stores pairs"
    elif source.shape != shape:
        yield f"wrong shape: {name} must be {list(shape)}, is {list(source.shape)}"
    elif scale is not None:
        if scale.shape != (wanted := source.wanted_scale_shape()):
            yield f"wrong shape: scale of {name} must be {list(wanted)}, is {list(scale.shape)}"
        elif not _is_scale_dtype(source, keep=keep):
            yield f"wrong dtype: scale of {name}, which is {scale.dtype}"
        elif keep and released_format(target.leaf) is None:
            yield (
                f"wrong dtype: {name}, which is {tensor.dtype}, but the model takes it dense; "
                'load it with weights="bfloat16"'
            )


def _is_scale_dtype(source: Source, *, keep: bool) -> bool:
    """UE8M0 or f32; of FP4 that is to stay as it is, UE8M0."""
    assert source.scale is not None
    is_code = source.scale.dtype.name in _UE8M0
    return is_code or (
        source.scale.dtype == np.float32 and not (keep and source.weight_format is MXFP4)
    )


def _describe(source: Source) -> str:
    if source.weight_format is None:
        return "dense"
    name = "FP8" if source.weight_format is BlockFP8 else "FP4"
    return f"{name} with {'UE8M0' if source.scale_dtype is np.uint8 else 'f32'} scales"
