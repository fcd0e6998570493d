"""Runs kernels in Triton's language on NumPy, one program after the other, without Triton.

Inside `translated` the interpreter's kernels are what `triton_language` makes of them. Memory is
checked: no access is outside of its array, and what a mask hides of a load without `other` is not a
number that a kernel may use. Ranges have sizes that are powers of two, as Triton wants.
"""

import contextlib
import itertools
import math
import sys
import types
from unittest import mock

import jax
import ml_dtypes
import numpy as np
from jax._src.pallas import hlo_interpreter

from pallas_kernels.gpu.triton_language import lowering  # noqa: F401  (registers the rules)
from pallas_kernels.gpu.triton_language.source import TYPES, translate

_POISON = 0xA5
_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
_FUNCTIONS = {"rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype), "pow": np.power} | {
    f"{a}{name}": getattr(np, f"{b}{name}")
    for a, b in (("a", "arc"), ("", ""))
    for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")
}
_program = {}


class Tensor(np.ndarray):
    """An array with Triton's conversions, and with the integer division of C."""

    def to(self, dtype, bitcast=False):
        if bitcast:
            return self.view(dtype)
        if np.issubdtype(dtype, np.integer) and self.dtype.kind not in "iub":
            limits = np.iinfo(dtype)
            wide = np.nan_to_num(np.trunc(self.astype(np.float64)), nan=0.0)
            low, high = wide <= limits.min, wide >= limits.max
            inside = np.where(low | high, 0, wide).astype(dtype)
            whole = np.where(low, limits.min, np.where(high, limits.max, inside))
            return tensor(whole.astype(dtype))
        return self.astype(dtype)

    def __floordiv__(self, other):
        x, y = (np.asarray(v).astype(np.int64) for v in (self, other))
        return tensor((np.sign(x) * np.sign(y) * (abs(x) // abs(y))).astype(self.dtype))

    def __mod__(self, other):
        return tensor(np.fmod(np.asarray(self), np.asarray(other)))


def tensor(x):
    return np.asarray(x).view(Tensor)


class Pointer:
    """Elements of a flat array."""

    def __init__(self, array, offsets):
        self.array, self.offsets = array, tensor(offsets)

    def __add__(self, offsets):
        return Pointer(self.array, self.offsets + offsets)

    def at(self, mask):
        """Where to look; what the mask hides may lie anywhere."""
        offsets = np.asarray(self.offsets)
        shown = np.broadcast_to(True if mask is None else mask, offsets.shape)
        seen = offsets[shown]
        assert ((seen >= 0) & (seen < self.array.size)).all(), "outside of the array"
        return np.where(shown, offsets, 0), shown


def load(pointer, mask=None, other=None, eviction_policy=None, volatile=False):
    index, shown = pointer.at(mask)
    if other is None:
        size = pointer.array.itemsize
        other = np.frombuffer(bytes([_POISON] * size), np.uint8).view(pointer.array.dtype)[0]
    return tensor(np.where(shown, pointer.array[index], other).astype(pointer.array.dtype))


def store(pointer, value, mask=None, eviction_policy=None):
    index, shown = pointer.at(mask)
    assert value.dtype == pointer.array.dtype, f"{value.dtype} in {pointer.array.dtype}"
    pointer.array[index[shown]] = np.broadcast_to(value, index.shape)[shown]


def atomic_add(pointer, value):
    np.add.at(pointer.array, *(np.broadcast_arrays(pointer.at(None)[0], value)))


def arange(start, stop):
    size = stop - start
    assert size.bit_count() == 1, f"{size} is no power of two"
    return tensor(np.arange(start, stop, dtype=np.int32))


def extreme(number, either):
    """Of bf16 the result is f32, as Triton has it."""

    def choose(x, y, propagate_nan=None):
        found = (either if propagate_nan == "all" else number)(x, y)
        return tensor(found).to(np.float32) if found.dtype == ml_dtypes.bfloat16 else tensor(found)

    return choose


def reduce(x, axis, combine):
    """Halves with halves, as long as there are two."""
    many = isinstance(x, tuple)
    parts = [np.moveaxis(part, axis, 0) for part in (x if many else (x,))]
    while (size := len(parts[0])) > 1:
        halves = [half for k in (0, 1) for half in (p[k * size // 2 :][: size // 2] for p in parts)]
        found = combine(*map(tensor, halves))
        parts = list(found) if many else [found]
    results = [tensor(part[0]) for part in parts]
    return tuple(results) if many else results[0]


def associative_scan(x, axis, combine):
    rows = list(np.moveaxis(x, axis, 0))
    return tensor(np.stack(list(itertools.accumulate(map(tensor, rows), combine)), axis))


def dot(x, y, input_precision, max_num_imprecise_acc, out_dtype):
    wide = np.int64 if x.dtype.kind in "iu" else np.float64
    return tensor((x.astype(wide) @ y.astype(wide)).astype(out_dtype))


def reshape(x, shape):
    assert shape, "scalars are no arrays in Triton"
    return tensor(np.asarray(x).reshape(shape))


class Libdevice(types.ModuleType):
    def __getattr__(self, name):
        function = _FUNCTIONS.get(name) or getattr(np, name)
        return lambda *arrays: tensor(function(*arrays))


def full(shape, value, dtype):
    """As Triton's: any zero is 0.0, and there is none of FP8."""
    assert np.dtype(dtype).name not in ("float8_e4m3fn", "float8_e5m2")
    return tensor(np.full(shape, value if value else 0, dtype))


def language():
    """Stand-ins of Triton's modules, by name."""
    tl = types.ModuleType("triton.language")
    for name, text in TYPES.items():
        setattr(tl, text.removeprefix("tl."), np.dtype(_DTYPES.get(name, name)))
    tl.PropagateNan = types.SimpleNamespace(ALL="all")
    tl.program_id = lambda axis: tensor(np.int32(_program["ids"][axis]))
    tl.full = full
    tl.maximum, tl.minimum = extreme(np.fmax, np.maximum), extreme(np.fmin, np.minimum)
    tl.where = lambda which, yes, no: tensor(np.where(which, yes, no))
    tl.abs = np.abs
    tl.expand_dims = lambda x, axis: tensor(np.expand_dims(x, axis))
    tl.broadcast_to = lambda x, shape: tensor(np.broadcast_to(x, shape))
    tl.permute = lambda x, order: tensor(np.transpose(x, order))
    tl.join = lambda x, y: tensor(np.stack([x, y], -1))
    tl.split = lambda x: (tensor(x[..., 0]), tensor(x[..., 1]))
    tl.debug_barrier = lambda: None
    for function in (load, store, atomic_add, arange, reduce, associative_scan, dot, reshape):
        setattr(tl, function.__name__, function)
    triton, extra = types.ModuleType("triton"), types.ModuleType("triton.language.extra")
    triton.jit, triton.language = (lambda function: function), tl
    extra.libdevice = Libdevice("triton.language.extra.libdevice")
    return {"triton": triton, "triton.language": tl, "triton.language.extra": extra}


def run(source, arrays):
    """Runs all programs of a kernel on flat arrays, which it changes."""
    names = {"range": lambda start, stop: map(tensor, np.arange(int(start), int(stop), dtype="i4"))}
    with mock.patch.dict(sys.modules, language()):
        exec(compile(source.text, source.name, "exec"), names)
    pointers = [Pointer(array, np.int32(0)) for array in arrays]
    with np.errstate(all="ignore"):
        for ids in itertools.product(*map(range, source.grid)):
            _program["ids"] = ids
            names[source.name](*pointers)


def call(*values, jaxpr, grid_mapping, input_output_aliases, out_avals):
    """The results of a `pl.pallas_call`, from its parameters; its name, and its source."""
    aliases = dict(input_output_aliases)
    inputs = [np.array(value) for value in values]
    of_output = {j: inputs[i] for i, j in aliases.items()}
    outputs = [of_output[j] if j in of_output else poisoned(a) for j, a in enumerate(out_avals)]
    source = translate(
        jaxpr,
        name=jaxpr.debug_info.func_name,
        grid=tuple(grid_mapping.grid),
        same=[(i, len(values) + j) for i, j in aliases.items()],
    )
    parameters = [*inputs, *(array for j, array in enumerate(outputs) if j not in of_output)]
    run(source, [array.reshape(-1) for array in parameters])
    return outputs


def poisoned(aval):
    count = math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
    return np.full(count, _POISON, np.uint8).view(aval.dtype).reshape(aval.shape)


@contextlib.contextmanager
def translated():
    """Kernels lowered for Pallas's interpreter are translated instead, and run here.

    Yields a list that gets the name of each kernel that has run. Programs that `jax.jit` has kept
    are as they were.
    """
    names = []

    def interpret(*arguments, jaxpr, grid_mapping, input_output_aliases, out_avals, **_):
        def run_one(*values):
            names.append(jaxpr.debug_info.func_name)
            return call(
                *values,
                jaxpr=jaxpr,
                grid_mapping=grid_mapping,
                input_output_aliases=input_output_aliases,
                out_avals=out_avals,
            )

        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in out_avals]
        return jax.pure_callback(run_one, shapes, *arguments)

    with mock.patch.object(hlo_interpreter, "pallas_call_hlo_interpret", interpret):
        yield names
