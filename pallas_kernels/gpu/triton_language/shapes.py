"""Shapes, reductions and products of matrices in Triton's language."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.triton_language.arithmetic import convert
from pallas_kernels.gpu.triton_language.source import Writer, dims, rule, spread, type_of


@rule("iota")
def _iota(writer, equation):
    shape, axis = equation.params["shape"], equation.params["dimension"]
    numbers = writer.let(f"tl.arange(0, {shape[axis]})")
    numbers = convert(writer, numbers, jnp.dtype(jnp.int32), jnp.dtype(equation.params["dtype"]))
    return _stretch(writer, numbers, (shape[axis],), (axis,), shape)


@rule("broadcast_in_dim")
def _broadcast_in_dim(writer, equation, x, *sizes):
    if sizes:
        raise NotImplementedError(f"{writer.name} broadcasts to a size that is computed")
    given = equation.params
    return _stretch(
        writer, x, equation.invars[0].aval.shape, given["broadcast_dimensions"], given["shape"]
    )


def _stretch(writer, x, shape, axes, target):
    """`lax.broadcast_in_dim`: the axes of x are these of the target."""
    if not shape:
        return spread(writer, x, (), target)
    for axis in range(len(target)):
        if axis not in axes:
            x = writer.let(f"tl.expand_dims({x}, {axis})")
            shape = (*shape[:axis], 1, *shape[axis:])
    return spread(writer, x, shape, target)


@rule("broadcast_to")
def _broadcast_to(writer, equation, x):
    shape, target = equation.invars[0].aval.shape, equation.params["shape"]
    if not shape:
        return spread(writer, x, (), target)
    for _ in range(len(target) - len(shape)):
        x, shape = writer.let(f"tl.expand_dims({x}, 0)"), (1, *shape)
    return spread(writer, x, shape, target)


@rule("reshape", "squeeze", "expand_dims")
def _reshape(writer, equation, x):
    if equation.params.get("dimensions") is not None and equation.primitive.name == "reshape":
        raise NotImplementedError(f"{writer.name} reshapes and transposes at once")
    return reshape(writer, x, equation.invars[0].aval.shape, equation.outvars[0].aval.shape)


def reshape(writer: Writer, x: str, shape: tuple[int, ...], target: tuple[int, ...]) -> str:
    """Row after row; a scalar is a reduction, since Triton reshapes to arrays alone."""
    if shape == target:
        return x
    if not target:
        return _reduce(writer, x, len(shape), range(len(shape)), "add")
    if not shape:
        return spread(writer, x, (), target)
    return writer.let(f"tl.reshape({x}, {dims(target)})")


@rule("transpose")
def _transpose(writer, equation, x):
    order = tuple(equation.params["permutation"])
    return x if order == tuple(range(len(order))) else writer.let(f"tl.permute({x}, {dims(order)})")


@rule("stack", "concatenate")
def _join(writer, equation, *values):
    """Two arrays that become the last axis."""
    shape = equation.outvars[0].aval.shape
    given = equation.params
    axis = given.get("axis", given.get("dimension"))
    if len(values) != 2 or axis != len(shape) - 1 or shape[-1] != 2:
        raise NotImplementedError(f"{writer.name} joins {len(values)} arrays to {shape}")
    x, y = (
        reshape(writer, value, v.aval.shape, shape[:-1])
        for value, v in zip(values, equation.invars, strict=True)
    )
    return writer.let(f"tl.join({x}, {y})")


@rule("unstack")
def _unstack(writer, equation, x):
    shape = equation.invars[0].aval.shape
    if equation.params["axis"] != len(shape) - 1 or shape[-1] != 2:
        raise NotImplementedError(f"{writer.name} takes {shape} apart")
    return _halves(writer, x)


@rule("split")
def _split(writer, equation, x):
    shape, axis = equation.invars[0].aval.shape, equation.params["axis"]
    count = len(equation.outvars)
    if len(set(equation.params["sizes"])) != 1 or count & (count - 1):
        raise NotImplementedError(f"{writer.name} splits {shape} at {equation.params['sizes']}")
    parts = [x]
    while len(parts) < count:
        half = shape[axis] // 2
        paired = (*shape[:axis], 2, half, *shape[axis + 1 :])
        order = (*(d for d in range(len(paired)) if d != axis), axis)
        shape = (*shape[:axis], half, *shape[axis + 1 :])
        pairs = [
            writer.let(f"tl.permute(tl.reshape({part}, {dims(paired)}), {dims(order)})")
            for part in parts
        ]
        parts = [half for pair in pairs for half in _halves(writer, pair)]
    return parts


def _halves(writer, x):
    first, second = writer.fresh(), writer.fresh()
    writer.line(f"{first}, {second} = tl.split({x})")
    return [first, second]


@rule("reduce_sum", "reduce_max", "reduce_min")
def _reduction(writer, equation, x):
    combine = {"sum": "add", "max": "maximum", "min": "minimum"}[equation.primitive.name[-3:]]
    axes = equation.params["axes"]
    return _reduce(writer, x, len(equation.invars[0].aval.shape), axes, combine)


def _reduce(writer, x, rank, axes, combine):
    """Over the last of the axes first; between two of them comes a layout of its own."""
    axes = sorted(axes, reverse=True)
    for axis in axes:
        x = writer.let(f"tl.reduce({x}, {axis}, {combine})")
        if axis != axes[-1]:
            x = writer.let(f"-(-{x})")
    return x


@rule("argmax", "argmin")
def _arg_extreme(writer, equation, x):
    (axis,), shape = equation.params["axes"], equation.invars[0].aval.shape
    numbers = writer.let(f"tl.arange(0, {shape[axis]})")
    numbers = _stretch(writer, numbers, (shape[axis],), (axis,), shape)
    value, index = writer.fresh(), writer.fresh()
    name = equation.primitive.name
    writer.line(f"{value}, {index} = tl.reduce(({x}, {numbers}), {axis}, {name})")
    return index


@rule("cumsum")
def _running_sum(writer, equation, x):
    if equation.params["reverse"]:
        raise NotImplementedError(f"{writer.name} sums from behind")
    return writer.let(f"tl.associative_scan({x}, {equation.params['axis']}, add)")


@rule("dot_general")
def _product(writer, equation, x, y):
    given = equation.params
    ((left,), (right,)), batch = given["dimension_numbers"]
    if batch != ((), ()) and batch != ([], []):
        raise NotImplementedError(f"{writer.name} multiplies batches of matrices")
    if left == 0:
        x = writer.let(f"tl.permute({x}, [1, 0])")
    if right == 1:
        y = writer.let(f"tl.permute({y}, [1, 0])")
    kinds = [v.aval.dtype for v in equation.invars]
    wanted = equation.outvars[0].aval.dtype
    inner = wanted if wanted in (jnp.int32, jnp.float16, jnp.float64) else jnp.dtype(jnp.float32)
    precision = _input_precision(writer, given["precision"], kinds)
    product = writer.let(
        f"tl.dot({x}, {y}, input_precision={precision!r}, max_num_imprecise_acc=0, "
        f"out_dtype={type_of(inner)})"
    )
    return convert(writer, product, inner, wanted)


def _input_precision(writer, precision, kinds):
    if precision is None or precision == lax.DotAlgorithmPreset.DEFAULT:
        precision = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    presets = {
        lax.DotAlgorithmPreset.TF32_TF32_F32: "tf32",
        lax.DotAlgorithmPreset.TF32_TF32_F32_X3: "tf32x3",
        lax.DotAlgorithmPreset.F32_F32_F32: "ieee",
    }
    if isinstance(precision, tuple):
        return "ieee" if lax.Precision.HIGHEST in precision and kinds[0] == jnp.float32 else "tf32"
    if precision not in presets or any(kind != jnp.float32 for kind in kinds):
        raise NotImplementedError(f"{writer.name} multiplies {kinds} with {precision}")
    return presets[precision]
