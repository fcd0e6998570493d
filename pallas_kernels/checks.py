"""Shape checks that ops share; each error names the argument, the rule and the value."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Planes


def check_same_length(axis: str, **arrays: jax.Array) -> int:
    """All arrays have the same first axis; returns it."""
    lengths = {name: array.shape[:1] for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        shapes = ", ".join(f"{name}.shape={array.shape}" for name, array in arrays.items())
        raise ValueError(
            f"{', '.join(arrays)} must agree on {axis}, their first axis; got {shapes}"
        )
    return next(iter(lengths.values()))[0]


def check_rank(rank: int, **arrays: jax.Array) -> None:
    """Every array has that rank."""
    for name, array in arrays.items():
        if array.ndim != rank:
            raise ValueError(f"{name} must have rank {rank}, got {name}.shape={array.shape}")


def check_indices(**arrays: jax.Array) -> None:
    """Every array is i32."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")


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
