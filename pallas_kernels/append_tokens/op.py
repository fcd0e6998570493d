"""A call's new tokens into what a layer keeps per request: rings and running pools."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.append_tokens import reference, triton_gpu
from pallas_kernels.append_tokens.reference import Arguments
from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import (
    check_call,
    check_floats,
    check_instance,
    check_integer,
    check_layer,
    check_names,
    check_planes,
    check_rank,
    check_same_length,
    check_shape,
    first_plane,
)
from pallas_kernels.common.codecs import Planes

_TOKENS = {
    Backend.REFERENCE: reference.append_tokens,
    Backend.TRITON_GPU: triton_gpu.append_tokens,
}


def append_tokens(
    rings: Sequence[Planes],
    rows: Sequence[Planes],
    running: jax.Array | None,
    projections: Planes | None,
    call: CallIndices,
    *,
    layer: jax.Array,
    compression_ratio: int,
    backend: Backend | None = None,
) -> tuple[tuple[Planes, ...], jax.Array | None]:
    """Appends a call's tokens to all that a layer keeps per request, in one launch.

    In plain JAX, of a ring whose tokens all find a row of their own:

        appended = {
            name: plane.at[layer, call.slots, call.positions % plane.shape[2]].set(new[name])
            for name, plane in ring.items()
        }

    and of the pool that a window of M tokens leaves, for one slot and where it is still open:

        largest = jnp.max(scores, axis=0)                                   # f32[C], of f32[n, C]
        weights = jnp.exp(scores - largest)                                 # f32[n, C]
        pool = jnp.stack([largest, jnp.sum(weights, axis=0), jnp.sum(weights * values, axis=0)])

    Args:
      rings: planes [L, NS, W, ...] each, the window and on CSA layers the compressors' states;
        W may differ.
      rows: planes [T, ...] for each ring. Of tokens that share a ring row the last one is written.
      running: f32[L, NS, 3, C], HCA: pools of the open windows; None on other layers.
      projections: `values` and `scores`, f32[T, C], that go into `running`; None without it.
      call: where the call's tokens belong; its `row_*` and `max_row_tokens` are read. A segment
        that is idle or has no token writes nothing.
      layer: i32[], index into L.
      compression_ratio: M, tokens per window of `running`; not read without it.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      The rings, and `running`, with the tokens in them.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here.

    Source: deepseek_v4.md sections 1.7, steps 2 and 4, and 2.4.
    """
    for name, planes in (("rings", rings), ("rows", rows)):
        if not isinstance(planes, list | tuple):
            check_instance(name, planes, list)
    if len(rings) != len(rows) or not rings:
        raise ValueError(f"rings and rows must be as many, got {len(rings)} and {len(rows)}")
    for number, (ring, new) in enumerate(zip(rings, rows, strict=True)):
        check_planes(ring, new, stacked_name=f"rings[{number}]", rows_name=f"rows[{number}]")
        check_layer("layer", layer, first_plane(ring))
    if (running is None) != (projections is None):
        raise ValueError("running and projections go together")
    arrays = {f"rows[{i}]": first_plane(new) for i, new in enumerate(rows)}
    if running is not None and projections is not None:
        check_rank(4, running=running)
        check_floats(running=running)
        check_shape("running", running, (*running.shape[:2], 3, running.shape[3]), "L, NS, 3, C")
        check_layer("layer", layer, running)
        compression_ratio = check_integer("compression_ratio", compression_ratio, 1)
        check_names("projections", projections, ("values", "scores"))
        for key, array in projections.items():
            name = f"projections[{key!r}]"
            arrays[name] = array
            check_rank(2, **{name: array})
            check_floats(**{name: array})
            check_shape(name, array, (array.shape[0], running.shape[3]), "T, C")
    check_call(call)
    check_same_length("T", **arrays, **{"call.positions": call.positions})
    return resolve("append_tokens", backend, _TOKENS)(
        jax_arrays(Arguments(rings, rows, running, projections, call, layer, compression_ratio))
    )
