"""Triton kernel of `pick_experts`: a token per program, its scores in registers.

k times the largest score that is left, and the lowest number that has it. In XLA these are six
launches a layer, one of which compares each score with each.

Bytes: the logits, once; the launch bounds it. Measurements: docs/kernels/pick_experts.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton
from pallas_kernels.pick_experts.arguments import Arguments
from pallas_kernels.pick_experts.reference import FLOOR

Ref = Any
_NUM_WARPS = 1


def pick_experts(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """See `op.pick_experts`."""
    logits, bias, expert_ids, count, scaling, first = arguments
    num_tokens, num_experts = logits.shape
    width = 1 << (num_experts - 1).bit_length()
    is_learned = expert_ids is None

    def kernel(inputs: list[Ref], outputs: list[Ref]) -> None:
        logits, given, *firsts = inputs
        ids, weights = outputs
        token = pl.program_id(0)
        number = jnp.arange(width, dtype=jnp.int32)
        exists = number < num_experts
        scores = jnp.sqrt(jax.nn.softplus(triton.load_where(logits, (token, number), exists)))
        ranked = jnp.zeros(width, jnp.float32)
        if is_learned:
            ranked = scores + triton.load_where(given, (number,), exists)
            ranked = jnp.where(jnp.isnan(ranked), -jnp.inf, ranked)
        is_left, picked, total = exists, [], jnp.float32(0)
        for place in range(count):
            if is_learned:
                largest = jnp.max(jnp.where(is_left, ranked, -jnp.inf))
                best = jnp.min(jnp.where(is_left & (ranked == largest), number, num_experts))
            else:
                best = given[token, jnp.int32(place)]
            is_left &= number != best
            score = jnp.sum(jnp.where(number == best, scores, 0.0))
            picked.append((best, score))
            total += score
        below = firsts[0][jnp.int32(0)] if firsts else jnp.int32(0)
        for place, (best, score) in enumerate(picked):
            ids[token, jnp.int32(place)] = best - below
            weights[token, jnp.int32(place)] = score / (total + FLOOR) * scaling

    ids, weights = triton.launch(
        kernel,
        grid=(num_tokens,),
        inputs=[
            logits,
            bias if expert_ids is None else expert_ids,  # pyright: ignore
            *([] if first is None else [first.reshape(1)]),
        ],
        outputs=[
            jax.ShapeDtypeStruct((num_tokens, count), jnp.int32),
            jax.ShapeDtypeStruct((num_tokens, count), jnp.float32),
        ],
        num_warps=_NUM_WARPS,
        name="pick_experts",
    )
    return ids, weights
