"""A checkpoint whose tensors are compared with those that its model has."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator

import numpy as np
from jax.typing import DTypeLike

from dsv4_jax.checkpoint.engram_tables import take_tables
from dsv4_jax.checkpoint.files import StoredTensor, list_by_file
from dsv4_jax.checkpoint.finite import CHECKED_BYTES
from dsv4_jax.checkpoint.left_out import find_left_out, warn_of_left_out
from dsv4_jax.checkpoint.named_sources import UE8M0, Source, named_sources
from dsv4_jax.checkpoint.names import Target, all_targets, canonical_name
from dsv4_jax.checkpoint.problems import list_problems
from dsv4_jax.checkpoint.zero_groups import find_bad_scales
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.read_json import read_contents
from dsv4_jax.model.params import DSV4Params, param_shapes
from dsv4_jax.model.released import released_format
from pallas_kernels.common.weights import MXFP4, BlockFP8


@dataclasses.dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose tensors are those that its model wants; most values are not read yet.

    Attributes:
      config: of the model.
      shapes: the parameters, as shapes.
      targets: where each tensor goes, by canonical name.
      sources: where it comes from; the same names.
      tables: the Engram tables, one for each layer that has one.
      checks_values: dense tensors are looked through for NaN and infinity.
    """

    config: DSV4Config
    shapes: DSV4Params
    targets: dict[str, Target]
    sources: dict[str, Source]
    tables: tuple[Source, ...]
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
    drafts: bool,
) -> OpenCheckpoint:
    """Compares what is there with what the model has.

    If the files hold no draft tensor, the config has no draft. A draft that the config does not
    have, or that is not wanted, and what belongs to images are left out; a `LeftOutWarning` says so
    of what nobody asked to leave out.

    Args:
      directory: of the checkpoint.
      dtype: as of `param_shapes`.
      keep: whether quantised weights are to stay as they are, which not every tensor may.
      check_weights: as in `load_checkpoint`.
      follow_links: as there.
      drafts: as there.

    Raises:
      FileNotFoundError: there is no config, or no safetensors file, or a shard is missing.
      ValueError: the config, the index or a file cannot be read, or is a link out of the directory
        that is not followed; or a tensor does not fit: all that is wrong is listed, and where
        values are checked those that are damaged. Else nothing but headers is read for it.
    """
    config, sources, problems = _find_sources(directory, follow_links=follow_links, drafts=drafts)
    tables, others = take_tables(config, sources)
    problems += others
    shapes, targets = param_shapes(config, dtype), all_targets(config, param_shapes(config, dtype))
    is_checked = _is_checked(sources, check_weights)
    opened = OpenCheckpoint(config, shapes, targets, sources, tables, is_checked)
    _check_sources(opened, problems, directory, keep=keep)
    return opened


def _find_sources(
    directory: pathlib.Path, *, follow_links: bool, drafts: bool
) -> tuple[DSV4Config, dict[str, Source], list[str]]:
    """The config, the tensors by canonical name, and which names are there twice."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory; pass one that holds a config.json")
    trunk = DSV4Config.from_hf(directory, follow_links=follow_links, text_only=True, drafts=False)
    where, contents = read_contents(directory, follow_links=follow_links)
    stored: dict[str, StoredTensor] = {}
    problems = []
    for tensors in list_by_file(directory, follow_links=follow_links):
        problems += [
            f"twice: {name}, in {stored[name].file.name} and {tensors[name].file.name}"
            for name in sorted(stored.keys() & tensors.keys())
        ]
        stored |= tensors
    scales: dict[str, str] = {}
    for name in stored:
        if (scale := canonical_name(name)).endswith(".scale"):
            if scale in scales:
                problems.append(f"twice: {scale}, as {scales[scale]} and {name}")
            scales[scale] = name
    sources: dict[str, Source] = {}
    for name, source in named_sources(stored, trunk.num_routed_experts, trunk.weight_block):
        if name in sources:
            problems.append(f"twice: {name}, as {sources[name].name} and {source.name}")
        sources[name] = source
    try:
        config, left_out = find_left_out(contents, trunk, sources, drafts=drafts)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    warn_of_left_out(left_out.describe(directory))
    kept = {name: source for name, source in sources.items() if name not in left_out.names}
    return config, kept, problems


def _check_sources(
    opened: OpenCheckpoint, problems: list[str], directory: pathlib.Path, *, keep: bool
) -> None:
    """Raises if something does not fit; `problems` are those that are known already."""
    sources, targets = opened.sources, opened.targets
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
        for target, source in sound if opened.checks_values else ():
            problems += opened.find_damage(source, target)
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
    stored, where = source.read(), source.label
    count, rule = find_bad_scales(stored, source.read_scale(), block=source.block)
    if count:
        yield f"damaged: scale of {where} has {count} {rule}"
    if source.weight_format is BlockFP8:
        count = int(np.count_nonzero((stored.view(np.uint8) & 0x7F) == 0x7F))
        if count:
            yield f"damaged: {where} has {count} codes of NaN"


def _is_checked(sources: dict[str, Source], check_weights: bool | None) -> bool:
    """Whether dense tensors are looked through for NaN; None is whether they are few."""
    if check_weights is not None:
        return check_weights
    tensors = {id(source.tensor): source.tensor for source in sources.values()}.values()
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors) <= CHECKED_BYTES


def _misfits(source: Source, target: Target, *, keep: bool) -> Iterator[str]:
    """What does not fit about dtypes and shapes."""
    tensor, scale, name, shape = source.tensor, source.scale, source.name, target.shape
    quantised = source.weight_format is not None
    if quantised and len(shape) != 2:
        yield f"wrong dtype: {name}, which is {tensor.dtype}"
    elif quantised and scale is None:
        yield f"missing: scale of {name}, which is {tensor.dtype}"
    elif not quantised and (
        tensor.dtype in UE8M0 or target.is_hash_table != (tensor.dtype.kind in "iu")
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
    is_code = source.scale.dtype in UE8M0
    return is_code or (
        source.scale.dtype == np.float32 and not (keep and source.weight_format is MXFP4)
    )


def _describe(source: Source) -> str:
    if source.weight_format is None:
        return "dense"
    name = "FP8" if source.weight_format is BlockFP8 else "FP4"
    return f"{name} with {'UE8M0' if source.scale_dtype is np.uint8 else 'f32'} scales"
