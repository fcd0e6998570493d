"""Products of rows with weights, as items of the kernels for Hopper and Blackwell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.common.pending import (
    ByGroup,
    ByToken,
    Pending,
    SplitSums,
    Unnormed,
    finish,
)
from pallas_kernels.common.rounding import round_to
from pallas_kernels.common.swiglu import swiglu as swiglu_of
from pallas_kernels.common.weights import INPUTS, ROWS, Weight
from pallas_kernels.product import call_shapes, decoded
from pallas_kernels.product.call_shapes import Shapes, TensorCore, Tiling
from pallas_kernels.product.choose_tiling import (
    choose_tiling,
    cuts_rows,
    plan_call,
    round_in_kernel,
)
from pallas_kernels.product.launch import Product, multiply_items
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.triton_rows import Rows, make_rows, padded
from pallas_kernels.product.triton_split_k import add_splits
from pallas_kernels.product.work import SwiGLU
from pallas_kernels.product.work_list import EvenItems

_FEW_ROWS = 64
_MOST_ADDED_ROWS = 2
"""Rows whose parts each CTA adds up; of more, as each reads all of them, XLA does."""


def multiply_rows(
    x: jax.Array | Pending,
    weights: Sequence[Weight],
    *,
    norms: Sequence[jax.Array | None] = (),
    eps: float = 0.0,
    dtype: DTypeLike = jnp.float32,
    in_parts: bool = False,
    tiling: Tiling | None = None,
    core: TensorCore | None = None,
) -> list[Any]:
    """[G, T, in] times [G, out, in] -> [G, T, out] for each weight; see `op.block_linears`."""
    num_groups, num_tokens, _ = x.shape
    if tiling is None and core is None and decoded.suits(weights, x):
        results = [decoded.multiply(x, weight, dtype=dtype) for weight in weights]
        return _normed(results, norms, eps)
    shapes = call_shapes.shapes_of(*weights, core=core)
    if tiling is None:
        shapes, tiling = plan_call(
            shapes, x.dtype, weights[0], num_tokens, num_groups, may_split=True
        )
    else:
        shapes = round_in_kernel(shapes, x.dtype, weights[0], tiling)
    widths = [weight.shape[-2] for weight in weights]
    plain = tiling.splits == 1 and all(norm is None for norm in norms)
    if plain and len(weights) > 1 and not shapes.core.has_memory:  # XLA would copy a slice of each
        results = _multiply(x, weights, shapes, tiling, dtype=dtype, apart=True)
        return [result.reshape(num_groups, num_tokens, -1) for result in results]
    sums = _multiply(x, weights, shapes, tiling, dtype=dtype if tiling.splits == 1 else jnp.float32)
    if any(norm is not None for norm in norms) and tiling.splits > 1:
        results = add_splits(sums, widths, norms=norms, eps=eps, dtype=dtype)
        return [result.reshape(num_groups, num_tokens, -1) for result in results]
    if isinstance(x, ByToken) and sums.shape[-1] % INPUTS == 0:
        parts = sums.reshape(-1, num_groups, num_tokens, sums.shape[-1])
        return [ByGroup(parts, jnp.dtype(dtype), (num_tokens,))]
    if in_parts and tiling.splits > 1 and len(weights) == 1 and norms[0] is None:
        parts = SplitSums(sums, jnp.dtype(dtype))
        return [parts.reshape(num_groups, num_tokens, -1)]
    joined = sums[0] if tiling.splits == 1 else round_to(jnp.sum(sums, axis=0), dtype)
    joined = joined.reshape(num_groups, num_tokens, -1)
    firsts = [0, *itertools.accumulate(widths)]
    results = [
        joined[..., first : first + width] for first, width in zip(firsts, widths, strict=False)
    ]
    return _normed(results, norms, eps)


def _normed(
    results: list[jax.Array], norms: Sequence[jax.Array | None], eps: float
) -> list[jax.Array]:
    return [
        result if norm is None else rms_norm(result, norm, eps=eps)
        for result, norm in itertools.zip_longest(results, norms)
    ]


def swiglu_rows(
    x: jax.Array,
    gate: Weight,
    up: Weight,
    *,
    limit: float,
    tiling: Tiling | None = None,
    core: TensorCore | None = None,
    rows: Rows | None = None,
) -> jax.Array:
    """[T, in], [out, in] twice -> [T, out]; see `op.swiglu_linear`.

    SwiGLU is part of the product, except of few rows whose tiles would leave SMs idle
    (`cuts_rows`): their inputs are split, so that all SMs read, and SwiGLU is XLA's. `rows` are
    many, which `make_rows` has made of x, with as many to spare as a tile has.
    """
    weights = [jax.tree.map(lambda leaf: leaf[None], weight) for weight in (gate, up)]
    shapes = call_shapes.shapes_of(*weights, is_gated=True, core=core)
    splits = x.shape[0] <= _FEW_ROWS and not cuts_rows(shapes, x.shape[0])
    if tiling is None and splits and gate.shape[-2] % ROWS == 0:
        gated, raised = multiply_rows(x[None], weights, dtype=x.dtype, core=core)
        return swiglu_of(gated[0], raised[0], limit).astype(x.dtype)
    tiling = tiling or choose_tiling(shapes, x.shape[0], 1, may_split=False)
    swiglu = SwiGLU(limit, x.dtype)
    return _multiply(x[None], weights, shapes, tiling, dtype=x.dtype, swiglu=swiglu, rows=rows)[0]


def _multiply(
    x: jax.Array | Pending,
    weights: Sequence[Weight],
    shapes: Shapes,
    tiling: Tiling,
    *,
    dtype: DTypeLike,
    swiglu: SwiGLU | None = None,
    apart: bool = False,
    rows: Rows | RawRows | None = None,
) -> Any:
    """[S, G * T, out], or one of each weight; groups are the weights of a stack."""
    num_groups, num_tokens, dim = x.shape
    spread = num_tokens
    if shapes.rounds_rows:
        is_added = isinstance(x, ByGroup) and num_tokens > _MOST_ADDED_ROWS
        rows = RawRows.of(finish(x) if is_added else x)
    elif rows is None:
        spread = padded(num_tokens) if num_groups > 1 else num_tokens
        is_plain = shapes.is_dense or isinstance(x, Unnormed)
        rows = make_rows(
            finish(x).reshape(-1, dim) if is_plain else RawRows.of(x),
            weights[0],
            num_spare=call_shapes.scale_columns(tiling.columns),
            num_groups=num_groups,
        )
    items = EvenItems(num_groups, num_tokens, spread)
    product = Product(rows, weights, items, shapes, tiling, swiglu)
    return multiply_items(product, num_rows=num_groups * num_tokens, dtype=dtype, apart=apart)
