"""Shape checks that ops share; each error names the argument, the rule and the value."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Codec, Planes, rope_dim_of
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.common.norm_rope import NormRope

_SHORT = reprlib.Repr(maxstring=60, maxother=60, maxlong=60)


def shown(value: Any) -> str:
    """A value for an error message: shortened; of what is no plain value its type."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, str | bytes | int | float | complex | type):
        return _SHORT.repr(value)
    return f"a {type(value).__name__}"


def check_arrays(**arrays: Any) -> None:
    """Every argument is an array of numbers."""
    for name, array in arrays.items():
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise ValueError(
                f"{name} must be an array, got {shown(array)}; pass it through jnp.asarray"
            )
        if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool):
            raise ValueError(f"{name} must be an array of numbers, got {array.dtype}")


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


def check_floats(**arrays: Any) -> None:
    """Every array is of a floating-point dtype."""
    check_arrays(**arrays)
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, np.floating):
            raise ValueError(f"{name} must be an array of floats, got {array.dtype}")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A static integer from `low` to `high`, as a plain int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer, got {shown(value)}{_if_traced(value)}")
    if value < low or (high is not None and value > high):
        within = f"at least {low}" if high is None else f"within {low} .. {high}"
        raise ValueError(f"{name} must be {within}, got {value}")
    return int(value)


def check_number(name: str, value: Any, low: float | None = None) -> float:
    """A static number that is no NaN and at least `low`, as a plain float."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not is_number:
        raise ValueError(f"{name} must be a number, got {shown(value)}{_if_traced(value)}")
    if value != value or (low is not None and value < low):
        raise ValueError(
            f"{name} must be {'a number' if low is None else f'at least {low}'}, got {value}"
        )
    return float(value)


def check_float_dtype(name: str, dtype: Any) -> jnp.dtype:
    """A floating-point dtype, whichever way it is spelt; None is none."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # as NumPy refuses texts
        found = None
    if found is None or not jnp.issubdtype(found, np.floating):
        raise ValueError(f"{name} must be a floating-point dtype, got {shown(dtype)}")
    return found


def check_list(name: str, value: Any, *, of: str) -> None:
    """A list or tuple that holds something."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list of {of}, got {shown(value)}")
    if not value:
        raise ValueError(f"{name} must hold one or more of {of}, got none")


def check_instance(name: str, value: Any, kind: type) -> None:
    """An object of a class of ours."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {shown(value)}")


def check_names(name: str, value: Any, keys: tuple[str, ...]) -> None:
    """A dict of arrays of these names."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict of {' and '.join(keys)}, got {shown(value)}")
    if set(value) != set(keys):
        raise ValueError(f"{name} must be {' and '.join(keys)}, got {list(value)}")
    check_arrays(**{f"{name}[{key!r}]": array for key, array in value.items()})


def check_layer(name: str, layer: Any, stacked: jax.Array) -> None:
    """An index i32[] into L, the first axis; in range, where its value is known."""
    check_rank(0, **{name: layer})
    check_indices(**{name: layer})
    if not isinstance(layer, jax.core.Tracer) and not 0 <= int(layer) < stacked.shape[0]:
        raise ValueError(f"{name} must be within 0 .. {stacked.shape[0] - 1}, got {int(layer)}")


def check_stored(name: str, stored: Any, dim: int) -> None:
    """One layer of planes [L, A, B, ...], in which its codec stores vectors of `dim` dims."""
    check_instance(name, stored, LayerPlanes)
    check_codec(name, stored.planes, stored.codec, dim)
    check_layer(f"{name}.layer", stored.layer, first_plane(stored.planes))


def check_stacked(name: str, planes: Any) -> None:
    """A dict of planes [L, A, B, ...] that agree on these axes."""
    if not isinstance(planes, Mapping) or not planes:
        raise ValueError(f"{name} must be a dict of planes [L, A, B, ...], got {shown(planes)}")
    arrays = {f"{name}[{key!r}]": plane for key, plane in planes.items()}
    check_arrays(**arrays)
    axes = {key: plane.shape[:3] for key, plane in arrays.items()}
    if len(set(axes.values())) != 1 or len(next(iter(axes.values()))) != 3:
        shapes = ", ".join(f"{key}.shape={plane.shape}" for key, plane in arrays.items())
        raise ValueError(
            f"{name} must hold planes [L, A, B, ...] that agree on these, got {shapes}"
        )


def check_norm_rope(norm_rope: Any, dim: int) -> None:
    """A norm of `dim` dims and RoPE of some of them."""
    check_instance("norm_rope", norm_rope, NormRope)
    check_shape("norm_rope.weight", norm_rope.weight, (dim,), "C")
    check_floats(**{"norm_rope.weight": norm_rope.weight})
    check_frequencies("norm_rope.frequencies", norm_rope.frequencies, dim)
    check_number("norm_rope.eps", norm_rope.eps, 0)
    check_instance("norm_rope.norms_queries", norm_rope.norms_queries, bool)


def check_frequencies(name: str, frequencies: Any, dim: int) -> None:
    """Radians per position, for one pair of dims or more of `dim`."""
    check_rank(1, **{name: frequencies})
    check_floats(**{name: frequencies})
    if not 2 <= 2 * frequencies.shape[0] <= dim:
        raise ValueError(
            f"{name} must have one for each pair of at most {dim} dims, "
            f"got {name}.shape={frequencies.shape}"
        )


def check_call(call: CallIndices) -> None:
    """The indices are i32, and each kind agrees on its axes; `visible` too, if it is there."""
    check_instance("call", call, CallIndices)
    per_token, per_row = (
        {f"call.{name}": getattr(call, name) for name in names}
        for names in (
            ("segment_ids", "slots", "positions", "lengths"),
            ("row_slots", "row_lengths", "row_counts", "row_offsets", "block_table"),
        )
    )
    table = per_row.pop("call.block_table")
    check_rank(2, **{"call.block_table": table})
    check_rank(1, **per_token, **per_row)
    check_same_length("T", **per_token)
    check_same_length("B", **per_row, **{"call.block_table": table})
    check_indices(**per_token, **per_row, **{"call.block_table": table})
    check_integer("call.max_row_tokens", call.max_row_tokens, 0)
    if call.visible is not None:
        check_rank(1, **{"call.visible": call.visible})
        check_same_length("T", **per_token, **{"call.visible": call.visible})
        check_indices(**{"call.visible": call.visible})


def check_planes(stacked: Planes, rows: Planes, *, stacked_name: str, rows_name: str) -> None:
    """The rows have the planes of the stacked family [L, A, B, ...], one row per first index."""
    check_stacked(stacked_name, stacked)
    if not isinstance(rows, Mapping) or stacked.keys() != rows.keys():
        found = sorted(map(str, rows)) if isinstance(rows, Mapping) else shown(rows)
        raise ValueError(
            f"{rows_name} must have the planes of {stacked_name}, {sorted(stacked)}; got {found}"
        )
    check_arrays(**{f"{rows_name}[{n!r}]": row for n, row in rows.items()})
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
    check_stacked(name, stacked)
    check_is_codec(f"the codec of {name}", codec)
    shapes = codec.plane_shapes(dim, rope_dim_of(stacked))
    wanted = {n: (s.dtype, s.shape) for n, s in shapes.items()}
    found = {n: (plane.dtype, plane.shape[3:]) for n, plane in stacked.items()}
    if found != wanted:
        raise ValueError(
            f"{name} must hold the planes in which its codec stores {dim} dims, "
            f"{_spell(wanted)}; got {_spell(found)}"
        )


def check_is_codec(name: str, codec: Any) -> None:
    """It can do what a codec does."""
    if isinstance(codec, type) or not isinstance(codec, Codec):
        raise ValueError(f"{name} must be a codec, got {shown(codec)}; see get_codec")


def _spell(planes: Mapping[str, tuple[Any, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in planes.items())


def check_ring(ring: LayerPlanes, rows: Planes, call: CallIndices, dim: int) -> None:
    """A ring has the planes of its codec for vectors of C dims; the call has rows that fit it."""
    check_call(call)
    check_instance("ring", ring, LayerPlanes)
    check_planes(ring.planes, rows, stacked_name="ring", rows_name="rows")
    check_stored("ring", ring, dim)
    check_same_length("T", slots=call.slots, rows=first_plane(rows))


def check_queries(
    queries: jax.Array, weights: jax.Array, pool: LayerPlanes, call: CallIndices
) -> None:
    """Queries [T, IH, IC] and weights [T, IH] fit the index keys and the call, with `visible`."""
    check_rank(3, queries=queries)
    check_rank(2, weights=weights)
    check_floats(queries=queries, weights=weights)
    check_call(call)
    if call.visible is None:
        raise ValueError(
            "call.visible must say how many entries each query may see, got None; pass "
            "dataclasses.replace(call, visible=...)"
        )
    check_same_length("T", queries=queries, weights=weights, segment_ids=call.segment_ids)
    if weights.shape != queries.shape[:2]:
        raise ValueError(
            f"queries and weights must agree on IH, got {queries.shape=} and {weights.shape=}"
        )
    check_stored("pool", pool, queries.shape[-1])


def _if_traced(value: Any) -> str:
    """The way out for a number that is an array."""
    return "; pass a number of Python, which jit knows" if isinstance(value, jax.Array) else ""
