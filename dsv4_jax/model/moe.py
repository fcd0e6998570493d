"""The mixture of experts: learned and hash routing, clamped SwiGLU, one shared expert.

On a mesh, each device multiplies the rows of all data shards that picked its own experts, and its
columns of the shared expert. No row is dropped, whatever the routing.

Source: deepseek_v4.md section 1.5.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.collectives import gather_rows, sum_own_rows, sum_to_rows
from dsv4_jax.config import DSV4Config
from dsv4_jax.linear import linear, name_product
from dsv4_jax.mesh import DATA, MODEL, axis_size, place_on
from dsv4_jax.model.layer_params import MoEParams
from pallas_kernels import Backend, expert_mlp, mixture_mlp, pick_experts, swiglu_linear
from pallas_kernels.common.pending import Output, PickedSums, finish
from pallas_kernels.common.rows import QuantizedRows, decode_rows, quantize_rows
from pallas_kernels.common.weights import MXFP4, BlockFP8, takes_rounded_rows
from pallas_kernels.pick_experts import router_logits

GATHERED_ROWS = 32768
"""Rows of all data shards that experts take at once: k of them are that many pairs, held twice."""

UNROLLED = 2
"""Such chunks in a turn of the loop over them; each is compiled.

XLA sends what the first one gave while it computes the second.
"""

ROUNDED_ROWS = 512
"""Rows of all data shards from which on they are gathered in E4M3, where experts round them.

Half the bytes of fewer rows take less time on a link than the launch that rounds them.
"""


def mixture_of_experts(
    params: MoEParams,
    x: jax.Array,
    token_ids: jax.Array,
    config: DSV4Config,
    *,
    segment_ids: jax.Array | None = None,
    backend: Backend | None = None,
) -> Output:
    """One feed-forward sublayer.

    Args:
      params: parameters of the layer.
      x: [..., D], normed.
      token_ids: i32[...], which hash layers route by.
      config: the model.
      segment_ids: i32[T], -1 of padding, which picks no routed expert; None has no padding.
      backend: route of `pick_experts`; only the reference can be differentiated.

    Returns:
      [..., D]: the routed experts' weighted sum plus the shared expert; of few tokens it may be
      left in parts. On a mesh those rows of [T, D] that this device has (`rows_of_a_device`).
    """
    rows, limit = x.reshape(-1, x.shape[-1]), config.swiglu_limit
    here, first = axis_size(DATA) == 1, _first_expert(params)
    expert_ids, expert_weights = route(
        params,
        rows,
        token_ids.reshape(-1),
        config,
        first=first if here else None,
        segment_ids=segment_ids,
        backend=backend,
    )
    experts = params.w1, params.w3, params.w2
    shared_expert = params.shared_w1, params.shared_w3, params.shared_w2
    if here:
        routed, shared = mixture_mlp(
            rows,
            expert_ids,
            expert_weights,
            *experts,
            shared_expert,
            limit=limit,
            picked_among=config.num_routed_experts,
            may_stay_in_parts=True,
        )
        if shared is None and axis_size(MODEL) == 1:  # few tokens' sums, left in parts
            return routed.reshape(*x.shape)
        if isinstance(routed, PickedSums):  # which collectives do not take
            routed = finish(routed)
    else:

        def run_experts(rows: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            rows, ids, weights = _gather(rows, ids, weights, params)
            routed = expert_mlp(
                rows,
                ids if first is None else ids - first,
                weights,
                *experts,
                limit=limit,
                picked_among=config.num_routed_experts,
            )
            return sum_own_rows(routed)

        routed = _in_chunks(run_experts, rows, expert_ids, expert_weights)
        hidden = swiglu_linear(rows, *shared_expert[:2], limit=limit)
        shared = linear(hidden, shared_expert[2])
    routed, shared = name_product(routed, "routed"), name_product(shared, "shared")
    total = sum_to_rows(routed, plus=shared)
    if len(total) == len(rows):
        total = total.reshape(x.shape)
    return checkpoint_name(total, "mlp_out")


def _gather(
    rows: jax.Array, ids: jax.Array, weights: jax.Array, params: MoEParams
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of all data shards, with the experts that they picked and their weights.

    Of many rows that experts round to E4M3, the codes are sent: the experts find the same values in
    half the bytes.
    """
    w1 = params.w1
    if not isinstance(w1, BlockFP8 | MXFP4) or not takes_rounded_rows(w1):
        rows, ids, weights = gather_rows(rows, ids, weights)
        return rows, ids, weights
    if axis_size(DATA) * len(rows) < ROUNDED_ROWS:
        rows, ids, weights = gather_rows(rows, ids, weights)
        return rows, ids, weights
    codes, scale = quantize_rows(rows, w1.row_group)
    codes, scale, ids, weights = gather_rows(codes.reshape(len(rows), -1), scale, ids, weights)
    quantized = QuantizedRows(codes.reshape(*scale.shape, -1), scale)
    return decode_rows(quantized, rows.shape[1]).astype(rows.dtype), ids, weights


def _in_chunks(run: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """run(*arrays) of [T, n] each, a chunk of T at a time where all shards' rows are many."""
    num_rows, most = arrays[0].shape[0], max(1, GATHERED_ROWS // axis_size(DATA))
    if num_rows <= most:
        return run(*arrays)
    chunks = -(-num_rows // most)
    spare = chunks * most - num_rows

    def cut(array: jax.Array) -> jax.Array:
        nothing = -1 if jnp.issubdtype(array.dtype, jnp.integer) else 0  # no expert, no row
        padded = jnp.pad(array, ((0, spare), (0, 0)), constant_values=nothing)
        return padded.reshape(chunks, most, -1)

    _, done = jax.lax.scan(
        lambda _, chunk: (None, run(*chunk)), None, tuple(map(cut, arrays)), unroll=UNROLLED
    )
    return done.reshape(chunks * most, -1)[:num_rows]


def _first_expert(params: MoEParams) -> jax.Array | None:
    """i32[], number of the first expert that this device has; None is 0, of all that there are.

    Ids less that number are the device's own within 0 .. E - 1.
    """
    index = place_on(DATA, MODEL)
    return None if isinstance(index, int) else index * params.w1.shape[0]


def route(
    params: MoEParams,
    x: jax.Array,
    token_ids: jax.Array,
    config: DSV4Config,
    *,
    first: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The experts that each token picks, and how much of each it gets.

    Args:
      params: parameters of the layer; `tid2eid` makes it a hash layer.
      x: [T, D].
      token_ids: i32[T].
      config: the model.
      first: see `pick_experts`.
      segment_ids: likewise.
      backend: see `mixture_of_experts`.

    Returns:
      i32[T, k], distinct; on a learned layer the best first, and of equals the lower number. And
      f32[T, k], their weights, which add up to the model's scaling factor.
    """
    logits = checkpoint_name(router_logits(x, params.gate, backend=backend), "gate/logits")
    table = params.tid2eid
    picked, weights = pick_experts(
        logits,
        bias=params.bias if table is None else None,
        expert_ids=None if table is None else table[token_ids],
        count=config.num_experts_per_token,
        scaling=config.routed_scaling_factor,
        first=first,
        segment_ids=segment_ids,
        backend=backend,
    )
    return checkpoint_name(picked, "gate/picked"), checkpoint_name(weights, "gate/share")
