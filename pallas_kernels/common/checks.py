"""Shape checks that ops share; each error names the argument, the rule and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Codec, Planes, rope_dim_of
from pallas_kernels.common.layer_planes import LayerPlanes


def check_arrays(**arrays: Any) -> None:
    """Every argument is an array, or a weight, which has a shape too."""
    for name, array in arrays.items():
        if not (hasattr(array, "shape") and hasattr(array, "ndim")):
            raise ValueError(
                f"{name} must be an array, got a {type(array).__name__}; pass it through "
                "jnp.asarray"
            )


def check_same_length(axis: str, **arrays: jax.Array) -> int:
    """All arrays have the same first axis; returns it."""
    check_arrays(**arrays)
    lengths = {name: array.shape[:1] for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        shapes = ", ".join(f"{name}.shape={array.shape}" for name, array in arrays.items())
        raise ValueError(
            f"{', '.join(arrays)} must agree on {axis}, their first axis; got {shapes}"
        )
    return next(iter(lengths.values()))[0]


def check_rank(rank: int, **arrays: jax.Array) -> None:
    """Every array has that rank."""
    check_arrays(**arrays)
    for name, array in arrays.items():
        if array.ndim != rank:
            raise ValueError(f"{name} must have rank {rank}, got {name}.shape={array.shape}")


def check_indices(**arrays: jax.Array) -> None:
    """Every array is i32."""
    check_arrays(**arrays)
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")


def check_call(call: CallIndices) -> None:
    """The indices are i32, and each kind agrees on its axes."""
    if not isinstance(call, CallIndices):
        raise ValueError(f"call must be a CallIndices, got a {type(call).__name__}")
    per_token, per_row = (
        {f"call.{name}": getattr(call, name) for name in names}
        for names in (
            ("segment_ids", "slots", "positions", "lengths"),
            ("row_slots", "row_lengths", "row_counts", "row_offsets", "block_table"),
        )
    )
    check_rank(2, **{"call.block_table": call.block_table})
    check_same_length("T", **per_token)
    check_same_length("B", **per_row)
    check_indices(**per_token, **per_row)


def check_planes(stacked: Planes, rows: Planes, *, stacked_name: str, rows_name: str) -> None:
    """The rows have the planes of the stacked family [L, A, B, ...], one row per first index."""
    if stacked.keys() != rows.keys():
        raise ValueError(
            f"{rows_name} must have the planes of {stacked_name}, {sorted(stacked)}; "
            f"got {sorted(rows)}"
        )
    for name, plane in stacked.items():
        if plane.shape[3:] != rows[name].shape[1:] or plane.dtype != rows[name].dtype:
            raise ValueError(
                f"{rows_name}[{name!r}] must hold rows of {plane.dtype}{list(plane.shape[3:])} "
                f"as {stacked_name} does, got {rows[name].dtype}{list(rows[name].shape[1:])}"
            )
    check_same_length("their number", **{f"{rows_name}[{n!r}]": row for n, row in rows.items()})


def first_plane(planes: Planes) -> jax.Array:
    """Any one plane, for the axes that all share."""
    return next(iter(planes.values()))


def check_shape(name: str, array: jax.Array, shape: tuple[int, ...], letters: str) -> None:
    """The array has exactly that shape, nothing to broadcast; `letters` spell it in the error."""
    check_arrays(**{name: array})
    if array.shape != shape:
        raise ValueError(
            f"{name} must be [{letters}] = {list(shape)}, got {name}.shape={array.shape}"
        )


def check_codec(name: str, stacked: Planes, codec: Codec, dim: int) -> None:
    """The planes [L, A, B, ...] are those in which the codec stores vectors of `dim` dims."""
    shapes = codec.plane_shapes(dim, rope_dim_of(stacked))
    wanted = {n: (s.dtype, s.shape) for n, s in shapes.items()}
    found = {n: (plane.dtype, plane.shape[3:]) for n, plane in stacked.items()}
    if found != wanted:
        raise ValueError(
            f"{name} must hold the planes in which its codec stores {dim} dims, "
            f"{_spell(wanted)}; got {_spell(found)}"
        )


def _spell(planes: Mapping[str, tuple[Any, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in planes.items())


def check_ring(ring: LayerPlanes, rows: Planes, call: CallIndices, dim: int) -> None:
    """A ring has the planes of its codec for vectors of C dims; the call has rows that fit it."""
    check_call(call)
    check_planes(ring.planes, rows, stacked_name="ring", rows_name="rows")
    check_codec("ring", ring.planes, ring.codec, dim)
    check_same_length("T", slots=call.slots, rows=first_plane(rows))


def check_queries(
    queries: jax.Array, weights: jax.Array, pool: LayerPlanes, call: CallIndices
) -> None:
    """Queries [T, IH, IC] and weights [T, IH] fit the index keys and the call, with `visible`."""
    check_rank(3, queries=queries)
    check_rank(2, weights=weights)
    check_call(call)
    if call.visible is None:
        raise ValueError(
            "call.visible must say how many entries each query may see, got None; pass "
            "dataclasses.replace(call, visible=...)"
        )
    check_indices(visible=call.visible)
    check_same_length(
        "T",
        queries=queries,
        weights=weights,
        segment_ids=call.segment_ids,
        visible=call.visible,
    )
    if weights.shape != queries.shape[:2]:
        raise ValueError(
            f"queries and weights must agree on IH, got {queries.shape=} and {weights.shape=}"
        )
    check_codec("pool", pool.planes, pool.codec, queries.shape[-1])
