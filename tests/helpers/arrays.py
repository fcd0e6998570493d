"""Arrays of the host, on a device."""

import jax
import jax.numpy as jnp
import numpy as np


def on_device(values, dtype):
    """`jnp.asarray(values, dtype)` without a program where the values are of the host.

    JAX converts those with NumPy as well, and then compiles a program for each shape that returns
    what it is given, which takes 15 ms.
    """
    if not isinstance(values, jax.Array):
        values = np.asarray(values).astype(dtype)  # a copy, so that nobody writes over the array
    return jnp.asarray(values, dtype)


def ones(shape, dtype=jnp.float32):
    """`jnp.ones`, without a program."""
    return on_device(np.ones(shape), dtype)


def zeros(shape, dtype=jnp.float32):
    """`jnp.zeros`, without a program."""
    return on_device(np.zeros(shape), dtype)
