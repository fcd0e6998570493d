"""The one door to kernels through Triton: launches in place, byte planes as words, exact products.

A kernel is Python over refs, which Pallas's core traces; `triton_lowering` chooses what a GPU gets
of it, and no kernel names a backend. Whatever stands behind this module must do the following:

- `launch`: the programs of a grid in any order, each with all refs as whole arrays in rows; what is
  updated in place is one array, and nothing is copied.
- `ref[...]`, `load_where`, `load_row`: elements by computed indices of any shape; behind a mask no
  address is read, and the value is `other`. Stores likewise; a store is seen by the program itself
  after `wait_for_all_threads`, and by others after the launch.
- Reductions, running sums and products of matrices within a program; of NaN and a number `maximum`
  is the number, and of equal numbers `argmax` has the first.
- Arithmetic in the dtype that is written. f32 sums of products may be fused where no rounding is
  spelt out, subnormal numbers stay, and `exact_product` and `exact_quotient` are rounded once.
- `inline_lines`: PTX for the elements of arrays, once for each; where nothing reads the result it
  may be left out.

Offsets are computed in signed 32 bits for arrays of up to 4 GiB: rows of a byte plane past 2 GiB
would be written before its beginning. As words of 4 bytes such a plane has at most 2**30 elements,
and beyond 4 GiB offsets have 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import numbers
from pallas_kernels.common.backend import interpreting
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.rounding import exact_divide, rounded
from pallas_kernels.gpu.compat import primitives
from pallas_kernels.gpu.triton_lowering import compiler_params, operations

Ref = Any
_WORD_BYTES = 4
_WARPS = (1, 2, 4, 8, 16, 32)
_ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


def launch(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    inputs: Any,
    in_place: Any = None,
    outputs: Any = None,
    num_warps: int,
    num_stages: int | None = None,
    name: str,
) -> Any:
    """Runs a kernel that updates arrays in place, or makes new ones.

        def double(x, y):                # refs, in the trees in which arrays were given
            y[...] = 2 * x[...]

        y = launch(double, grid=(1,), inputs=x, outputs=jax.ShapeDtypeStruct(...), ...)

    Args:
      kernel: called with a tree of refs for `inputs`, then one for `in_place` and one for
        `outputs`, as far as they are given. It does not write to `inputs`.
      grid: programs.
      inputs: a tree of arrays.
      in_place: a tree of arrays; donated by the caller's jit, they are not copied. What the kernel
        does not write of them keeps its content.
      outputs: a tree of the shapes of new arrays; what the kernel does not write of them is
        arbitrary.
      num_warps: of 32 threads, per program; a power of two up to 32. Of three, say, Triton
        does not raise: it ends the process that compiles.
      num_stages: loads of a loop's products that are on their way at once; None is Triton's choice.
      name: of the kernel in a profile.

    Returns:
      The tree of `in_place`, updated, or that of `outputs`, made; of both, a pair.

    Raises:
      NotImplementedError: an array is of a size whose offsets would be wrong.
      ValueError: a program can't have that many warps.
    """
    if num_warps not in _WARPS:
        raise ValueError(f"{name} takes {_WARPS} warps a program, got {num_warps}")
    written = [tree for tree in (in_place, outputs) if tree is not None]
    read_leaves, read_tree = jax.tree.flatten(inputs)
    updated_leaves = jax.tree.leaves(in_place)
    written_leaves, written_tree = jax.tree.flatten(written)
    for array in (*read_leaves, *written_leaves):
        _check_offsets(array)
    num_inputs, num_updated = len(read_leaves), len(updated_leaves)

    def body(*refs: Ref) -> None:
        # An updated array comes twice, as operand and as result; the kernel sees the result.
        read, stored = refs[:num_inputs], refs[num_inputs + num_updated :]
        kernel(jax.tree.unflatten(read_tree, read), *jax.tree.unflatten(written_tree, stored))

    body.__name__ = name
    # Inside `gpu_interpreter()` a call would go to Mosaic's interpreter, which is not for this one.
    with plgpu.force_gpu_interpret_mode(None):  # pyright: ignore[reportArgumentType]
        call = pl.pallas_call(
            body,
            grid=grid,
            in_specs=[_ANYWHERE] * (num_inputs + num_updated),
            out_specs=[_ANYWHERE] * len(written_leaves),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written_leaves],
            input_output_aliases={num_inputs + i: i for i in range(num_updated)},
            compiler_params=compiler_params(num_warps, num_stages),
            interpret=interpreting(),
            name=name,
        )
        results = jax.tree.unflatten(written_tree, call(*read_leaves, *updated_leaves))
    return results[0] if len(results) == 1 else tuple(results)


def as_words(planes: Planes) -> Planes:
    """Byte planes whose rows are whole words as u32[..., n / 4]; a view, the others as they are."""
    return {name: _as_words(plane) for name, plane in planes.items()}


def word_shapes(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes that `as_words` gives planes of these shapes."""
    return {name: jax.eval_shape(_as_words, shape) for name, shape in shapes.items()}


def from_words(planes: Planes, shapes: Mapping[str, jax.ShapeDtypeStruct | jax.Array]) -> Planes:
    """The inverse of `as_words`, given the planes or their shapes before it."""
    return {
        name: jax.lax.bitcast_convert_type(plane, jnp.uint8).reshape(shapes[name].shape)
        if plane.dtype != shapes[name].dtype
        else plane
        for name, plane in planes.items()
    }


def exp_of_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """e**-|x - y| of f32, as `exp` has it; in a kernel."""
    if interpreting():
        return jnp.exp(-jnp.abs(x - y))
    asm = (
        "{ .reg .f32 t; sub.rn.f32 t, $1, $2; abs.f32 t, t; mul.rn.f32 t, t, 0fBFB8AA3B; "
        "ex2.approx.ftz.f32 $0, t; }"
    )
    return _inline(asm, x, y)


def exact_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """f32 product, rounded before anything is added to it; in a kernel.

    ptxas fuses no instruction whose rounding is spelt out.
    """
    if interpreting():
        return rounded(x * y)
    return _inline("mul.rn.f32 $0, $1, $2;", x, y)


def exact_quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """The IEEE quotient of f32 arrays of one shape; in a kernel, whose `/` is approximate."""
    if interpreting():
        return exact_divide(x, y)
    return _inline("div.rn.f32 $0, $1, $2;", x, y)


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x of f32, off by a unit in the last place: one instruction; in a kernel.

    A subnormal counts as 0.
    """
    if interpreting():
        return 1 / x
    return _inline("rcp.approx.ftz.f32 $0, $1;", x)


def exp(x: jax.Array) -> jax.Array:
    """e**x of f32 x <= 0, two instructions instead of libdevice's eight; in a kernel.

    Off by 2**-22 of itself and by |x| * 2**-23.5, which as a weight beside 1 is 2**-25 at most.
    """
    if interpreting():
        return jnp.exp(x)
    asm = "{ .reg .f32 t; mul.rn.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }"
    return _inline(asm, x)


def sin_cos(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine of f32 |x| <= 10**6, off by 2**-23 at most, or 2**22, by 2**-21; in a kernel.

    One reduction by multiples of pi / 2 for both, where libdevice has two and a slow path. Fused,
    x - k * fl(pi / 2) is exact; two more terms of pi / 2 leave an error below 2**-30.
    """
    if interpreting():
        return jnp.sin(x), jnp.cos(x)

    def fma(a: jax.Array, b: jax.Array | float, c: jax.Array | float) -> jax.Array:
        b, c = (
            v if isinstance(v, jax.Array) else jnp.full(x.shape, v, jnp.float32) for v in (b, c)
        )
        return _inline("fma.rn.f32 $0, $1, $2, $3;", a, b, c)

    shifted = fma(x, 0.63661977, 12582912.0)  # 1.5 * 2**23: what is left of the sum is an integer
    quadrant = jax.lax.bitcast_convert_type(shifted, jnp.int32)
    quarters = shifted - 12582912.0
    # pi / 2 in three terms of f32, so that what is left of x keeps its bits.
    r = fma(quarters, -1.5707963705062866, x)
    r = fma(quarters, 4.371138828673793e-08, r)
    r = fma(quarters, 1.7151245100058819e-15, r)
    square = exact_product(r, r)
    # Polynomials of r in -pi / 4 .. pi / 4; then quadrants exchange sine and cosine, or negate
    # them.
    sin = fma(fma(square, -1.9515295891e-4, 8.3321608736e-3), square, -1.6666654611e-1)
    sin = fma(exact_product(sin, square), r, r)
    cos = fma(fma(square, 2.443315711809948e-5, -1.388731625493765e-3), square, 4.1666645683e-2)
    cos = fma(fma(cos, square, -0.5), square, 1.0)
    odd = (quadrant & 1) == 1
    sine, cosine = jnp.where(odd, cos, sin), jnp.where(odd, sin, cos)
    sine = jnp.where((quadrant & 2) == 2, -sine, sine)
    return sine, jnp.where(((quadrant + 1) & 2) == 2, -cosine, cosine)


def round_to_bf16(x: jax.Array) -> jax.Array:
    """f32 -> f32 with the bits of a bf16; in a kernel, where the conversion is done as written.

    XLA may leave it out, so the interpreter adds half an ulp, or a bit less at an even bit.
    """
    if not interpreting():
        return x.astype(jnp.bfloat16).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & 1)) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(bits, jnp.float32))


def wait_for_all_threads() -> None:
    """Until what the program's other threads stored can be loaded; in a kernel."""
    if not interpreting():
        operations().barrier()


def encode_e4m3(x: jax.Array) -> jax.Array:
    """`numbers.encode_e4m3` in a kernel: the instruction rounds once, and saturates."""
    if interpreting():
        return numbers.encode_e4m3(x)
    # The conversion is one instruction here; XLA's own would round twice.
    return jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)


def inline_lines(
    text: str, arrays: Sequence[jax.Array], constraints: str, *, pack: int, dtype: Any
) -> jax.Array:
    """PTX of a thread that sees `pack` elements of each array at once, in 32-bit registers.

    Args:
      text: the instructions; the compiler takes them for a function of the operands, and may leave
        them out where nothing reads the result.
      arrays: of one shape; elements of 16 bits come two in a register.
      constraints: LLVM's, of the registers of the result and of all arrays.
      pack: consecutive elements of a thread; no more than it has of an array that was loaded.
      dtype: of the result.

    Returns:
      An array of that shape.
    """
    result = jax.ShapeDtypeStruct(arrays[0].shape, dtype)
    return operations().inline_ptx(text, arrays, constraints, pack=pack, result=result)


def load_where(
    ref: Ref, index: tuple[jax.Array, ...], mask: jax.Array, other: float = 0
) -> jax.Array:
    """ref[index] where the mask is set, else `other`; indices are broadcast to the mask's shape."""
    index = tuple(jnp.broadcast_to(i, mask.shape) for i in index)
    return primitives.load(ref.at[index], None, mask=mask, other=jnp.asarray(other, ref.dtype))


def store_where(ref: Ref, index: tuple[jax.Array, ...], values: jax.Array, mask: jax.Array) -> None:
    """Writes values to ref[index] where the mask is set; see `store_row` on the interpreter."""
    *first, last = (jnp.broadcast_to(i, mask.shape) for i in index)
    if interpreting():
        # It writes back what it finds behind the mask: out of the array that is dropped.
        last = jnp.where(mask, last, ref.shape[-1])
    primitives.store(ref.at[(*first, last)], None, values, mask=mask)


def load_row(
    ref: Ref,
    index: tuple[jax.Array | int, ...],
    *,
    start: jax.Array | int,
    count: int,
    width: int,
    live: jax.Array | None = None,
    last: bool = False,
) -> jax.Array:
    """[width], `count` columns from `start` on of a row, and zeros after them.

    Args:
      ref: [..., n].
      index: of the row.
      start: first column.
      count: columns.
      width: lanes, a power of two.
      live: bool[]; where False nothing is read and all lanes are zeros.
      last: whether hardly anything reads the row again: L2 drops it before what it holds else.
    """
    if count == width:
        columns = pl.ds(start, width)
        mask = None if live is None else jnp.broadcast_to(live, width)
    else:
        lane = jnp.arange(width, dtype=jnp.int32)
        columns, mask = start + lane, lane < count
        mask = mask if live is None else mask & live
    # A row that fills its lanes has no mask, and nothing stands in the way of wide loads.
    other = None if mask is None else 0
    policy = "evict_first" if last else None
    columns_of_row = ref.at[(*_as_arrays(index), columns)]
    return primitives.load(columns_of_row, None, mask=mask, other=other, eviction_policy=policy)


def store_row(
    ref: Ref,
    index: tuple[jax.Array | int, ...],
    values: jax.Array,
    *,
    first: int,
    count: int,
    start: jax.Array | int = 0,
) -> None:
    """Writes lanes first .. first + count - 1 of values [width] to a row, from column `start` on.

    The interpreter writes back what it finds in masked columns: there they lie past the row.
    """
    width = values.shape[0]
    if count == width:
        ref[(*_as_arrays(index), pl.ds(start, width))] = values
        return
    lane = jnp.arange(width, dtype=jnp.int32)
    mask = (lane >= first) & (lane < first + count)
    # Lane `first` goes to column `start`, and lanes before it below it, masked.
    columns = lane - first + start
    if interpreting():
        columns = jnp.where(mask, columns, ref.shape[-1] + lane)
    primitives.store(ref.at[(*_as_arrays(index), columns)], None, values, mask=mask)


def copy_row(
    source: Ref, row: tuple[jax.Array, ...], target: Ref, at: tuple[jax.Array, ...]
) -> None:
    """source[row] to target[at], a scalar or a row of any length."""
    if len(source.shape) == len(row):
        target[at] = source[row]
        return
    count = source.shape[-1]
    width = pl.next_power_of_2(count)
    # Lanes are a power of two; those beyond the row are masked on either side.
    values = load_row(source, row, start=0, count=count, width=width)
    store_row(target, at, values, first=0, count=count)


def _as_arrays(index: tuple[jax.Array | int, ...]) -> tuple[jax.Array, ...]:
    """The interpreter takes no Python int beside a slice."""
    return tuple(jnp.full((), i, jnp.int32) if isinstance(i, int) else i for i in index)


def _as_words(plane: jax.Array) -> jax.Array:
    if plane.dtype != jnp.uint8 or plane.shape[-1] % _WORD_BYTES:
        return plane
    words = (*plane.shape[:-1], plane.shape[-1] // _WORD_BYTES, _WORD_BYTES)
    return jax.lax.bitcast_convert_type(plane.reshape(words), jnp.uint32)


def _check_offsets(array: jax.Array | jax.ShapeDtypeStruct) -> None:
    num_bytes = math.prod(array.shape) * array.dtype.itemsize
    # Offsets have 32 bits and a sign, one bit too few for it; beyond 4 GiB they have 64.
    if array.size >= 1 << 31 and num_bytes <= 1 << 32:
        raise NotImplementedError(
            "Pallas through Triton has wrong offsets in an array of 2**31 elements or more that "
            f"takes at most 4 GiB, got {array.dtype}{list(array.shape)}; make its rows whole words"
        )


def _inline(asm: str, *arrays: jax.Array) -> jax.Array:
    """One instruction, or a few, on f32 arrays of one shape."""
    constraints = ",".join(["=f"] + ["f"] * len(arrays))
    return inline_lines(asm, arrays, constraints, pack=1, dtype=jnp.float32)
