"""The experts that tokens picked, in two launches of the kernel that multiplies items.

    order     pairs sorted by expert, tiles of an expert's rows      `triton_worklist`; of many
                                                                     `triton_counting`, of a prompt
                                                                     XLA; one token needs none
    unpack    experts of many rows, into block FP8                   `triton_unpack`
    rows      each pair's token, then the hidden values, in E4M3     `product/triton_rows`, or
                                                                     the kernel itself if few; of a
                                                                     prompt each token is rounded
                                                                     once, for the shared expert too
    hidden    share * SwiGLU of gate and up, tile by tile            `product.launch`
    down      the product with w2, tile by tile                      the same
              few tokens go through the shared expert in the same two launches
    sum       of a token's pairs, in the order in which it picked    XLA, or what reads one token's

Bytes: the weights of experts that were picked. An expert with more rows than a tile is read again
for the next, out of L2. Measurements: docs/kernels/expert_mlp.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_linear import block_linear, block_linear_in_parts, swiglu_linear
from pallas_kernels.common.pending import MaybeSplit, Output, PickedSums, SplitSums, finish
from pallas_kernels.common.weights import MXFP4, BlockFP8, Weight
from pallas_kernels.expert_mlp import triton_counting, triton_worklist
from pallas_kernels.expert_mlp.reference import Arguments
from pallas_kernels.expert_mlp.triton_unpack import can_unpack, unpack_to_fp8
from pallas_kernels.expert_mlp.worklist import SortedPairs, sort_pairs
from pallas_kernels.product import (
    MAX_MMA_ROWS,
    EvenItems,
    Items,
    PickedItems,
    Product,
    RawRows,
    Shapes,
    SwiGLU,
    TensorCore,
    Tiling,
    choose_core,
    find_obstacle,
    launch,
    make_rows,
    padded,
    pick_rows,
    plan,
    scale_rows,
    swiglu_rows,
)

Mixture = tuple[Output, MaybeSplit | None]
"""What the routed experts give, and the shared one; None if it is none, or among the first's parts.
"""


def expert_mlp(
    arguments: Arguments,
    *,
    in_parts: bool = False,
    tilings: tuple[Tiling, Tiling] | None = None,
    core: TensorCore | None = None,
) -> Mixture:
    """See `op.expert_mlp`; the sum of the routed experts, and the shared one's result.

    `in_parts` allows them in parts, and the shared one's among those of the first.
    """
    if tilings is None:
        arguments = _unpack_for_many_rows(arguments, core)
    x, w1, w3, w2 = arguments.x, arguments.w1, arguments.w3, arguments.w2
    (num_tokens, picks), num_experts = arguments.expert_ids.shape, w1.shape[0]
    num_pairs = num_tokens * picks
    expected = expected_rows(num_tokens, picks, arguments.picked_among or num_experts)
    choose = functools.partial(_plan, x, expected, min(num_pairs, num_experts), core=core)
    for_gate, for_down = tilings or (None, None)
    gate = choose([w1, w3], is_gated=True, tiling=for_gate)
    down = choose([w2], is_gated=False, tiling=for_down)
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
    if mean < UNPACKED_ROWS or (core or choose_core()).has_tmem:
        return arguments
    if can_unpack(w1) and can_unpack(w3) and can_unpack(w2):
        return arguments._replace(w1=unpack_to_fp8(w1), w3=unpack_to_fp8(w3), w2=unpack_to_fp8(w2))
    return arguments


def expected_rows(num_tokens: int, picks: int, picked_among: int) -> int:
    """Rows of a tile: what an expert hardly exceeds if all are picked alike, at most all tokens."""
    mean = pl.cdiv(num_tokens * picks, picked_among)
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
    x, expert_ids, shared = arguments.x, arguments.expert_ids, arguments.shared
    w1, w3, w2, num_experts = arguments.w1, arguments.w3, arguments.w2, arguments.w1.shape[0]
    (gate_shapes, gate_tiling), (down_shapes, _) = gate_plan, down_plan
    spare = scale_rows(gate_tiling.tile_m)
    # Pairs in the order of their experts; `row` is where each pair has come to lie.
    pairs = _sort(expert_ids, arguments.expert_weights, num_experts, gate_tiling.tile_m, spare)
    token, row, first = pairs.token, pairs.row, pairs.first
    items = Items(pairs.expert, first, first, pairs.num_rows, most=x.shape[0])
    total = token.shape[0]
    is_pair = (expert_ids >= 0) & (expert_ids < num_experts)
    num_used = None
    if expert_ids.size >= _MANY_PAIRS and (arguments.picked_among or 0) > num_experts:
        # Pairs of experts that are elsewhere come last: their rows are not rounded, and what has no
        # result reads row 0, which lies in L2.
        num_used = jnp.max(jnp.where(pairs.num_rows > 0, first + pairs.num_rows, 0))
        row = jnp.where(is_pair, row, 0)
    is_dense = gate_shapes.is_dense  # then hidden values are the next rows as they are
    rounded = None
    if gate_shapes.rounds_rows:
        # The product gathers each row by its token, and rounds it itself.
        rows = RawRows(x[None], token)
    elif _round_once(arguments):
        rounded = make_rows(x, w1, num_spare=max(spare, MAX_MMA_ROWS))  # the shared expert's tiles
        rows = pick_rows(rounded, token, num_spare=spare, num_used=num_used)
    else:
        rows = make_rows(x, w1, num_spare=spare, token=token, num_used=num_used)
    swiglu = SwiGLU(arguments.limit, x.dtype)
    gate = Product(rows, [w1, w3], items, *gate_plan, swiglu, pairs.share)
    joined = None
    if shared is not None and gate_shapes.rounds_rows and down_shapes.rounds_rows:
        # Its hidden values follow those of the pairs in one array, behind all rows that any routing
        # takes.
        joined = _join_shared(x, shared, w1, w2, swiglu, total, core)
    height = total + (x.shape[0] if joined else 0)
    hidden = launch(
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
        # The shared expert's items come first: theirs take longest.
        down = launch(dataclasses.replace(joined[1], rows=rows), down, num_rows=height)
    else:
        # Of many pairs each is rounded, as the release does; half the bytes are written and read.
        is_many = expert_ids.size >= _MANY_PAIRS
        dtype = x.dtype if is_many else jnp.dtype(jnp.float32)
        down = launch(down, num_rows=height, dtype=dtype)
    if joined and in_parts:
        sums = PickedSums(down[0], row, expert_ids, num_experts, total, x.dtype, lead=(x.shape[0],))
        return sums, None
    # Else XLA computes the rows again for each value that it adds.
    row = jax.lax.optimization_barrier(row)
    of_pairs = jnp.where(is_pair[..., None], down[0, row], 0)  # [T, picks, dim], 0 for no expert
    routed = jnp.sum(of_pairs.astype(jnp.float32), axis=1).astype(x.dtype)  # [T, dim]
    if joined:
        return routed, down[0, total:].astype(x.dtype)
    if rounded is not None and shared is not None and _shares_rows(x, shared, w1):
        gate, up, down = shared
        hidden = swiglu_rows(x, gate, up, limit=arguments.limit, core=core, rows=rounded)
        return routed, block_linear(hidden, down)
    return routed, _shared_alone(x, shared, arguments.limit, in_parts=in_parts)


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
    return gate.activations == w1.activations and find_obstacle(x, gate, up) is None


def _one_token(
    arguments: Arguments,
    gate_plan: tuple[Shapes, Tiling],
    down_plan: tuple[Shapes, Tiling],
    core: TensorCore | None,
    *,
    in_parts: bool,
) -> Mixture:
    """The experts of one token are distinct: each is an item of one row, and nothing is sorted."""
    x, expert_ids, shared = arguments.x, arguments.expert_ids, arguments.shared
    w1, w3, w2 = arguments.w1, arguments.w3, arguments.w2
    picks = expert_ids.size
    swiglu = SwiGLU(arguments.limit, x.dtype)
    # Into the hidden values all experts read the one token; out of them each reads its own row.
    into = PickedItems(expert_ids[0], w1.shape[0], share_row=True)
    out_of = dataclasses.replace(into, share_row=False)
    share = arguments.expert_weights[0]
    gates = [Product(RawRows(x[None]), [w1, w3], into, *gate_plan, swiglu, share)]
    joined = None
    if shared is not None:
        joined = _join_shared(x, shared, w1, w2, swiglu, picks, core)
    if joined:
        gates.insert(0, joined[0])
    height = picks + len(gates) - 1
    # [height, hidden]: the token's row of each expert, and of the shared one behind them.
    rows = RawRows(launch(*gates, num_rows=height, dtype=x.dtype))
    downs = [Product(rows, [w2], out_of, *down_plan)]
    if joined:
        downs.insert(0, dataclasses.replace(joined[1], rows=rows))
    down = launch(*downs, num_rows=height)  # f32[1, height, dim]
    if joined and in_parts:
        return SplitSums(down.reshape(height, 1, -1), x.dtype), None
    # Each pick's row is a part of the one token's sum.
    routed = SplitSums(down[0, :picks, None], x.dtype)
    if joined:
        return finish(routed), down[0, picks:].astype(x.dtype)
    routed = routed if in_parts else finish(routed)
    return routed, _shared_alone(x, shared, arguments.limit, in_parts=in_parts)


def _plan(
    x: jax.Array,
    num_rows: int,
    num_weights: int,
    weights: Sequence[Weight],
    *,
    is_gated: bool,
    core: TensorCore | None,
    tiling: Tiling | None = None,
) -> tuple[Shapes, Tiling]:
    """As of a launch by itself, but for the list of items, which two launches share."""
    return plan(
        weights,
        x.dtype,
        num_rows=num_rows,
        num_weights=num_weights,
        is_gated=is_gated,
        may_split=False,
        shares_items=True,
        tiling=tiling,
        core=core,
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
    if find_obstacle(x, *shared, small_blocks=True) is not None:
        return None
    gate, up, down = (jax.tree.map(lambda leaf: leaf[None], weight) for weight in shared)
    num_tokens = x.shape[0]
    choose = functools.partial(_plan, x, num_tokens, 1, core=core)
    plans = [choose([gate, up], is_gated=True), choose([down], is_gated=False)]
    # Products of one launch have one grid, and so as many tiles of outputs each.
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
) -> MaybeSplit | None:
    if shared is None:
        return None
    gate, up, down = shared
    hidden = swiglu_linear(x, gate, up, limit=limit)
    return (block_linear_in_parts if in_parts else block_linear)(hidden, down)


def _sort(
    expert_ids: jax.Array, expert_weights: jax.Array, num_experts: int, tile_rows: int, spare: int
) -> SortedPairs:
    """See `triton_worklist.sort_few_pairs`, for any number of pairs."""
    arguments = expert_ids, expert_weights, num_experts, tile_rows, spare
    if expert_ids.size <= triton_worklist.MAX_PAIRS:
        return triton_worklist.sort_few_pairs(*arguments)
    if expert_ids.size <= triton_counting.MAX_PAIRS:
        return triton_counting.sort_many_pairs(*arguments)
    work = sort_pairs(expert_ids, num_experts, tile_rows)
    # Rows of nobody have a share of 0 here; the kernels leave them arbitrary, as no item has them.
    share = jnp.zeros(work.token.shape[0] + spare, jnp.float32).at[work.row].set(expert_weights)
    return SortedPairs(work.token, work.row, work.expert, work.first, work.num_rows, share)
