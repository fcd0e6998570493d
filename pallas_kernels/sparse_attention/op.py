"""Attention of each query token to its window and its compressed entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

import jax
from jax.core import Tracer

from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.checks import (
    check_floats,
    check_indices,
    check_number,
    check_rank,
    check_ring,
    check_same_length,
    check_stored,
)
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gpu.devices import current_device
from pallas_kernels.sparse_attention import (
    call_shapes,
    mosaic_blackwell,
    mosaic_hopper,
    reference,
    triton_few,
    triton_turns,
)
from pallas_kernels.sparse_attention.reference import Arguments


def choose_kernel() -> ModuleType:
    """The Mosaic GPU kernel for the GPU at hand; Hopper's in the interpreter."""
    return mosaic_blackwell if current_device().has_tmem else mosaic_hopper


def _run_kernel(arguments: Arguments) -> jax.Array:
    return choose_kernel().sparse_attention(arguments)


def _run_triton(arguments: Arguments) -> jax.Array:
    """That of few tokens, but for more of them where entries are apart from the window."""
    if _is_apart(arguments) and not _is_few(arguments):
        return triton_turns.sparse_attention(arguments)
    return triton_few.sparse_attention(arguments)


_IMPLEMENTATIONS = {
    Backend.REFERENCE: reference.sparse_attention,
    Backend.MOSAIC_GPU: _run_kernel,
    Backend.TRITON_GPU: _run_triton,
}


def sparse_attention(
    queries: jax.Array,
    sink: jax.Array,
    ring: LayerPlanes,
    rows: Planes,
    pool: LayerPlanes | None,
    selected: jax.Array | None,
    call: CallIndices,
    *,
    scale: float,
    frequencies: jax.Array | None = None,
    query_eps: float | None = None,
    apart: bool = False,
    backend: Backend | None = None,
) -> jax.Array:
    """One softmax over window and entries, with a sink; an entry is key and value.

    In plain JAX, with window and entries as `gather_window` and `gather_entries` give them, for
    queries that are ready, and without the inverse RoPE:

        window, in_window = gather_window(ring, rows, call, dim=C)          # f32[T, W, C]
        entries, chosen = gather_entries(pool, call, selected, dim=C)       # f32[T, K, C]
        keys = jnp.concatenate([window, entries], axis=1)                   # f32[T, W + K, C]
        valid = jnp.concatenate([in_window, chosen], axis=1)                # bool[T, W + K]
        logits = jnp.einsum("thc,tkc->thk", queries, keys) * scale          # f32[T, H, W + K]
        logits = jnp.where(valid[:, None], logits, -jnp.inf)
        sinks = jnp.broadcast_to(sink[:, None], (T, H, 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1))
        attended = jnp.einsum("thk,tkc->thc", weights[..., :-1], keys)      # f32[T, H, C]

    Args:
      queries: [T, H, C], normed and rotated; or as projected, see `query_eps`.
      sink: f32[H], a logit that adds to the denominator only.
      ring: planes [L, NS, W, ...], position p in row p % W, before the call's tokens are written.
      rows: planes [T, ...], the call's own window entries.
      pool: planes [L, NB, EB, ...] of entries, with the ring's layer and codec, unless it is
        `apart`; None for the window alone.
      selected: i32[T, K], entries each query attends to, -1 for none; None for the window alone.
      call: where the tokens belong. A token without a slot is padding, and gives zeros. Of
        `selected` only the first `visible` places of a token may hold an entry: a kernel need not
        look at the others. `visible` None looks at all K.
      scale: factor of the logits.
      frequencies: f32[R / 2], radians per position, for inverse RoPE of the output by each query's
        position; None leaves it out.
      query_eps: floor of an RMS norm of each head, which with RoPE precedes the rest, as
        `encode_tokens` does it; it wants `frequencies`. None is of queries that are ready.
      apart: the pool has a layer number and a codec of its own, as where layers read entries that
        another one made; static.
      backend: implementation to use; None picks the fastest one that runs here.

    Returns:
      [T, H, C] in the dtype of `queries`.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md sections 1.3, step 9, and 1.4.
    """
    arguments = Arguments(
        queries=queries,
        sink=sink,
        ring=ring,
        rows=rows,
        pool=pool,
        selected=selected,
        call=call,
        scale=scale,
        frequencies=frequencies,
        query_eps=query_eps,
        apart=apart,
    )
    return run("sparse_attention", backend, _IMPLEMENTATIONS, arguments)


def run[Result](
    name: str,
    backend: Backend | None,
    implementations: Mapping[Backend, Callable[[Arguments], Result]],
    arguments: Arguments,
) -> Result:
    """Checks the arguments of an op of that name, picks its implementation and calls it."""
    arguments = _checked(arguments)
    obstacle = call_shapes.find_obstacle(arguments.queries, arguments.ring, arguments.pool)
    query_eps, preferred = arguments.query_eps, _choose_backend(arguments)
    chosen = preferred if backend is None else backend
    is_triton = isinstance(chosen, str) and chosen == Backend.TRITON_GPU
    if is_triton and query_eps is not None:
        obstacle = f"takes queries that are normed and rotated, got {query_eps=}"
    if _wants_triton(arguments) and not (is_triton and Backend.TRITON_GPU in implementations):
        obstacle = (
            "takes window and entries of one layer and one of V4's codecs while "
            "call_shapes.SERVES_ENTRIES_APART is False, got a pool that is "
            f"{'apart' if arguments.apart else 'of that layer'} and {arguments.ring.codec}"
        )
    arrays = {"queries": arguments.queries}
    if arguments.selected is not None:
        arrays["selected"] = arguments.selected
    implementation = resolve(
        name,
        backend,
        implementations,
        preferred=preferred if preferred in implementations else None,
        obstacle=obstacle,
        arguments=arrays,
    )
    return implementation(jax_arrays(arguments))


def _choose_backend(arguments: Arguments) -> Backend:
    """The faster kernel on the GPU at hand."""
    is_triton = _wants_triton(arguments) or _is_few(arguments)
    return Backend.TRITON_GPU if is_triton else Backend.MOSAIC_GPU


def _is_few(arguments: Arguments) -> bool:
    return triton_few.is_fastest(arguments, num_sms=current_device().num_sms)


def _wants_triton(arguments: Arguments) -> bool:
    return _is_apart(arguments) and not call_shapes.SERVES_ENTRIES_APART


def _is_apart(arguments: Arguments) -> bool:
    return call_shapes.is_apart(arguments.ring, arguments.pool, apart=arguments.apart)


def _checked(arguments: Arguments) -> Arguments:
    """The same arguments, with plain numbers."""
    queries, sink, call = arguments.queries, arguments.sink, arguments.call
    ring, pool, selected = arguments.ring, arguments.pool, arguments.selected
    frequencies, query_eps = arguments.frequencies, arguments.query_eps
    check_rank(3, queries=queries)
    check_rank(1, sink=sink)
    check_floats(queries=queries, sink=sink)
    check_ring(ring, arguments.rows, call, queries.shape[-1])
    check_same_length("T", queries=queries, slots=call.slots)
    if sink.shape != queries.shape[1:2]:
        raise ValueError(f"queries and sink must agree on H, got {queries.shape=}, {sink.shape=}")
    if frequencies is not None:
        check_rank(1, frequencies=frequencies)
        check_floats(frequencies=frequencies)
        if 2 * frequencies.shape[0] > queries.shape[-1]:
            raise ValueError(
                "frequencies must rotate at most C dims, two each, got "
                f"{frequencies.shape=} and {queries.shape=}"
            )
    if query_eps is not None and frequencies is None:
        raise ValueError(
            f"query_eps wants the frequencies by which queries are rotated, got {query_eps=} and "
            "frequencies=None; pass both, or queries that are normed and rotated"
        )
    if (pool is None) != (selected is None):
        raise ValueError("pool and selected go together; pass both, or None for both")
    if pool is not None and selected is not None:
        check_rank(2, selected=selected)
        check_same_length("T", queries=queries, selected=selected)
        check_indices(selected=selected)
        check_stored("pool", pool, queries.shape[-1])
        if not arguments.apart:
            _check_same_layer(ring, pool)
    scale = check_number("scale", arguments.scale)
    if query_eps is not None:
        query_eps = check_number("query_eps", query_eps, 0)
    return arguments._replace(scale=scale, query_eps=query_eps)


def _check_same_layer(ring: LayerPlanes, pool: LayerPlanes) -> None:
    """A kernel has one layer number and one codec for both."""
    if pool.codec != ring.codec:
        raise ValueError(f"pool must have the ring's codec, {ring.codec}, got {pool.codec}")
    layers = ring.layer, pool.layer
    if layers[0] is layers[1] or any(isinstance(layer, Tracer) for layer in layers):
        return
    if int(layers[0]) != int(layers[1]):
        raise ValueError(f"pool must be of the ring's layer, {layers[0]}, got {layers[1]}")
