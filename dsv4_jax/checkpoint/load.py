"""Loads a checkpoint from safetensors."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dsv4_jax.checkpoint.files import (
    StoredTensor,
    decode_weight,
    find_weight_files,
    is_packed_fp4,
    list_tensors,
    logical_shape,
    scale_shape,
)
from dsv4_jax.checkpoint.names import Target, all_targets, canonical_name, dotted_path, get_leaf
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params, param_shapes

SHIPPED_CHECKPOINT = pathlib.Path(__file__).parents[1] / "data" / "checkpoint"
"""A small trained model that comes with the package: bytes as tokens, every type of layer."""

DEFAULT_DTYPE = jnp.bfloat16
"""Dtype of activations unless another one is given."""

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class _Source:
    """A canonical tensor in a file: a whole stored one, or a part of one.

    Attributes:
      tensor: the stored tensor.
      part: index into it; () for all of it.
      scale: its scale if it is quantised.
      name: its name in the file.
    """

    tensor: StoredTensor
    part: tuple[Any, ...]
    scale: StoredTensor | None
    name: str

    @property
    def is_packed(self) -> bool:
        return self.scale is not None and is_packed_fp4(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = logical_shape(self.tensor, is_packed=self.is_packed)
        return np.empty(shape, np.bool_)[self.part].shape if self.part else shape

    def read(self) -> np.ndarray:
        stored = self.tensor.read()
        if self.scale is not None:
            return decode_weight(stored, self.scale.read())
        return stored[self.part] if self.part else stored


def load_checkpoint(
    path: str | os.PathLike[str], *, dtype: Any = DEFAULT_DTYPE, progress: bool = True
) -> tuple[DSV4Config, DSV4Params]:
    """Reads a checkpoint directory.

    Files are memory-mapped and tensors read one at a time, so that the host holds little more
    than one stacked leaf. DeepSeek's names, those that transformers has in memory and those that
    it writes all load; FP8 and FP4 weights are decoded.

    Args:
      path: directory with a `config.json` and safetensors, single or sharded with an index.
      dtype: dtype of activations and of the weights released as BF16, FP8 or FP4.
      progress: shows a bar on stderr.

    Returns:
      The config and the parameters. If the files hold no draft (`mtp.`) tensor at all, the config
      has no draft block, whatever `config.json` says; where `config.json` has none, draft tensors
      are ignored.

    Raises:
      FileNotFoundError: there is no config, or no safetensors file, or a shard is missing.
      ValueError: `dtype` is none of f32, bf16 and f16; a file is truncated; or tensors are
        missing, unexpected, there twice, misshapen or of a wrong dtype, all of which are listed.
    """
    if jnp.dtype(dtype).name not in _DTYPES:
        raise ValueError(f"dtype must be one of {_DTYPES}, got {jnp.dtype(dtype).name}")
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory; pass one that holds a config.json")
    config = DSV4Config.from_hf(directory)
    stored: dict[str, StoredTensor] = {}
    problems = []
    for file in find_weight_files(directory):
        tensors = list_tensors(file)
        problems += [
            f"twice: {name}, in {stored[name].file.name} and {file.name}"
            for name in sorted(stored.keys() & tensors.keys())
        ]
        stored |= tensors
    sources = _sources(stored, problems)
    has_draft = any(name.startswith("mtp.") for name in sources)
    if not (has_draft and config.num_mtp_layers):
        config = dataclasses.replace(config, num_mtp_layers=0)
        sources = {name: s for name, s in sources.items() if not name.startswith("mtp.")}
    shapes = param_shapes(config, dtype)
    targets = all_targets(config, shapes)
    _check(sources, targets, problems, directory)
    with tqdm(total=len(targets), unit="tensor", disable=not progress, desc="loading") as bar:
        return config, _read_leaves(shapes, targets, sources, bar.update)


def _sources(stored: dict[str, StoredTensor], problems: list[str]) -> dict[str, _Source]:
    """Stored tensors by canonical name; names that mean the same tensor are problems."""
    sources: dict[str, _Source] = {}
    for name, source in _named_sources(stored):
        if name in sources:
            problems.append(f"twice: {name}, as {sources[name].name} and {source.name}")
        sources[name] = source
    return sources


def _named_sources(stored: dict[str, StoredTensor]) -> Iterator[tuple[str, _Source]]:
    """Scales join their quantised weights, fused experts come apart."""
    canonical = {canonical_name(name): name for name in stored}
    for original, tensor in stored.items():
        name = canonical_name(original)
        weight = canonical.get(name.removesuffix("scale") + "weight")
        if re.search(r"\.experts\.gate_up_proj$", name) and len(tensor.shape) == 3:
            yield from _fused_experts(name, original, tensor)
        elif re.search(r"\.experts\.down_proj$", name) and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                part = name.replace("down_proj", f"{expert}.w2.weight")
                yield part, _Source(tensor, (expert,), None, original)
        elif name.endswith(".scale") and weight and _is_quantised(stored[weight]):
            continue
        else:
            scale = canonical.get(name.removesuffix("weight") + "scale")
            used = stored[scale] if scale and _is_quantised(tensor) else None
            yield name, _Source(tensor, (), used, original)


def _is_quantised(tensor: StoredTensor) -> bool:
    return tensor.dtype.name == "float8_e4m3fn" or is_packed_fp4(tensor)


def _fused_experts(name: str, original: str, tensor: StoredTensor) -> Iterator[tuple[str, _Source]]:
    """[E, 2 * I, D] into w1 (the first I rows) and w3 of each expert."""
    num_experts, rows = tensor.shape[:2]
    for expert in range(num_experts):
        for w, part in (("w1", slice(0, rows // 2)), ("w3", slice(rows // 2, rows))):
            split = name.replace("gate_up_proj", f"{expert}.{w}.weight")
            yield split, _Source(tensor, (expert, part), None, original)


def _check(
    sources: dict[str, _Source],
    targets: dict[str, Target],
    problems: list[str],
    directory: pathlib.Path,
) -> None:
    problems = problems + [
        f"missing: {name} {list(target.shape)}"
        for name, target in targets.items()
        if name not in sources
    ]
    for name, source in sources.items():
        if name not in targets:
            problems.append(f"unexpected: {source.name} {list(source.tensor.shape)}")
            continue
        shape = targets[name].shape
        if _is_quantised(source.tensor) and (source.scale is None or len(shape) != 2):
            problem = "missing: scale of" if len(shape) == 2 else "wrong dtype:"
            problems.append(f"{problem} {source.name}, which is {source.tensor.dtype}")
        elif name.endswith("tid2eid") != np.issubdtype(source.tensor.dtype, np.integer) and (
            source.scale is None
        ):
            problems.append(f"wrong dtype: {source.name}, which is {source.tensor.dtype}")
        elif source.shape != shape:
            problems.append(
                f"wrong shape: {source.name} must be {list(shape)}, is {list(source.shape)}"
            )
        elif source.scale is not None:
            wanted = scale_shape(shape, is_packed=source.is_packed)
            if source.scale.shape != wanted:
                problems.append(
                    f"wrong shape: scale of {source.name} must be {list(wanted)}, "
                    f"is {list(source.scale.shape)}"
                )
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(f"{directory} does not fit its config.json:\n  {listed}")


def _read_leaves(
    shapes: DSV4Params,
    targets: dict[str, Target],
    sources: dict[str, _Source],
    advance: Callable[[], Any],
) -> DSV4Params:
    """Fills one stacked leaf after another."""
    by_leaf: dict[str, list[str]] = {}
    for name, target in targets.items():
        by_leaf.setdefault(target.leaf, []).append(name)
    arrays: dict[str, jax.Array] = {}
    for leaf, names in by_leaf.items():
        shape = get_leaf(shapes, leaf)
        stacked = np.empty(shape.shape, shape.dtype)
        for name in names:
            values = sources[name].read()
            if leaf.endswith("tid2eid"):
                _check_experts(sources[name].name, values, shapes)
            stacked[targets[name].index] = values.astype(shape.dtype)
            advance()
        arrays[leaf] = jnp.asarray(stacked)
    paths = jax.tree_util.tree_flatten_with_path(shapes)
    leaves = [arrays[dotted_path(path)] for path, _ in paths[0]]
    return jax.tree.unflatten(paths[1], leaves)


def _check_experts(name: str, table: np.ndarray, shapes: DSV4Params) -> None:
    num_experts = next(iter(shapes.stacked_layers.values())).ffn.gate.shape[-2]
    if table.min() < 0 or table.max() >= num_experts:
        raise ValueError(
            f"{name} must hold experts 0..{num_experts - 1}, got {table.min()}..{table.max()}"
        )
