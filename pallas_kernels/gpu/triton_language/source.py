"""Writes a traced kernel as source of a function in Triton's language.

A kernel's body is Python over refs. JAX traces it into a jaxpr; here each equation becomes a line,
with the types, shapes and roundings that it names, so that what runs computes bit for bit what
Pallas's Triton backend computes of the same jaxpr. Only Pallas's core is needed for that, which
Mosaic shares: primitives are known by name, and nothing here imports Triton.

    def scale(p0, p1):                       # refs are pointers, in the order of the jaxpr
        v0 = tl.program_id(0)
        v1 = tl.load(p0 + v0)
        ...

`arithmetic`, `shapes` and `memory` have the lines of the primitives, `control` those of loops and
branches, this module the names.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import keyword
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

Value = Any
"""What an equation reads: a name in the source, or the pointer of a ref."""
TYPES = {
    "bool": "tl.int1",
    "int8": "tl.int8",
    "int16": "tl.int16",
    "int32": "tl.int32",
    "int64": "tl.int64",
    "uint8": "tl.uint8",
    "uint16": "tl.uint16",
    "uint32": "tl.uint32",
    "uint64": "tl.uint64",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "float32": "tl.float32",
    "float64": "tl.float64",
    "float8_e4m3fn": "tl.float8e4nv",
    "float8_e5m2": "tl.float8e5",
}
_GRID_LIMIT = 2**16 - 1  # of the second and third axis of a grid

HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def maximum(x, y):
    return tl.maximum(x, y).to(x.dtype)  # which Triton makes f32 of bf16


@triton.jit
def minimum(x, y):
    return tl.minimum(x, y).to(x.dtype)


@triton.jit
def argmax(x, i, y, j):
    index = tl.where(x > y, i, tl.where(x < y, j, tl.minimum(i, j)))
    return tl.maximum(x, y), index


@triton.jit
def argmin(x, i, y, j):
    index = tl.where(x < y, i, tl.where(x > y, j, tl.minimum(i, j)))
    return tl.minimum(x, y), index
"""


_TAKEN = {*re.findall(r"(?:^def|import|as) (\w+)(?=\(|$)", HEADER, re.MULTILINE), *dir(builtins)}
"""Names that lines of a kernel may use, which a kernel of that name would hide from them."""


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Where an array of a ref begins.

    Attributes:
      name: of the parameter.
      shape: of the array, whose rows lie one after the other.
      dtype: of its elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Source:
    """A kernel in Triton's language.

    Attributes:
      text: a module; it imports Triton and defines the kernel and what it calls.
      name: of the kernel.
      parameters: the kernel's, all pointers.
      grid: programs along the three axes of a launch.
    """

    text: str
    name: str
    parameters: tuple[str, ...]
    grid: tuple[int, int, int]


def translate(
    jaxpr: Any, *, name: str, grid: tuple[int, ...], same: Sequence[tuple[int, int]] = ()
) -> Source:
    """The source of a kernel.

    Args:
      jaxpr: of the body; its arguments are refs of whole arrays, and it returns nothing.
      name: of the kernel; what is no letter or digit becomes an underscore, and one is added to a
        name that the module needs itself.
      grid: programs, along any number of axes.
      same: pairs of arguments that are one array, of which the first has a parameter.

    Returns:
      The module and how it is launched. Its parameters are named after the arguments of the jaxpr
      in their order, `p0`, `p1`, ...; the second of each pair has none.

    Raises:
      NotImplementedError: the kernel has an operation that has no line here.
    """
    if jaxpr.outvars or getattr(jaxpr, "consts", ()):
        raise NotImplementedError(f"{name} returns values, or captures arrays")
    name = re.sub(r"\W", "_", name)
    if name in _TAKEN or keyword.iskeyword(name):
        name += "_"
    first = {second: first for first, second in same}
    pointers = [
        Pointer(f"p{first.get(i, i)}", tuple(v.aval.shape), v.aval.dtype)
        for i, v in enumerate(jaxpr.invars)
    ]
    parameters = tuple(p.name for i, p in enumerate(pointers) if i not in first)
    launch, program_ids = _fold_grid(grid)
    writer = Writer(name, program_ids)
    writer.call(jaxpr, pointers)
    head = f"\n\n@triton.jit\ndef {name}({', '.join(parameters)}):\n"
    constants = [f"    {key} = {text}\n" for text, key in writer.constants.items()]
    body = "".join(constants) + "\n".join(writer.lines)
    return Source(HEADER + head + (body or "    pass") + "\n", name, parameters, launch)


class Writer:
    """Lines of a kernel, and the names that are taken in it."""

    def __init__(self, name: str, program_ids: Sequence[str]):
        """Begins the body of the kernel `name`, whose axes of the grid have these expressions."""
        self.name = name
        self.program_ids = program_ids
        self.lines: list[str] = []
        self.constants: dict[str, str] = {}
        self._depth = 1
        self._count = 0

    def fresh(self) -> str:
        """A name that nothing has."""
        self._count += 1
        return f"v{self._count}"

    def line(self, text: str) -> None:
        """A line at the present depth."""
        self.lines.append("    " * self._depth + text)

    def let(self, expression: str) -> str:
        """The name of an expression's value."""
        name = self.fresh()
        self.line(f"{name} = {expression}")
        return name

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Lines inside are those of the block that `head` opens."""
        self.line(head)
        self._depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line("pass")
        self._depth -= 1

    def constant(self, value: Any, dtype: Any) -> str:
        """The name of a scalar of that dtype; all are written at the top of the kernel."""
        dtype = jnp.dtype(dtype)
        if dtype == jnp.bool_:
            text = str(bool(value))
        elif jnp.issubdtype(dtype, jnp.integer):
            text = str(int(value))
        else:
            number = np.asarray(value, dtype)
            text = repr(float(number)) if np.isfinite(number) else f'float("{float(number)}")'
            if dtype.itemsize == 1 or (number == 0 and np.signbit(number)):
                return self._bits(number)  # `tl.full` makes 0.0 of -0.0, and has no FP8
        return self._at_the_top(f"tl.full([], {text}, {TYPES[dtype.name]})")

    def _bits(self, number: np.ndarray) -> str:
        """A scalar constant by its bits."""
        bits = np.dtype(f"uint{8 * number.dtype.itemsize}")
        code = f"tl.full([], {int(number.view(bits))}, {TYPES[bits.name]})"
        return self._at_the_top(f"{code}.to({TYPES[number.dtype.name]}, bitcast=True)")

    def _at_the_top(self, text: str) -> str:
        return self.constants.setdefault(text, f"c{len(self.constants)}")

    def read(self, atom: Any, names: dict[Any, Value]) -> Value:
        """The value of a variable or of a literal."""
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            return self.constant(atom.val, aval.dtype)
        return names[atom]

    def call(self, jaxpr: Any, arguments: Sequence[Value]) -> list[Value]:
        """Writes the lines of a jaxpr of these arguments; the values of its results."""
        if getattr(jaxpr, "consts", ()):
            raise NotImplementedError(f"{self.name} captures arrays")
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        names = dict(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            values = [self.read(atom, names) for atom in equation.invars]
            rule = RULES.get(equation.primitive.name)
            if rule is None:
                raise NotImplementedError(
                    f"{self.name} has {equation.primitive.name}, which has no line in Triton's "
                    f"language here: {equation}"[:600]
                )
            results = rule(self, equation, *values)
            if not equation.primitive.multiple_results:
                results = [results]
            names.update(zip(equation.outvars, results, strict=True))
        return [self.read(atom, names) for atom in jaxpr.outvars]

    def inline(self, function: Callable[..., Any], equation: Any, *values: Value) -> list[Value]:
        """Writes the lines of a function of the equation's operands."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
        return self.call(jax.make_jaxpr(function)(*shapes).jaxpr, values)


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""By the name of a primitive: writes an equation's lines, and returns the value, or the values."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the lines of primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _fold_grid(grid: tuple[int, ...]) -> tuple[tuple[int, int, int], list[str]]:
    """Three axes of a launch, and each axis of a grid in terms of them.

    Axes that the launch has no room for are folded into its first one, the foremost fastest.
    """
    folded = max(len(grid) - 2, 0)
    while folded < len(grid) and any(n > _GRID_LIMIT for n in grid[folded:]):
        folded += 1
    if folded <= 1 and len(grid) <= 3:
        launch, ids = list(grid), [f"tl.program_id({axis})" for axis in range(len(grid))]
    else:
        launch, ids, left = [math.prod(grid[:folded])], [], "tl.program_id(0).to(tl.uint32)"
        for size in grid[:folded]:
            ids.append(f"({left} % {size}).to(tl.int32)")
            left = f"({left} // {size})"
        launch += grid[folded:]
        ids += [f"tl.program_id({axis + 1})" for axis in range(len(grid) - folded)]
    x, y, z = (*launch, 1, 1, 1)[:3]
    one = [size == 1 for size in grid]
    return (x, y, z), ["" if lone else each for lone, each in zip(one, ids, strict=True)]


def type_of(dtype: Any) -> str:
    """Triton's name of a dtype."""
    name = jnp.dtype(dtype).name
    if name not in TYPES:
        raise NotImplementedError(f"Triton has no {name}")
    return TYPES[name]


def dims(shape: tuple[int, ...]) -> str:
    """A shape in the source."""
    return f"[{', '.join(map(str, shape))}]"


def spread(writer: Writer, value: str, shape: tuple[int, ...], target: tuple[int, ...]) -> str:
    """A value of one shape, broadcast to another."""
    return value if shape == target else writer.let(f"tl.broadcast_to({value}, {dims(target)})")
