"""Triton kernels of routing: a router's logits in parts, and a token's experts per program.

    router_logits    sixteen tokens, a run of inputs and some experts -> one part of their logits
    pick_experts     k times the largest score that is left, and the lowest number that has it

In XLA the latter are six launches a layer, one of which compares each score with each.

Bytes: the gate, once for each sixteen tokens; the logits, once. The launches bound them.
Measurements: docs/kernels/pick_experts.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton, triton_products
from pallas_kernels.pick_experts.reference import FLOOR, Arguments

Ref = Any
LEAST_TOKENS, MOST_TOKENS = 2, 128
"""Of which logits in parts take less time than XLA's, with what adding them up takes."""
_OUTPUTS = 64
_LEAST = float(jnp.finfo(jnp.float32).min)


def router_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """See `op.router_logits`."""
    parts = 16 if x.shape[0] <= triton_products.ROWS else 8
    return triton_products.multiply(x, gate, parts=parts, outputs=_OUTPUTS, name="router_logits")


def pick_experts(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """See `op.pick_experts`."""
    logits, count = arguments.logits, arguments.picks
    num_tokens, num_experts = logits.shape[0], logits.shape[-1]
    parts = logits.shape[1] if logits.ndim == 3 else 1
    width, parts_width = (pl.next_power_of_2(n) for n in (num_experts, parts))

    def kernel(inputs: _Operands, outputs: tuple[Ref, Ref]) -> None:
        ids, weights = outputs
        token = pl.program_id(0)
        number = jnp.arange(width, dtype=jnp.int32)
        part = jnp.arange(parts_width, dtype=jnp.int32)[:, None]
        exists = number < num_experts
        here = (part < parts) & exists[None]
        loaded = triton.load_where(inputs.logits, (token, part, number[None]), here)
        added = jnp.sum(loaded, axis=0)
        # f32[width], a lane for each expert; those beyond the last one are no candidates.
        scores = jnp.sqrt(jax.nn.softplus(added))
        ranked = jnp.zeros(width, jnp.float32)
        if inputs.bias is not None:
            ranked = scores + triton.load_where(inputs.bias, (number,), exists)
            # Above those that are picked already.
            ranked = jnp.where(jnp.isnan(ranked), _LEAST, jnp.maximum(ranked, _LEAST))
            ranked = jnp.where(exists, ranked, -jnp.inf)
        # One expert after the other: the largest that is left, of equals the lowest number.
        picked, total = [], jnp.float32(0)
        for pick in range(count):
            if inputs.expert_ids is None:
                # Over all threads of the program: everyone knows the winner, and takes it out.
                best = jnp.argmax(ranked).astype(jnp.int32)
                ranked = jnp.where(number == best, -jnp.inf, ranked)
            else:
                best = inputs.expert_ids[token, jnp.int32(pick)]
            # The score of one lane for all threads; the bias chose the expert and does not weigh
            # it.
            score = jnp.sum(jnp.where(number == best, scores, 0.0))
            picked.append((best, score))
            total += score
        # Numbers as the device that has those experts counts them.
        below = jnp.int32(0) if inputs.first is None else inputs.first[jnp.int32(0)]
        for pick, (best, score) in enumerate(picked):
            expert, weight = best - below, score / (total + FLOOR) * arguments.scaling
            if inputs.segment_ids is not None:
                live = inputs.segment_ids[token] >= 0
                expert, weight = jnp.where(live, expert, -1), jnp.where(live, weight, 0.0)
            ids[token, jnp.int32(pick)] = expert
            weights[token, jnp.int32(pick)] = weight

    first = arguments.first
    return triton.launch(
        kernel,
        grid=(num_tokens,),
        inputs=_Operands(
            logits=logits.reshape(num_tokens, parts, num_experts),
            bias=arguments.bias,
            expert_ids=arguments.expert_ids,
            first=None if first is None else first.reshape(1),
            segment_ids=arguments.segment_ids,
        ),
        outputs=(
            jax.ShapeDtypeStruct((num_tokens, count), jnp.int32),
            jax.ShapeDtypeStruct((num_tokens, count), jnp.float32),
        ),
        num_warps=1 if parts == 1 else 4,
        name="pick_experts",
    )


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs.

    Attributes:
      logits: f32[T, P, E].
      bias: f32[E]; None where `expert_ids` says which are picked.
      expert_ids: i32[T, k], or None.
      first: i32[1], or None.
      segment_ids: i32[T], -1 of padding; or None.
    """

    logits: Any
    bias: Any
    expert_ids: Any
    first: Any
    segment_ids: Any
