"""What Mosaic GPU kernels here share: a register layout for gathered rows, and the gathers.

Pallas has no gather from device memory into registers by a vector of indices. These two do it, a
thread loading the 16 elements of each row that its layout gives it; in the interpreter they are
indexed reads. A row number of -1 reads nothing and gives zeros, so that what lies there (NaN, or a
row of somebody else) is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.backend import interpreting

Ref = Any
Layout = Any
plgpu: Any = mosaic_gpu  # whose annotations describe its insides and not what callers may do

ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 64), (8, 16), (8,))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
"""[32 i, 64 j]: a warp holds 8 rows, 4 lanes a row, a lane 16 neighbouring columns in two vectors.

Loads of 16 bytes and more, and stores of 16 bytes that fill all banks of a 128-byte swizzle.
"""
ROW = ROWS.reduce(1)
"""[32 i]: one value per row of `ROWS`."""
WIDE_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 128), (8, 32), (16,))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
"""[32 i, 128 j] of bytes: as `ROWS`, a lane holding 32 neighbouring columns."""
EVEN_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 64), (8, 16))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)
"""[32 i, 64 j] of bytes: as `ROWS`, in one vector. Neighbouring lanes load neighbouring bytes."""

SWIZZLED_BYTES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Shared memory of 16-bit elements as tensor cores and bulk copies take it."""


def gather_rows(
    sources: Sequence[Ref],
    source: jax.Array,
    index: jax.Array,
    *,
    start: int,
    width: int,
    layout: Layout = ROWS,
    all_present: bool = False,
) -> jax.Array:
    """Loads columns start .. start + width - 1 of the named rows.

    Args:
      sources: refs [R, n] in device memory, of one n and dtype.
      source: i32[64] in `ROW` layout, number of the source of each row.
      index: i32[64] in `ROW` layout, number of the row in its source; -1 is none.
      start: a multiple of 16.
      width: a multiple of 64, or of 128 for `WIDE_ROWS`.
      layout: `ROWS`, `WIDE_ROWS` or `EVEN_ROWS`.
      all_present: promises that no `index` is -1, which saves looking.

    Returns:
      [64, width] in `layout`; zeros where `index` is -1.
    """
    shape, dtype = (index.shape[0], width), sources[0].dtype
    if interpreting():
        return _interpret_gather(sources, source, index)[:, start : start + width]

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(sources), ROW, ROW),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
    )
    def load(_, refs, source, index):
        tiled = layout.to_mgpu()
        index = index.broadcast_in_dim(shape, (0,), tiled).registers
        source = source.broadcast_in_dim(shape, (0,), tiled).registers
        registers = np.empty(index.shape, dtype=object)
        length = tiled.vector_length
        *_, halves, _ = tiled.registers_shape(shape)
        columns = tiled.thread_idxs(shape)
        for place, (_, column) in zip(np.ndindex(index.shape), columns, strict=True):
            *tile, half, _ = place
            if half:  # loaded together with its left neighbour
                continue
            row = _row_address(refs, source[place], index[place], all_present)
            column = arith.addi(column, mgpu.c(start, column.type))
            loaded = _load(*row, column, halves * length)
            for side in range(halves):
                registers[(*tile, side, 0)] = mgpu.utils.vector_slice(
                    loaded, slice(length * side, length * (side + 1))
                )
        signed = mgpu.utils.is_signed(dtype)
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=signed)

    return load(list(sources), source, index)


def gather_words(
    sources: Sequence[Ref],
    source: jax.Array,
    index: jax.Array,
    *,
    word: int,
    layout: Layout = ROW,
    all_present: bool = False,
) -> jax.Array:
    """Loads one 32-bit word of each of the named rows.

    Args:
      sources: refs [R, n] in device memory, of one n and a dtype of 8 or 32 bits.
      source: as in `gather_rows`.
      index: as in `gather_rows`.
      word: its number in the row.
      layout: of `source` and `index`.
      all_present: as in `gather_rows`.

    Returns:
      i32[64] in `layout`; zeros where `index` is -1.
    """
    size = sources[0].dtype.itemsize
    count = 4 // size
    if interpreting():
        rows = _interpret_gather(sources, source, index)
        words = rows[:, word * count : (word + 1) * count]
        return lax.bitcast_convert_type(words[:, 0] if count == 1 else words, jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(sources), layout, layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=layout),
    )
    def load(_, refs, source, index):
        column = mgpu.c(word * count, ir.IndexType.get())
        one_word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        registers = np.empty(index.registers.shape, dtype=object)
        for place in np.ndindex(registers.shape):
            row = _row_address(refs, source.registers[place], index.registers[place], all_present)
            registers[place] = mgpu.utils.bitcast(_load(*row, column, count), one_word)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=True)

    return load(list(sources), source, index)


def store(target: Ref, values: jax.Array, layout: Layout) -> None:
    """Stores an array of the given layout in shared memory, or in device memory.

    Unlike an assignment it does not wait for the warpgroup's threads before and after, so that
    many can follow each other; `commit_smem` makes those in shared memory visible.

    Args:
      target: f32[n], or in shared memory [M, N] in `SWIZZLED` or `SWIZZLED_BYTES` form.
      values: of that shape.
      layout: of `values`.
    """
    if interpreting():
        target[...] = values
        return
    swizzled = SWIZZLED if values.dtype.itemsize == 2 else SWIZZLED_BYTES
    transforms = swizzled if values.ndim == 2 else ()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), layout))
    def write(_, target, values):
        if transforms:
            values.store_tiled(target, swizzle=128)
        else:
            values.store_untiled(target, optimized=False)

    write(target, values)


def divide(numbers: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotients and remainders of i32 that are not negative; shifts, where that is enough."""
    if divisor & (divisor - 1):
        return lax.div(numbers, divisor), lax.rem(numbers, divisor)
    return numbers >> (divisor.bit_length() - 1), numbers & (divisor - 1)


def opaque(number: int | jax.Array) -> jax.Array:
    """The same i32, which the compiler can't know to be the same.

    What is computed from it is computed anew each time around a loop. Descriptors of operands that
    never move would else be kept, some 60 of them, in registers that there are not.
    """
    if interpreting():
        return jnp.int32(number)
    layout = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=layout)
    )
    def move(_, value):
        i32 = ir.IntegerType.get_signless(32)
        [register] = value.registers.flat
        moved = llvm.inline_asm(i32, [register], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(moved, (), is_signed=True)

    return move(jnp.int32(number))


def multiply_add(totals: Sequence[jax.Array], left: Ref, rights: Sequence[Ref]) -> list[jax.Array]:
    """totals[i] + left @ rights[i], in f32, by one warpgroup of a Hopper GPU.

    Args:
      totals: f32[M, N] each, in WGMMA layout.
      left: [M, K] in shared memory, `SWIZZLED`.
      rights: [K, N] each, in shared memory, `SWIZZLED`.
    """
    if interpreting():  # which has no accumulators that start from a value
        return [t + multiply([(left, r)]) for t, r in zip(totals, rights, strict=True)]

    def product(refs: Sequence[Ref]) -> None:
        for ref, right in zip(refs, rights, strict=True):
            plgpu.wgmma(ref, left, right)

    return list(pl.run_state(product)([plgpu.ACC.init(total) for total in totals]))


def multiply(pairs: Sequence[tuple[Ref | jax.Array, Ref]]) -> jax.Array:
    """The sum of left @ right over pairs, in f32, by one warpgroup of a Hopper GPU.

    Args:
      pairs: [M, K] in shared memory, `SWIZZLED`, or in registers, of a layout that wgmma takes; and
        [K, N] in shared memory, `SWIZZLED`.
    """
    shape = pairs[0][0].shape[0], pairs[0][1].shape[1]
    if interpreting() and isinstance(pairs[0][0], jax.Array):  # which wants both in memory
        wide = [(left.astype(jnp.float32), r[...].astype(jnp.float32)) for left, r in pairs]
        return sum((left @ right for left, right in wide), jnp.zeros(shape, jnp.float32))

    def product(total_ref: Ref) -> jax.Array:
        for left, right in pairs:
            plgpu.wgmma(total_ref, left, right)
        return total_ref[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def _row_address(
    refs: Sequence[ir.Value], source: ir.Value, index: ir.Value, all_present: bool
) -> tuple[ir.MemRefType, ir.Value, ir.Value, ir.Value | None]:
    """Type of the sources, address of the source's first element, row (0 for none), and if any.

    The last is None where all are present.
    """
    i32 = ir.IntegerType.get_signless(32)
    source, index = (vector.extract(v, [], [0]) for v in (source, index))
    device_memory = llvm.PointerType.get(1)
    bases = [llvm.addrspacecast(device_memory, mgpu.utils.memref_ptr(ref)) for ref in refs]
    base = bases[0]
    for number, other in enumerate(bases[1:], 1):
        chosen = arith.cmpi(arith.CmpIPredicate.eq, source, mgpu.c(number, i32))
        base = arith.select(chosen, other, base)
    if all_present:
        return ir.MemRefType(refs[0].type), base, index, None
    present = arith.cmpi(arith.CmpIPredicate.ne, index, mgpu.c(-1, i32))
    row = arith.select(present, index, mgpu.c(0, i32))
    return ir.MemRefType(refs[0].type), base, row, present


def _load(
    ref_type: ir.MemRefType,
    base: ir.Value,
    row: ir.Value,
    present: ir.Value | None,
    column: ir.Value,
    count: int,
) -> ir.Value:
    """`count` elements of a row in device memory; zeros where it is not present."""
    i64 = ir.IntegerType.get_signless(64)
    size = mgpu.bitwidth(ref_type.element_type) // 8
    element = arith.addi(
        arith.muli(arith.extsi(i64, row), mgpu.c(ref_type.shape[1], i64)),
        arith.index_cast(i64, column),
    )
    byte = ir.IntegerType.get_signless(8)
    address = mgpu.utils.getelementptr(base, [arith.muli(element, mgpu.c(size, i64))], byte)
    total = count * size // 4
    words = [
        _load_words(mgpu.utils.getelementptr(address, [offset], byte), present, min(total, 4))
        for offset in range(0, 4 * total, 16)
    ]
    return mgpu.utils.bitcast(
        mgpu.utils.vector_concat(words), ir.VectorType.get((count,), ref_type.element_type)
    )


def _load_words(address: ir.Value, present: ir.Value | None, count: int) -> ir.Value:
    """One load of 1 or 4 words, or zeros.

    A select after an ordinary load would wait for each before the next is issued. Loads through the
    non-coherent path (ld.global.nc) would be moved past barriers, to where they are used.
    """
    i32 = ir.IntegerType.get_signless(32)
    results = [f"${i}" for i in range(count)]
    target = "{" + ", ".join(results) + "}" if count > 1 else results[0]
    vector_suffix = f".v{count}" if count > 1 else ""
    load = f"ld.global.L1::no_allocate{vector_suffix}.b32 {target}, [${count}];"
    operands, constraints = [address], ["=&r"] * count + ["l"]
    if present is not None:
        load = f"""{{
          .reg .pred present;
          setp.ne.b32 present, ${count + 1}, 0;
          {" ".join(f"mov.b32 {r}, 0;" for r in results)}
          @present {load}
        }}"""
        operands, constraints = [address, arith.extui(i32, present)], [*constraints, "r"]
    result_type = llvm.StructType.get_literal([i32] * count) if count > 1 else i32
    loaded = llvm.inline_asm(
        result_type, operands, load, ",".join(constraints), has_side_effects=True
    )
    parts = [llvm.extractvalue(i32, loaded, [i]) for i in range(count)] if count > 1 else [loaded]
    one = ir.VectorType.get((1,), i32)
    return mgpu.utils.vector_concat([vector.broadcast(one, part) for part in parts])


def _interpret_gather(sources: Sequence[Ref], source: jax.Array, index: jax.Array) -> jax.Array:
    """Rows as a GPU would load them; one outside its source is all ones, NaN in floats."""
    chosen = jnp.zeros((), sources[0].dtype)
    for number, ref in enumerate(sources):
        rows = ref[...]
        inside = (index >= 0) & (index < rows.shape[0])
        loaded = jnp.where(
            inside[:, None], rows[jnp.where(inside, index, 0)], _all_ones(rows.dtype)
        )
        chosen = jnp.where((source == number)[:, None], loaded, chosen)
    return jnp.where((index == -1)[:, None], jnp.zeros((), chosen.dtype), chosen)


def _all_ones(dtype: Any) -> jax.Array:
    return jnp.asarray(np.full(np.dtype(dtype).itemsize, 255, np.uint8).view(dtype)[0])
