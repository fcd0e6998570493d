"""Arrays of one value, of which a CPU compiles no program for the small ones.

JAX compiles a program for every shape that is filled outside of a program, some 40 ms each on a
CPU, and an empty cache is a dozen arrays. NumPy fills small ones in microseconds.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from dsv4_jax import compat

_HOST_SIZE = 2**22  # elements


def is_filled_on_host() -> bool:
    """Whether small arrays are made by NumPy: on a CPU, outside of a program."""
    return jax.default_backend() == "cpu" and not compat.is_tracing()


def filled(shape: tuple[int, ...], value: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """An array of that shape and dtype, of one value or of one that is broadcast to it."""
    if is_filled_on_host() and math.prod(shape) <= _HOST_SIZE:
        return jnp.asarray(np.full(shape, value, dtype), dtype)
    return jnp.full(shape, value, dtype)
