"""Random arrays that are cheap to make: NumPy draws a few values, and the device repeats them.

A device that drew them itself would compile, for every shape, a program that takes seconds. Here
each array of a shape goes through one list of values as often as it takes, from a place of its
own, and all of them are made by one small program.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

_COUNT = 2**22 - 3  # prime: rows of any width begin at different values, for as many rows
_APART = 104_729


@dataclasses.dataclass(frozen=True)
class Draw:
    """An array to be drawn.

    Attributes:
      shape: shape of the array.
      dtype: dtype of its values.
      among: the possible values, equally likely; None for normally distributed ones.
      as_bytes: whether the array holds the bytes of the values, as u8.
    """

    shape: tuple
    dtype: object = jnp.float32
    among: tuple | range | None = None
    as_bytes: bool = False


def make(tree):
    """Replaces each `Draw` of a tree by an array, and each `jax.ShapeDtypeStruct` by zeros."""
    leaves, structure = jax.tree.flatten(tree)
    values = [
        _values(leaf.dtype, leaf.among, leaf.as_bytes) if isinstance(leaf, Draw) else None
        for leaf in leaves
    ]
    first = [np.uint32(number * _APART) for number in range(len(leaves))]
    return structure.unflatten(_fill(tuple(leaves), values, first))


def different(rng, num_rows, count, total):
    """i32[num_rows, count]: in each row distinct numbers of 0 .. total - 1 in any order."""
    numbers = np.broadcast_to(np.arange(total, dtype=np.int32), (num_rows, total))
    return rng.permuted(numbers, axis=1)[:, :count]


def blocks(rng, *shape):
    """i32[shape], a random permutation: a block table."""
    return rng.permutation(math.prod(shape)).astype(np.int32).reshape(shape)


@functools.cache
def _values(dtype, among, as_bytes):
    """The repeated values, on the device."""
    rng = np.random.default_rng(list(repr((np.dtype(dtype), among)).encode()))
    if among is None:
        drawn = rng.standard_normal(_COUNT, np.float32).astype(dtype)
    else:
        drawn = np.array(among, dtype)[rng.integers(len(among), size=_COUNT)]
    with jax.ensure_compile_time_eval():  # kept, also where shapes alone are asked for
        return jnp.asarray(drawn.view(np.uint8) if as_bytes else drawn)


@functools.partial(jax.jit, static_argnums=0)
def _fill(leaves, values, first):
    """Start offsets are arguments, so that arrays of one shape share a kernel."""

    def fill(leaf, drawn, start):
        if drawn is None:
            return jnp.zeros(leaf.shape, leaf.dtype)
        places = (jax.lax.iota(jnp.uint32, math.prod(leaf.shape)) + start) % jnp.uint32(_COUNT)
        return drawn.at[places].get(mode="promise_in_bounds").reshape(leaf.shape)

    return [fill(*each) for each in zip(leaves, values, first, strict=True)]
