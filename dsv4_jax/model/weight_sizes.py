"""What parameters take in memory: bytes by family and by number format."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import Any

import jax

from pallas_kernels.common.weights import MXFP4, BlockFP8, Weight, is_quantized, weight_bytes

FORMATS = ("BF16", "F32", "FP8", "MXFP4", "I32")
"""FP8 and MXFP4 include their scales."""

_DENSE_FORMATS = {"bfloat16": "BF16", "float32": "F32", "int32": "I32"}
_FAMILIES = (
    ("draft", r"^mtp\."),
    ("embedding", r"^embed$"),
    ("head", r"^head$"),
    ("hyper-connections", r"(^|\.)hc_(attn|ffn|head)\."),
    ("norms", r"norm$"),
    ("compressors", r"\.(compressor|source)\."),
    ("indexer", r"\.indexer\."),
    ("attention", r"\.attn\."),
    ("engram", r"\.engram\."),
    ("routed experts", r"\.ffn\.w[123]$"),
    ("shared expert", r"\.ffn\.shared_w[123]$"),
    ("routing", r"\.ffn\.(gate|bias)$"),
    ("hash tables", r"\.ffn\.tid2eid$"),
)
"""The first whose expression is found in a leaf's dotted path."""


def walk_weights(params: Any) -> Iterator[tuple[str, Weight]]:
    """(dotted path, weight) of every parameter; a quantised weight is one."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def weight_format(weight: Weight) -> str:
    """One of `FORMATS`.

    Raises:
      ValueError: the dtype is none that parameters have.
    """
    if isinstance(weight, BlockFP8):
        return "FP8"
    if isinstance(weight, MXFP4):
        return "MXFP4"
    name = weight.dtype.name
    if name not in _DENSE_FORMATS:
        raise ValueError(f"dense weights must be of {list(_DENSE_FORMATS)}, got {name}")
    return _DENSE_FORMATS[name]


def weight_family(path: str) -> str:
    """The family of the weight at a dotted path of the parameters."""
    return next(name for name, pattern in _FAMILIES if re.search(pattern, path))


def bytes_by_family(params: Any) -> dict[str, dict[str, int]]:
    """{family: {format: bytes}} of parameters or of their shapes, the draft last."""
    names = [name for name, _ in _FAMILIES[1:]] + ["draft"]
    sizes = {name: collections.Counter[str]() for name in names}
    for path, weight in walk_weights(params):
        sizes[weight_family(path)][weight_format(weight)] += weight_bytes(weight)
    return {name: dict(size) for name, size in sizes.items() if size}
