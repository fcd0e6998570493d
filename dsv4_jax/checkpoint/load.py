"""Loads a checkpoint from safetensors."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dsv4_jax.checkpoint.names import Target, all_targets, dotted_path, get_leaf
from dsv4_jax.checkpoint.sources import Source, check_sources, list_problems, open_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params, param_shapes
from dsv4_jax.model.released import quantized_shape
from pallas_kernels.common.weights import MXFP4, BlockFP8

SHIPPED_CHECKPOINT = pathlib.Path(__file__).parents[1] / "data" / "checkpoint"
"""A small trained model that comes with the package: bytes as tokens, every type of layer."""

DEFAULT_DTYPE = jnp.bfloat16
"""Dtype of activations unless another one is given."""

WEIGHTS = ("stored", "bfloat16", "float32")
_DTYPES = ("float32", "bfloat16", "float16")


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    weights: str = "stored",
    dtype: Any = None,
    progress: bool = True,
) -> tuple[DSV4Config, DSV4Params]:
    """Reads a checkpoint directory.

    Files are memory-mapped and tensors read one at a time, so that the host holds no more than one
    stacked leaf beside what it has loaded. DeepSeek's names, those that transformers has in memory
    and those that it writes all load.

    Args:
      path: directory with a `config.json` and safetensors, single or sharded with an index.
      weights: "stored" keeps the bytes of FP8 and FP4 weights, as `BlockFP8` and `MXFP4`;
        "bfloat16" and "float32" decode them.
      dtype: dtype of activations and of the weights that are dense; what the release has in f32
        stays f32. None is that of decoded weights, or else bf16.
      progress: shows a bar on stderr.

    Returns:
      The config and the parameters. If the files hold no draft (`mtp.`) tensor at all, the config
      has no draft block, whatever `config.json` says; where `config.json` has none, draft tensors
      are ignored.

    Raises:
      FileNotFoundError: there is no config, or no safetensors file, or a shard is missing.
      ValueError: there are no such `weights`, or `dtype` is none of f32, bf16 and f16 or not that
        of decoded weights; a file is truncated; or tensors are missing, unexpected, there twice,
        misshapen, of a wrong dtype or damaged, or a kind of layer stores a weight in two formats.
        All of that is listed.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {WEIGHTS}, got {weights!r}")
    keep = weights == "stored"
    dtype = jnp.dtype((DEFAULT_DTYPE if keep else weights) if dtype is None else dtype)
    if dtype.name not in _DTYPES:
        raise ValueError(f"dtype must be one of {_DTYPES}, got {dtype.name}")
    if not keep and dtype.name != weights:
        raise ValueError(
            f"dtype must be that of the decoded weights, {weights}, got {dtype.name}; leave it out"
        )
    directory = pathlib.Path(path)
    config, sources, problems = open_checkpoint(directory)
    shapes = param_shapes(config, dtype)
    targets = all_targets(config, shapes)
    check_sources(sources, targets, problems, directory, keep=keep)
    by_leaf: dict[str, list[tuple[Target, Source]]] = {}
    for name, target in targets.items():
        by_leaf.setdefault(target.leaf, []).append((target, sources[name]))
    filled: dict[str, Any] = {}
    num_experts = config.num_routed_experts
    with tqdm(total=len(targets), unit="tensor", disable=not progress, desc="loading") as bar:
        for leaf, tensors in by_leaf.items():
            reader = _reader(get_leaf(shapes, leaf), tensors[0][1], keep=keep)
            for target, source in tensors:
                problems += source.damage()
                if target.is_hash_table:
                    problems += _unknown_experts(source, num_experts)
                if not problems:
                    reader.add(target.index, source)
                bar.update()
            filled[leaf] = jax.block_until_ready(reader.finish())
            del reader  # the next one's memory must not come on top
    if problems:
        raise ValueError(list_problems(directory, problems))
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    return config, jax.tree.unflatten(treedef, [filled[dotted_path(path)] for path, _ in leaves])


def _unknown_experts(source: Source, num_experts: int) -> Iterator[str]:
    table = source.read()
    if table.min() < 0 or table.max() >= num_experts:
        yield (
            f"{source.name} must hold experts 0..{num_experts - 1}, "
            f"got {table.min()}..{table.max()}"
        )


class _DenseReader:
    """Stacks a dense leaf on the host; quantised weights are decoded."""

    def __init__(self, shape: jax.ShapeDtypeStruct):
        self._stack = np.empty(shape.shape, shape.dtype)

    def add(self, index: tuple[int, ...], source: Source) -> None:
        self._stack[index] = source.decode().astype(self._stack.dtype)

    def finish(self) -> jax.Array:
        return jnp.asarray(self._stack)


class _FP8Reader:
    """Stacks codes and scales on the host."""

    def __init__(self, shape: jax.ShapeDtypeStruct, scale_dtype: type[np.generic]):
        wanted = quantized_shape(BlockFP8, shape.shape, shape.dtype, scale_dtype=scale_dtype)
        self._weight = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), wanted)

    def add(self, index: tuple[int, ...], source: Source) -> None:
        self._weight.codes[index] = source.read()
        self._weight.scale[index] = source.read_scale()

    def finish(self) -> BlockFP8:
        return jax.tree.map(jnp.asarray, self._weight)


class _FP4Reader:
    """Rearranges one matrix after the other on the device, into a stack that lies there."""

    def __init__(self, shape: jax.ShapeDtypeStruct):
        wanted = quantized_shape(MXFP4, shape.shape, shape.dtype)
        self._weight = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), wanted)

    def add(self, index: tuple[int, ...], source: Source) -> None:
        matrix = np.ascontiguousarray(source.read()), np.ascontiguousarray(source.read_scale())
        self._weight = _put_mxfp4(self._weight, np.asarray(index, np.int32), *matrix)

    def finish(self) -> MXFP4:
        return self._weight


def _reader(
    shape: jax.ShapeDtypeStruct, source: Source, *, keep: bool
) -> _DenseReader | _FP8Reader | _FP4Reader:
    """What fills a leaf of tensors that are stored like this one."""
    if keep and source.weight_format is BlockFP8:
        return _FP8Reader(shape, source.scale_dtype)
    return _FP4Reader(shape) if keep and source.weight_format is MXFP4 else _DenseReader(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _put_mxfp4(stack: MXFP4, index: jax.Array, pairs: jax.Array, scale: jax.Array) -> MXFP4:
    """Writes a matrix, in the released order, into a stack."""
    matrix = MXFP4.from_stored(pairs, scale, dtype=stack.dtype, activations=stack.activations)
    place = tuple(index[i] for i in range(index.shape[0]))
    return jax.tree.map(lambda leaf, one: leaf.at[place].set(one), stack, matrix)
