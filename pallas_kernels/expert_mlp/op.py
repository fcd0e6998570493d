"""The weighted sum of the experts that each token picked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.check_weights import check_projection, check_weight
from pallas_kernels.common.checks import (
    check_floats,
    check_indices,
    check_integer,
    check_number,
    check_rank,
    check_same_length,
    check_shape,
    shown,
)
from pallas_kernels.common.pending import MaybeSplit, Output
from pallas_kernels.common.weights import Weight
from pallas_kernels.expert_mlp import mosaic_gpu, reference
from pallas_kernels.expert_mlp.reference import Arguments
from pallas_kernels.product import find_obstacle

_IMPLEMENTATIONS: dict[Backend, Any] = {
    Backend.REFERENCE: reference.expert_mlp,
    Backend.MOSAIC_GPU: mosaic_gpu.expert_mlp,
}


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    picked_among: int | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """Runs each token through the experts that it picked, and adds them up.

    An expert's weights are read if a token picked it. No token is dropped, and none is added to
    fill up an expert, whatever the routing. In plain JAX, of one token, for dense weights:

        gate, up = w1[expert_ids] @ x, w3[expert_ids] @ x  # [k, I]
        hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
        return jnp.einsum("kdi,ki->d", w2[expert_ids], expert_weights[:, None] * hidden)

    Args:
      x: [T, D].
      expert_ids: i32[T, k]; the experts of a token are distinct. One outside 0 .. E - 1 counts as
        none.
      expert_weights: f32[T, k], share of each; applied before the last product.
      w1: [E, I, D], gate projections, dense or quantised.
      w3: [E, I, D], up projections.
      w2: [E, D, I], down projections.
      limit: clamp of gate (from above) and up (both sides) before SwiGLU.
      picked_among: experts that tokens picked from, of which E are here, where others lie on other
        devices; None is E. Tiles are cut for what an expert gets of them; results are the same.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      [T, D].

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md section 1.5.
    """
    arguments = Arguments(
        x, expert_ids, expert_weights, w1, w3, w2, limit, picked_among=picked_among
    )
    return _run(arguments, backend)[0]


def mixture_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    shared: tuple[Weight, Weight, Weight],
    *,
    limit: float,
    picked_among: int | None = None,
    backend: Backend | None = None,
    may_stay_in_parts: bool = False,
) -> tuple[Output, MaybeSplit | None]:
    """`expert_mlp`, and an expert that all tokens share.

    In plain JAX:

        routed = expert_mlp(x, expert_ids, expert_weights, w1, w3, w2, limit=limit)
        gate, up, down = shared
        return routed, block_linear(swiglu_linear(x, gate, up, limit=limit), down)

    Args:
      x: [T, D].
      expert_ids: as of `expert_mlp`, i32[T, k].
      expert_weights: f32[T, k].
      w1: [E, I, D].
      w3: [E, I, D].
      w2: [E, D, I].
      shared: gate [I', D], up [I', D] and down [D, I'] projections of the shared expert.
      limit: as of `expert_mlp`, of the shared expert too.
      picked_among: as of `expert_mlp`.
      backend: as of `expert_mlp`.
      may_stay_in_parts: whether results may be left in parts as kernels have them. It saves
        launches where what reads them adds them up.

    Returns:
      [T, D], the sum of what each token picked; and [T, D], the shared expert's result. With
      `may_stay_in_parts` that may be None: it is then among the parts of the first.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md section 1.5.
    """
    if not isinstance(shared, list | tuple) or len(shared) != 3:
        found = len(shared) if isinstance(shared, list | tuple) else shown(shared)
        raise ValueError(
            f"shared must be the gate, up and down projections of an expert, got {found}"
        )
    return _run(
        Arguments(x, expert_ids, expert_weights, w1, w3, w2, limit, shared, picked_among),
        backend,
        in_parts=may_stay_in_parts,
    )


def _run(arguments: Arguments, backend: Backend | None, *, in_parts: bool = False) -> Any:
    x, expert_ids, expert_weights = arguments.x, arguments.expert_ids, arguments.expert_weights
    w1, w3, w2, picked_among = arguments.w1, arguments.w3, arguments.w2, arguments.picked_among
    check_rank(2, x=x, expert_ids=expert_ids, expert_weights=expert_weights)
    check_floats(x=x)
    check_indices(expert_ids=expert_ids)
    check_same_length("T", x=x, expert_ids=expert_ids)
    check_shape("expert_weights", expert_weights, expert_ids.shape, "T, k")
    if expert_weights.dtype != jnp.float32:
        raise ValueError(f"expert_weights must be float32, got {expert_weights.dtype}")
    limit = check_number("limit", arguments.limit, 0)
    check_weight("w1", w1, 3)
    num_experts, width, _ = w1.shape
    dim = x.shape[1]
    if picked_among is not None:
        picked_among = check_integer("picked_among", picked_among, 1)
        if picked_among < num_experts:
            raise ValueError(
                f"picked_among must be at least the {num_experts} experts of w1, got {picked_among}"
            )
    check_projection("w1", w1, (num_experts, width, dim), "E, I, D")
    check_projection("w3", w3, (num_experts, width, dim), "E, I, D")
    check_projection("w2", w2, (num_experts, dim, width), "E, D, I")
    shared = arguments.shared
    if shared is not None:
        gate, up, down = shared
        check_weight("shared's gate", gate, 2)
        inner = gate.shape[0]
        check_projection("shared's gate", gate, (inner, dim), "I', D")
        check_projection("shared's up", up, (inner, dim), "I', D")
        check_projection("shared's down", down, (dim, inner), "D, I'")
    arguments = arguments._replace(limit=limit, picked_among=picked_among)
    implementation = resolve(
        "expert_mlp",
        backend,
        _IMPLEMENTATIONS,
        preferred=Backend.MOSAIC_GPU,
        obstacle=find_obstacle(x, w1, w3, w2),
        arguments={"x": x, "expert_ids": expert_ids},
    )
    return implementation(jax_arrays(arguments), in_parts=in_parts)
