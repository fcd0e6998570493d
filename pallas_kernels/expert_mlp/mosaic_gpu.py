"""The experts that tokens picked, in two launches of the kernel that multiplies items.

    order     pairs sorted by expert, tiles of an expert's rows      `triton_worklist`; of many
                                                                     `triton_counting`, of a prompt
                                                                     XLA; one token needs none
    unpack    experts of many rows, into block FP8                   `triton_unpack`
    rows      each pair's token, then the hidden values, in E4M3     `product/triton_rows`, or
                                                                     the kernel itself if few; of a
                                                                     prompt each token is rounded
                                                                     once, for the shared expert too
    hidden    share * SwiGLU of gate and up, tile by tile            `product/launch`
    down      the product with w2, tile by tile                      the same
              few tokens go through the shared expert in the same two launches
    sum       of a token's pairs, in the order in which it picked    XLA, or what reads one token's

Bytes: the weights of experts that were picked. An expert with more rows than a tile is read again
for the next, out of L2. Measurements: docs/kernels/expert_mlp.md.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import block_linear, block_linear_in_parts, swiglu_linear
from pallas_kernels.common.pending import SplitSums, finish
from pallas_kernels.common.weights import MXFP4, BlockFP8, Weight
from pallas_kernels.expert_mlp import triton_counting, triton_worklist
from pallas_kernels.expert_mlp.arguments import Arguments
from pallas_kernels.expert_mlp.triton_unpack import can_unpack, unpack_to_fp8
from pallas_kernels.expert_mlp.worklist import make_worklist
from pallas_kernels.product import call_shapes
from pallas_kernels.product.call_shapes import MAX_PRODUCT, Shapes, TensorCore, Tiling
from pallas_kernels.product.choose_tiling import plan_call, round_in_kernel
from pallas_kernels.product.launch import Product, multiply_items
from pallas_kernels.product.multiply import swiglu_rows
from pallas_kernels.product.raw_rows import RawRows
from pallas_kernels.product.triton_rows import make_rows, padded, pick_rows
from pallas_kernels.product.work import SwiGLU
from pallas_kernels.product.work_list import EvenItems, Items, PickedItems

Mixture = tuple[jax.Array | SplitSums, jax.Array | SplitSums | None] | SplitSums
"""What the routed experts give and what the shared one does, or the sum of both."""


def expert_mlp(
    arguments: Arguments,
    *,
    in_parts: bool = False,
    tilings: tuple[Tiling, Tiling] | None = None,
    core: TensorCore | None = None,
) -> Mixture:
    """See `op.expert_mlp`; the sum of the routed experts, and the shared one's result.

    `in_parts` allows them in parts, or their sum in parts instead.
    """
    if tilings is None:
        arguments = _unpack_for_many_rows(arguments, core)
    x, expert_ids, _, w1, w3, w2, *_, picked_among = arguments
    (num_tokens, picks), num_experts = expert_ids.shape, w1.shape[0]
    num_pairs = num_tokens * picks
    num_picked = min(num_pairs, num_experts)
    expected = expected_rows(num_tokens, picks, picked_among or num_experts)

    def plan(number: int, *weights: Weight) -> tuple[Shapes, Tiling]:
        shapes = call_shapes.shapes_of(*weights, is_gated=number == 0, core=core)
        if tilings is None:
            return _plan(shapes, x, weights[0], expected, num_picked)
        tiling = tilings[number]
        return round_in_kernel(shapes, x.dtype, weights[0], tiling), tiling

    gate, down = plan(0, w1, w3), plan(1, w2)
    if x.shape[0] == 1 and num_pairs and gate[0].rounds_rows and down[0].rounds_rows:
        return _one_token(arguments, gate, down, core, in_parts=in_parts)
    return _sorted_tokens(arguments, gate, down, core, in_parts=in_parts)


_MANY_PAIRS = 4096
"""From so many on those of experts elsewhere are left out where rows are rounded and summed."""
_MANY_ROWS = 32
"""Rows of an expert from which on products bind it: padding costs more than a second tile."""
UNPACKED_ROWS = 512
"""Rows of an expert from which on MXFP4 is unpacked once, into memory, and not in each tile."""


def _unpack_for_many_rows(arguments: Arguments, core: TensorCore | None) -> Arguments:
    """The same call with experts in block FP8, where that takes less time."""
    w1, w3, w2 = arguments.w1, arguments.w3, arguments.w2
    mean = arguments.expert_ids.size // (arguments.picked_among or w1.shape[0])
    if mean < UNPACKED_ROWS or (core or call_shapes.choose_core()).has_memory:
        return arguments
    if can_unpack(w1) and can_unpack(w3) and can_unpack(w2):
        return arguments._replace(w1=unpack_to_fp8(w1), w3=unpack_to_fp8(w3), w2=unpack_to_fp8(w2))
    return arguments


def expected_rows(num_tokens: int, picks: int, picked_among: int) -> int:
    """Rows of a tile: what an expert hardly exceeds if all are picked alike, at most all tokens."""
    mean = -(-num_tokens * picks // picked_among)
    most = 2 * mean if mean < _MANY_ROWS else mean + 2 * math.isqrt(mean)
    return min(num_tokens, max(8, most))


def _sorted_tokens(
    arguments: Arguments,
    gate_plan: tuple[Shapes, Tiling],
    down_plan: tuple[Shapes, Tiling],
    core: TensorCore | None,
    *,
    in_parts: bool,
) -> Mixture:
    """Pairs sorted by expert: an expert's weights are read once for all tokens that picked it."""
    x, expert_ids, expert_weights, w1, w3, w2, limit, shared, picked_among = arguments
    num_experts = w1.shape[0]
    (gate_shapes, gate_tiling), (down_shapes, _) = gate_plan, down_plan
    spare = call_shapes.scale_columns(gate_tiling.columns)
    token, row, expert, first, num_rows, share = _sort(
        expert_ids, expert_weights, num_experts, gate_tiling.columns, spare
    )
    items = Items(expert, first, first, num_rows, most=x.shape[0])
    total = token.shape[0]
    is_pair = (expert_ids >= 0) & (expert_ids < num_experts)
    num_used = None
    if expert_ids.size >= _MANY_PAIRS and (picked_among or 0) > num_experts:
        # Pairs of experts that are elsewhere come last: their rows are not rounded, and what has no
        # result reads row 0, which lies in L2.
        num_used = jnp.max(jnp.where(num_rows > 0, first + num_rows, 0))
        row = jnp.where(is_pair, row, 0)
    is_dense = gate_shapes.is_dense  # then hidden values are the next rows as they are
    rounded = None
    if gate_shapes.rounds_rows:
        rows = RawRows(x[None], token)
    elif _round_once(arguments):
        rounded = make_rows(x, w1, num_spare=max(spare, MAX_PRODUCT))  # the shared expert's tiles
        rows = pick_rows(rounded, token, num_spare=spare, num_used=num_used)
    else:
        rows = make_rows(x, w1, num_spare=spare, token=token, num_used=num_used)
    swiglu = SwiGLU(limit, x.dtype)
    gate = Product(rows, [w1, w3], items, *gate_plan, swiglu, share)
    joined = None
    if shared is not None and gate_shapes.rounds_rows and down_shapes.rounds_rows:
        joined = _join_shared(x, shared, w1, w2, swiglu, total, core)
    height = total + (x.shape[0] if joined else 0)
    hidden = multiply_items(
        *([joined[0]] if joined else []),
        gate,
        num_rows=padded(total + spare) if is_dense else height,
        dtype=x.dtype,
    )
    if down_shapes.rounds_rows:
        rows = RawRows(hidden)
    else:
        num_spare = 0 if is_dense else spare
        rows = make_rows(hidden[0], w2, num_spare=num_spare, num_used=num_used)
    down = Product(rows, [w2], items, *down_plan)
    if joined:
        down = multiply_items(dataclasses.replace(joined[1], rows=rows), down, num_rows=height)
    else:
        # Of many pairs each is rounded, as the release does; half the bytes are written and read.
        is_many = expert_ids.size >= _MANY_PAIRS
        down = multiply_items(down, num_rows=height, dtype=x.dtype if is_many else jnp.float32)
    # Else XLA computes the rows again for each value that it adds.
    row = jax.lax.optimization_barrier(row)
    of_pairs = jnp.where(is_pair[..., None], down[0, row], 0)
    routed = jnp.sum(of_pairs.astype(jnp.float32), axis=1).astype(x.dtype)
    if joined:
        return routed, down[0, total:].astype(x.dtype)
    if rounded is not None and shared is not None and _shares_rows(x, shared, w1):
        gate, up, down = shared
        hidden = swiglu_rows(x, gate, up, limit=limit, core=core, rows=rounded)
        return routed, block_linear(hidden, down)
    return routed, _shared_alone(x, shared, limit, in_parts=in_parts)


def _round_once(arguments: Arguments) -> bool:
    """Whether rows are rounded before they are picked: of many, each of which is picked often.

    Rounding moves three bytes for each value and picking two.
    """
    w1, num_pairs = arguments.w1, arguments.expert_ids.size
    num_here = num_pairs * w1.shape[0] // (arguments.picked_among or w1.shape[0])
    is_quantized = isinstance(w1, BlockFP8 | MXFP4)
    return is_quantized and num_pairs >= _MANY_PAIRS and num_here > 3 * arguments.x.shape[0]


def _shares_rows(x: jax.Array, shared: tuple[Weight, Weight, Weight], w1: Weight) -> bool:
    """Whether the shared expert has a kernel that takes rows as the others do."""
    gate, up, _ = shared
    if not (isinstance(gate, BlockFP8) and isinstance(w1, BlockFP8)):
        return False
    return gate.activations == w1.activations and call_shapes.find_obstacle(x, gate, up) is None


def _one_token(
    arguments: Arguments,
    gate_plan: tuple[Shapes, Tiling],
    down_plan: tuple[Shapes, Tiling],
    core: TensorCore | None,
    *,
    in_parts: bool,
) -> Mixture:
    """The experts of one token are distinct: each is an item of one row, and nothing is sorted."""
    x, expert_ids, expert_weights, w1, w3, w2, limit, shared, _ = arguments
    picks = expert_ids.size
    swiglu = SwiGLU(limit, x.dtype)
    into = PickedItems(expert_ids[0], w1.shape[0], share_row=True)
    out_of = dataclasses.replace(into, share_row=False)
    gates = [Product(RawRows(x[None]), [w1, w3], into, *gate_plan, swiglu, expert_weights[0])]
    joined = None
    if shared is not None:
        joined = _join_shared(x, shared, w1, w2, swiglu, picks, core)
    if joined:
        gates.insert(0, joined[0])
    height = picks + len(gates) - 1
    rows = RawRows(multiply_items(*gates, num_rows=height, dtype=x.dtype))
    downs = [Product(rows, [w2], out_of, *down_plan)]
    if joined:
        downs.insert(0, dataclasses.replace(joined[1], rows=rows))
    down = multiply_items(*downs, num_rows=height)
    if joined and in_parts:
        return SplitSums(down.reshape(height, 1, -1), x.dtype)
    routed = SplitSums(down[0, :picks, None], x.dtype)
    if joined:
        return finish(routed), down[0, picks:].astype(x.dtype)
    routed = routed if in_parts else finish(routed)
    return routed, _shared_alone(x, shared, limit, in_parts=in_parts)


def _plan(
    shapes: Shapes, x: jax.Array, weight: Weight, num_rows: int, num_groups: int
) -> tuple[Shapes, Tiling]:
    return plan_call(
        shapes, x.dtype, weight, num_rows, num_groups, may_split=False, shares_items=True
    )


def _join_shared(
    x: jax.Array,
    shared: tuple[Weight, Weight, Weight],
    w1: Weight,
    w2: Weight,
    swiglu: SwiGLU,
    first_row: int,
    core: TensorCore | None,
) -> tuple[Product, Product] | None:
    """The shared expert as items of the routed ones' launches, if it has their sizes and a kernel.

    Its weights take longer to read, in FP8, so it comes first. Hidden values and results follow
    those of the routed experts, from `first_row` on.
    """
    if call_shapes.find_obstacle(x, *shared) is not None:
        return None
    gate, up, down = (jax.tree.map(lambda leaf: leaf[None], weight) for weight in shared)
    gate_shapes = call_shapes.shapes_of(gate, up, is_gated=True, core=core)
    down_shapes = call_shapes.shapes_of(down, core=core)
    num_tokens = x.shape[0]
    plans = [_plan(gate_shapes, x, gate, num_tokens, 1), _plan(down_shapes, x, down, num_tokens, 1)]
    has_sizes = gate.shape[-2] == w1.shape[-2] and down.shape[-2] == w2.shape[-2]
    if not has_sizes or not all(shapes.rounds_rows for shapes, _ in plans):
        return None
    into = EvenItems(1, num_tokens, num_tokens, target=first_row)
    out_of = EvenItems(1, num_tokens, num_tokens, first=first_row, target=first_row)
    rows = RawRows(x[None])
    return (
        Product(rows, [gate, up], into, *plans[0], swiglu),
        Product(rows, [down], out_of, *plans[1]),
    )


def _shared_alone(
    x: jax.Array, shared: tuple[Weight, Weight, Weight] | None, limit: float, *, in_parts: bool
) -> jax.Array | SplitSums | None:
    if shared is None:
        return None
    gate, up, down = shared
    hidden = swiglu_linear(x, gate, up, limit=limit)
    return (block_linear_in_parts if in_parts else block_linear)(hidden, down)


def _sort(
    expert_ids: jax.Array, expert_weights: jax.Array, num_experts: int, tile_rows: int, spare: int
) -> tuple[jax.Array, ...]:
    """See `triton_worklist.make_worklist`, for any number of pairs."""
    for kernel in (triton_worklist, triton_counting):
        if expert_ids.size <= kernel.MAX_PAIRS:
            return kernel.make_worklist(expert_ids, expert_weights, num_experts, tile_rows, spare)
    work = make_worklist(expert_ids, num_experts, tile_rows)
    share = jnp.zeros(work.token.shape[0] + spare, jnp.float32).at[work.row].set(expert_weights)
    return work.token, work.row, work.expert, work.first, work.num_rows, share
