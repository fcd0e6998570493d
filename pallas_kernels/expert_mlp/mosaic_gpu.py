"""The experts that tokens picked, in two launches of the kernel that multiplies items.

    order     pairs sorted by expert, tiles of an expert's rows      `triton_worklist`, XLA for many
    rows      each pair's token, then the hidden values, in E4M3     `block_linear/triton_rows`, or
                                                                     the kernel itself if few
    hidden    share * SwiGLU of gate and up, tile by tile            `block_linear/multiply_items`
    down      the product with w2, tile by tile                      the same
    sum       of a token's pairs, in the order in which it picked    XLA

Bytes: the weights of experts that were picked. An expert with more rows than a tile is read again
for the next, out of L2. Measurements: docs/kernels/expert_mlp.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import call_shapes
from pallas_kernels.block_linear.call_shapes import Shapes, TensorCore, Tiling
from pallas_kernels.block_linear.items import Items
from pallas_kernels.block_linear.multiply_items import multiply_items
from pallas_kernels.block_linear.round_rows import RawRows
from pallas_kernels.block_linear.triton_rows import make_rows, padded
from pallas_kernels.block_linear.work import SwiGLU
from pallas_kernels.common.weights import Weight
from pallas_kernels.expert_mlp import triton_worklist
from pallas_kernels.expert_mlp.arguments import Arguments
from pallas_kernels.expert_mlp.worklist import make_worklist


def expert_mlp(
    arguments: Arguments,
    *,
    tilings: tuple[Tiling, Tiling] | None = None,
    core: TensorCore | None = None,
) -> jax.Array:
    """See `op.expert_mlp`."""
    x, expert_ids, expert_weights, w1, w3, w2, limit = arguments
    num_experts, num_pairs = w1.shape[0], expert_ids.size

    def plan(number: int, *weights: Weight) -> tuple[Shapes, Tiling]:
        shapes = call_shapes.shapes_of(*weights, is_gated=number == 0, core=core)
        if tilings is not None:
            tiling = tilings[number]
            return call_shapes.round_in_kernel(shapes, x.dtype, weights[0], tiling), tiling
        num_picked = min(num_pairs, num_experts)
        expected = _expected_rows(expert_ids, num_experts)
        return call_shapes.plan_call(
            shapes, x.dtype, weights[0], expected, num_picked, may_split=False
        )

    gate_shapes, gate_tiling = plan(0, w1, w3)
    down_shapes, down_tiling = plan(1, w2)
    spare = call_shapes.scale_columns(gate_tiling.columns)
    token, row, expert, first, num_rows, share = _sort(
        expert_ids, expert_weights, num_experts, gate_tiling.columns, spare
    )
    items = Items(expert, first, first, num_rows)
    is_dense = gate_shapes.is_dense  # then hidden values are the next rows as they are
    if gate_shapes.rounds_rows:
        rows = RawRows(x[None], token)
    else:
        rows = make_rows(x, w1, num_spare=spare, token=token)
    hidden = multiply_items(
        rows,
        [w1, w3],
        items,
        shapes=gate_shapes,
        tiling=gate_tiling,
        num_rows=padded(token.shape[0] + spare) if is_dense else token.shape[0],
        swiglu=SwiGLU(limit, x.dtype),
        share=share,
        dtype=x.dtype,
    )
    if down_shapes.rounds_rows:
        rows = RawRows(hidden)
    else:
        rows = make_rows(hidden[0], w2, num_spare=0 if is_dense else spare)
    down = multiply_items(
        rows,
        [w2],
        items,
        shapes=down_shapes,
        tiling=down_tiling,
        num_rows=token.shape[0],
    )
    is_pair = (expert_ids >= 0) & (expert_ids < num_experts)
    of_pairs = jnp.where(is_pair[..., None], down[0, row], 0)
    return jnp.sum(of_pairs, axis=1).astype(x.dtype)


def _sort(
    expert_ids: jax.Array, expert_weights: jax.Array, num_experts: int, tile_rows: int, spare: int
) -> tuple[jax.Array, ...]:
    """See `triton_worklist.make_worklist`, for any number of pairs."""
    if expert_ids.size <= triton_worklist.MAX_PAIRS:
        return triton_worklist.make_worklist(
            expert_ids, expert_weights, num_experts, tile_rows, spare
        )
    work = make_worklist(expert_ids, num_experts, tile_rows)
    share = jnp.zeros(work.token.shape[0] + spare, jnp.float32).at[work.row].set(expert_weights)
    return work.token, work.row, work.expert, work.first, work.num_rows, share


def _expected_rows(expert_ids: jax.Array, num_experts: int) -> int:
    """Rows of a tile: twice what an expert gets if all are picked alike, at most all tokens."""
    num_tokens, picks = expert_ids.shape
    return min(num_tokens, max(8, 2 * -(-num_tokens * picks // num_experts)))
