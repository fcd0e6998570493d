"""Loads and stores of refs in Triton's language: pointers, offsets and masks."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpu.triton_language.arithmetic import convert
from pallas_kernels.gpu.triton_language.source import Pointer, Writer, rule, spread

_FAR_BYTES = 2**32
"""Arrays beyond this have offsets of 64 bits."""


@rule("get")
def _get(writer, equation, pointer, *leaves):
    variables = equation.invars[1:]
    tree = equation.params["tree"]
    return _load(writer, equation, pointer, *_indices(tree, variables, leaves), None, None)


@rule("masked_load")
def _masked_load(writer, equation, *values):
    tree = equation.params["args_tree"]
    pointer, indices, mask, other = tree.unflatten(values)
    _, variables, mask_variable, other_variable = tree.unflatten(equation.invars)
    return _load(
        writer,
        equation,
        pointer,
        indices,
        variables,
        (mask, mask_variable),
        (other, other_variable),
    )


@rule("swap")
def _swap(writer, equation, pointer, value, *leaves):
    tree, variables = equation.params["tree"], equation.invars
    indices = _indices(tree, variables[2:], leaves)
    return _exchange(writer, equation, pointer, *indices, (value, variables[1]), None)


@rule("masked_swap")
def _masked_swap(writer, equation, *values):
    tree = equation.params["args_tree"]
    pointer, indices, value, mask = tree.unflatten(values)
    _, variables, value_variable, mask_variable = tree.unflatten(equation.invars)
    return _exchange(
        writer,
        equation,
        pointer,
        indices,
        variables,
        (value, value_variable),
        (mask, mask_variable),
    )


@rule("addupdate")
def _add(writer, equation, pointer, value, *leaves):
    at, shape = _locate(
        writer, pointer, *_indices(equation.params["tree"], equation.invars[2:], leaves)
    )
    value = spread(writer, value, equation.invars[1].aval.shape, shape)
    writer.line(f"tl.atomic_add({at}, {value})")
    return []


def _indices(tree, variables, leaves):
    return tree.unflatten(leaves), tree.unflatten(variables)


def _load(writer, equation, pointer, indices, variables, mask, other):
    at, shape = _locate(writer, pointer, indices, variables)
    options = []
    if mask is not None and mask[0] is not None:
        options.append(f"mask={_spread(writer, mask, shape)}")
    if other is not None and other[0] is not None:
        value, variable = other
        same = convert(writer, value, variable.aval.dtype, jnp.dtype(pointer.dtype))
        options.append(f"other={spread(writer, same, variable.aval.shape, shape)}")
    given = equation.params
    for name, key in (("eviction_policy", "eviction_policy"), ("cache_modifier", "cache_modifier")):
        if given.get(key) is not None:
            options.append(f"{name}={given[key]!r}")
    if given.get("is_volatile"):
        options.append("volatile=True")
    return writer.let(f"tl.load({', '.join([at, *options])})")


def _exchange(writer, equation, pointer, indices, variables, value, mask):
    """A store; what was there before is loaded where something asks for it."""
    at, shape = _locate(writer, pointer, indices, variables)
    values = spread(writer, value[0], value[1].aval.shape, shape)
    masks = [] if mask is None or mask[0] is None else [f"mask={_spread(writer, mask, shape)}"]
    (result,) = equation.outvars
    old = None
    if type(result).__name__ != "DropVar":
        other = [f"other={values}"] if masks else []
        old = writer.let(f"tl.load({', '.join([at, *masks, *other])})")
    policy = equation.params.get("eviction_policy")
    options = [] if policy is None else [f"eviction_policy={policy!r}"]
    writer.line(f"tl.store({', '.join([at, values, *masks, *options])})")
    return old


def _spread(writer, given, shape):
    value, variable = given
    return spread(writer, value, variable.aval.shape, shape)


def _locate(writer: Writer, pointer: Pointer, indices, variables) -> tuple[str, tuple[int, ...]]:
    """Where elements of an array lie: their pointers, and the shape of these."""
    if len(indices) > 1:
        raise NotImplementedError(f"{writer.name} takes a part of a part of a ref")
    size = math.prod(pointer.shape)
    far = size * jnp.dtype(pointer.dtype).itemsize > _FAR_BYTES
    dtype = jnp.dtype(jnp.int64 if far else jnp.int32)
    strides = [math.prod(pointer.shape[axis + 1 :]) for axis in range(len(pointer.shape))]
    if indices:
        (named,), (typed,) = indices, variables
        shape = tuple(typed.get_indexer_shape_static())
        num_arrays = len(typed.int_indexer_shape)
        terms: list[tuple[Any, Any]] = list(zip(named.indices, typed.indices, strict=True))
    else:
        shape, num_arrays = pointer.shape, 0
        whole = [slice(0, n) for n in pointer.shape]
        terms = list(zip(whole, whole, strict=True))
    axis, offsets, offsets_shape = num_arrays, None, ()
    for (name, variable), stride in zip(terms, strides, strict=True):
        if isinstance(variable, slice) or hasattr(variable, "stride"):
            term = _slice(writer, name, variable, dtype)
            term_shape = tuple(n if d == axis else 1 for d, n in enumerate(shape))
            axis += 1
            for d in range(len(shape)):
                if d != axis - 1:
                    term = writer.let(f"tl.expand_dims({term}, {d})")
        else:
            term_shape = variable.aval.shape
            term = convert(writer, name, variable.aval.dtype, dtype)
            if term_shape:
                for _ in range(len(shape) - num_arrays):
                    term_shape = (*term_shape, 1)
                    term = writer.let(f"tl.expand_dims({term}, {len(term_shape) - 1})")
        if stride != 1:
            term = writer.let(f"{term} * {writer.constant(stride, dtype)}")
        offsets = term if offsets is None else writer.let(f"{offsets} + {term}")
        offsets_shape = np.broadcast_shapes(offsets_shape, term_shape)
    if offsets is None:
        return pointer.name, ()
    offsets = spread(writer, offsets, tuple(offsets_shape), shape)
    return writer.let(f"{pointer.name} + {offsets}"), shape


def _slice(writer, name, variable, dtype):
    """Elements of an axis from a start on, as an array of one axis."""
    if isinstance(variable, slice):
        return writer.let(f"tl.arange({variable.start}, {variable.stop})")
    size, stride, start = variable.size, variable.stride, name.start
    if isinstance(start, int) and stride == 1:
        numbers = writer.let(f"tl.arange({start}, {start + size})")
        return convert(writer, numbers, jnp.dtype(jnp.int32), dtype)
    numbers = convert(writer, writer.let(f"tl.arange(0, {size})"), jnp.dtype(jnp.int32), dtype)
    if stride != 1:
        numbers = writer.let(f"{numbers} * {writer.constant(stride, dtype)}")
    if isinstance(start, int):
        start = writer.constant(start, dtype)
    else:
        start = convert(writer, start, variable.start.aval.dtype, dtype)
    return writer.let(f"{start} + {numbers}")
