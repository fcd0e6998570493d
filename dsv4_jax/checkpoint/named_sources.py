"""The tensors of a checkpoint by DeepSeek's names: fused ones apart, quantised ones with scales."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from dsv4_jax.checkpoint.files import StoredTensor, decode_weight
from dsv4_jax.checkpoint.names import canonical_name
from pallas_kernels.common.weights import FP8_BLOCK, MXFP4, MXFP4_GROUP, BlockFP8

UE8M0 = (np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(np.uint8))
"""Dtypes in which files hold UE8M0 scales."""

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_PACKED = (np.dtype(np.int8), np.dtype(np.uint8))
_FUSED = re.compile(r"\.experts\.(gate_up|down)_proj$")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")
_PARTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""Matrices that a fused tensor holds one above the other."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A canonical tensor in a file: a whole stored one, or a part of one.

    Attributes:
      tensor: the stored tensor.
      name: its name in the file.
      part: index into it; () for all of it.
      scale: its stored scale, if it is quantised.
      scale_part: index into that.
      halves: matrices that the stored tensor holds one above the other; of weights that are apart
        and have their scales fused, those that the scale holds so.
      scale_experts: experts whose scales one tensor holds, where their weights are apart; 0 is as
        the weights are.
      block: outputs and inputs that share a scale of FP8.
    """

    tensor: StoredTensor
    name: str
    part: tuple[Any, ...] = ()
    scale: StoredTensor | None = None
    scale_part: tuple[Any, ...] = ()
    halves: int = 1
    scale_experts: int = 0
    block: int = FP8_BLOCK

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
        if self.tensor.dtype == _E4M3:
            return BlockFP8
        return MXFP4 if self.tensor.dtype in _PACKED else None

    @property
    def scale_dtype(self) -> type[np.generic]:
        """The dtype of scales in memory: u8 for UE8M0."""
        assert self.scale is not None
        return np.uint8 if self.scale.dtype in UE8M0 else np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: packed FP4 holds two values a byte."""
        shape = self.tensor.shape
        if self.part:
            _, rows = self.part
            shape = (rows.stop - rows.start, *shape[2:])
        return (*shape[:-1], *(2 * n for n in shape[-1:])) if self.weight_format is MXFP4 else shape

    def wanted_scale_shape(self) -> tuple[int, ...]:
        """The shape that the stored scale must have, fused as the weight is or by itself."""
        *lead, out, into = self.tensor.shape
        if self.scale_experts:
            lead, out = [self.scale_experts], self.halves * out
        if self.weight_format is MXFP4:
            return (*lead, out, -(-2 * into // MXFP4_GROUP))
        rows = _scale_rows(out, self.halves, self.scale, self.block)
        return (*lead, rows, -(-into // self.block))

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
        if self.scale is None:
            return stored
        return decode_weight(stored, self.read_scale(), block=self.block)


def named_sources(
    stored: dict[str, StoredTensor], num_experts: int, block: int = FP8_BLOCK
) -> Iterator[tuple[str, Source]]:
    """Scales join their quantised weights, fused experts come apart.

    transformers writes the weights of experts apart and leaves the scales fused where it quantised
    a model itself; each weight finds its part of them.
    """
    by_name = {canonical_name(name): tensor for name, tensor in stored.items()}
    for original, tensor in stored.items():
        name = canonical_name(original)
        base, _, kind = name.rpartition(".")
        if kind == "scale" and _has_quantised(base, by_name):
            continue
        fused = _FUSED.search(name) and len(tensor.shape) == 3
        scale = by_name.get(f"{name if fused else base}.scale")
        scale = scale if _may_be_quantised(tensor) else None
        if fused:
            whole = Source(tensor, original, scale=scale, block=block)
            yield from _fused_experts(name, whole, num_experts)
            continue
        source = Source(tensor, original, scale=scale, block=block)
        if scale is None and _may_be_quantised(tensor) and (match := _EXPERT.fullmatch(name)):
            source = _with_fused_scale(source, match, by_name, num_experts)
        yield name, source


def _has_quantised(base: str, by_name: dict[str, StoredTensor]) -> bool:
    """Whether there are quantised weights whose scale is `base.scale`, fused or not."""
    weights = [by_name[n] for n in (f"{base}.weight", base) if n in by_name]
    if not weights and _FUSED.search(base):
        stem, _, fused = base.rpartition(".")
        names = (f"{stem}.0.{w}" for w in _PARTS[fused])
        apart = [n for n in names if f"{n}.scale" not in by_name]
        weights = [by_name[f"{n}.weight"] for n in apart if f"{n}.weight" in by_name]
    return bool(weights) and _may_be_quantised(weights[0])


def _may_be_quantised(tensor: StoredTensor) -> bool:
    return tensor.dtype in (_E4M3, *_PACKED)


def _with_fused_scale(
    source: Source, match: re.Match[str], by_name: dict[str, StoredTensor], num_experts: int
) -> Source:
    """The weight of an expert with its part of the scales of all, if there are such."""
    stem, expert, w = match[1], int(match[2]), match[3]
    fused = next(name for name, parts in _PARTS.items() if w in parts)
    scale = by_name.get(f"{stem}.{fused}.scale")
    if scale is None:
        return source
    names = _PARTS[fused]
    rows = _part_of(scale, names.index(w), len(names))
    return dataclasses.replace(
        source,
        scale=scale,
        scale_part=(expert, rows),
        halves=len(names),
        scale_experts=num_experts,
    )


def _part_of(scale: StoredTensor | None, half: int, count: int) -> slice:
    """Rows of a fused scale of an expert that belong to one of the matrices in it."""
    rows = scale.shape[1] if scale is not None and len(scale.shape) == 3 else 0
    if rows == 1:  # one block holds the rows of all of them
        return slice(0, 1)
    return slice(half * rows // count, (half + 1) * rows // count)


def _scale_rows(out: int, halves: int, scale: StoredTensor | None, block: int) -> int:
    """Rows of blocks of FP8: each matrix has its own, unless one block holds all of them."""
    if scale is not None and scale.shape[-2:-1] == (1,) and out <= block:
        return 1
    return halves * -(-(out // halves) // block)


def _fused_experts(name: str, whole: Source, num_experts: int) -> Iterator[tuple[str, Source]]:
    """[E, D, I] into w2 of each expert; [E, 2 * I, D] into w1, the first I rows, and w3.

    Of more than `num_experts` experts the first that is too many is given, to be refused.
    """
    found_experts, rows = whole.tensor.shape[:2]
    stem, _, fused = name.rpartition(".")
    names = _PARTS[fused]
    count = len(names)
    for expert in range(min(found_experts, num_experts + 1)):
        for i, w in enumerate(names):
            yield (
                f"{stem}.{expert}.{w}.weight",
                dataclasses.replace(
                    whole,
                    part=(expert, slice(i * rows // count, (i + 1) * rows // count)),
                    scale_part=(expert, _part_of(whole.scale, i, count)),
                    halves=count,
                ),
            )
