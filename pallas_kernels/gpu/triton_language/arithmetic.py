"""Arithmetic in Triton's language: what becomes an element of each of the operands' elements.

Each line does what Pallas's Triton backend does of the primitive: the same order of rounding, the
same functions of libdevice, no promotion.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.triton_language.source import Writer, rule, spread, type_of

_BINARY = {
    "add": "+",
    "add_any": "+",
    "sub": "-",
    "mul": "*",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shift_left": "<<",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
_LIBDEVICE = (
    *("ceil", "floor", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "cbrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "atan2", "pow"),
)


def _operands(writer, equation, values):
    """Each of the shape of the result."""
    target = equation.outvars[0].aval.shape
    return [
        spread(writer, value, v.aval.shape, target)
        for value, v in zip(values, equation.invars, strict=True)
    ]


@rule(*_BINARY)
def _binary(writer, equation, *values):
    if equation.params.get("out_dtype") is not None:
        raise NotImplementedError(f"{writer.name} multiplies into another dtype")
    x, y = _operands(writer, equation, values)
    return writer.let(f"{x} {_BINARY[equation.primitive.name]} {y}")


@rule("shift_right_logical", "shift_right_arithmetic")
def _shift_right(writer, equation, *values):
    """Triton's shift is arithmetic for signed types and logical for others."""
    x, y = _operands(writer, equation, values)
    dtype = equation.outvars[0].aval.dtype
    bits = dtype.itemsize * 8
    wanted = f"tl.{'uint' if 'logical' in equation.primitive.name else 'int'}{bits}"
    if wanted == type_of(dtype):
        return writer.let(f"{x} >> {y}")
    shifted = f"({x}.to({wanted}, bitcast=True) >> {y}.to({wanted}, bitcast=True))"
    return writer.let(f"{shifted}.to({type_of(dtype)}, bitcast=True)")


@rule("div")
def _divide(writer, equation, *values):
    x, y = _operands(writer, equation, values)
    dtype = equation.outvars[0].aval.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return writer.let(f"{x} // {y}")  # rounds towards zero, as the primitive does
    if dtype not in (jnp.float32, jnp.float64):
        raise NotImplementedError(f"{writer.name} divides {dtype}")
    return writer.let(f"{x} / {y}")


@rule("rem")
def _remainder(writer, equation, *values):
    x, y = _operands(writer, equation, values)
    return writer.let(f"{x} % {y}")  # has the sign of x, as the primitive's


@rule("min", "max")
def _extreme(writer, equation, *values):
    """Of a number and a NaN the number, as Pallas's Triton backend has it."""
    x, y = _operands(writer, equation, values)
    dtype = equation.outvars[0].aval.dtype
    call = f"tl.{equation.primitive.name}imum({x}, {y})"
    # Triton compares bf16 as f32, which is exact, and leaves it so.
    return writer.let(call + (".to(tl.bfloat16)" if dtype == jnp.bfloat16 else ""))


@rule("clamp")
def _clamp(writer, equation, *values):
    return writer.inline(lambda low, x, high: lax.min(lax.max(low, x), high), equation, *values)[0]


@rule("abs")
def _absolute(writer, equation, x):
    return writer.let(f"tl.abs({x})")


@rule("neg")
def _negate(writer, equation, x):
    return writer.let(f"{writer.constant(0, equation.outvars[0].aval.dtype)} - {x}")


@rule("sign")
def _sign(writer, equation, x):
    def sign(x):
        if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
            return (x != 0).astype(x.dtype)
        one = (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)
        return jnp.where(x != x, jnp.nan, one) if jnp.issubdtype(x.dtype, jnp.floating) else one

    return writer.inline(sign, equation, x)[0]


@rule("not")
def _not(writer, equation, x):
    return writer.let(f"~{x}")


@rule("square")
def _square(writer, equation, x):
    return writer.let(f"{x} * {x}")


@rule("integer_pow")
def _integer_power(writer, equation, x):
    exponent = equation.params["y"]
    if exponent < 1:
        raise NotImplementedError(f"{writer.name} has a power of {exponent}")
    power, square = None, x
    while exponent:
        if exponent & 1:
            power = square if power is None else writer.let(f"{power} * {square}")
        exponent >>= 1
        if exponent:
            square = writer.let(f"{square} * {square}")
    return power


@rule("logistic")
def _logistic(writer, equation, x):
    return writer.inline(lambda x: 1 / (1 + jnp.exp(-x)), equation, x)[0]


@rule("is_finite")
def _is_finite(writer, equation, x):
    return writer.let(f"tl.abs({x}) < {writer.constant(math.inf, equation.invars[0].aval.dtype)}")


@rule(*_LIBDEVICE)
def _libdevice(writer, equation, *values):
    dtype = equation.outvars[0].aval.dtype
    if dtype not in (jnp.float32, jnp.float64):
        raise NotImplementedError(f"{writer.name} has {equation.primitive.name} of {dtype}")
    return writer.let(f"libdevice.{equation.primitive.name}({', '.join(values)})")


@rule("select_n")
def _select(writer, equation, which, *cases):
    if len(cases) != 2 or equation.invars[0].aval.dtype != jnp.bool_:
        raise NotImplementedError(f"{writer.name} selects of {len(cases)} cases by an integer")
    target = equation.outvars[0].aval.shape
    shapes = [v.aval.shape for v in equation.invars]
    which, no, yes = (
        spread(writer, value, shape, target)
        for value, shape in zip((which, *cases), shapes, strict=True)
    )
    return writer.let(f"tl.where({which}, {yes}, {no})")


@rule("convert_element_type")
def _convert(writer, equation, x):
    source, target = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    return convert(writer, x, source, jnp.dtype(target))


def convert(writer: Writer, x: str, source: Any, target: Any) -> str:
    """A value of one dtype as another; of floats to integers the nearest that there is."""
    if source == target:
        return x
    halves = (jnp.float16, jnp.bfloat16)
    if source in halves and target != jnp.float32:
        return convert(
            writer, convert(writer, x, source, jnp.dtype(jnp.float32)), jnp.float32, target
        )
    if jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.integer):
        limits = jnp.iinfo(target)
        low, high = (writer.constant(n, source) for n in (limits.min, limits.max))
        both = "propagate_nan=tl.PropagateNan.ALL"
        x = writer.let(f"tl.maximum(tl.minimum({x}, {high}, {both}), {low}, {both})")
    return writer.let(f"{x}.to({type_of(target)})")


@rule("bitcast_convert_type")
def _bitcast(writer, equation, x):
    source, target = equation.invars[0].aval.dtype, jnp.dtype(equation.params["new_dtype"])
    if source.itemsize != target.itemsize:
        raise NotImplementedError(f"{writer.name} takes {source} for {target}, of another size")
    return x if source == target else writer.let(f"{x}.to({type_of(target)}, bitcast=True)")


@rule("stop_gradient", "reduce_precision_identity", "copy", "reshard")
def _same(writer, equation, x):
    return x


@rule("inline_ptx")
def _inline_ptx(writer, equation, *values):
    given = equation.params
    return writer.let(
        f"tl.inline_asm_elementwise({given['text']!r}, {given['constraints']!r}, "
        f"[{', '.join(values)}], dtype={type_of(given['result'].dtype)}, is_pure=True, "
        f"pack={given['pack']})"
    )


@rule("program_barrier")
def _barrier(writer, equation):
    writer.line("tl.debug_barrier()")
    return []
