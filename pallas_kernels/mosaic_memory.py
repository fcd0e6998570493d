"""Loads and stores of Mosaic GPU kernels that each thread makes for itself.

Pallas has no gather from device memory by a vector of indices. `gather_rows` and `gather_words` do
it into registers, a thread loading the 16 elements of each row that its layout gives it; in the
interpreter they are indexed reads. A row number of -1 reads nothing and gives zeros, so that what
lies there (NaN, or a row of somebody else) is never seen.

`fetch_rows` and `fetch_words` are those whose results may arrive later: each thread copies what is
its own to a place of its own in shared memory (`cp.async`), from where `take` reads it after
`wait_fetched`. As nobody else looks there, no thread waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.backend import interpreting
from pallas_kernels.mosaic import ROW, ROWS, SWIZZLED, SWIZZLED_BYTES, Layout, Ref, plgpu

_THREADS, _PIECE = 128, 16
"""Of a warpgroup; bytes that a thread fetches at once."""
FETCHED_WORDS = _THREADS * _PIECE
"""Bytes of shared memory for `fetch_words`."""


def gather_rows(
    sources: Sequence[Ref],
    source: jax.Array,
    index: jax.Array,
    *,
    start: int,
    width: int,
    layout: Layout = ROWS,
    all_present: bool = False,
    run: int = 1,
    within: jax.Array | None = None,
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
      run: rows that `index` counts as one; a run's first row is `index * run`.
      within: i32[64] in `ROW` layout, the row counted from there; by default 0. What of it stays
        the same around a loop is added to the address once.

    Returns:
      [64, width] in `layout`; zeros where `index` is -1.
    """
    shape, dtype = (index.shape[0], width), sources[0].dtype
    within = index * 0 if within is None else within
    if interpreting():
        rows = _interpret_gather(sources, source, index, run, within)
        return rows[:, start : start + width]

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(sources), ROW, ROW, ROW),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
    )
    def load(_, refs, source, index, within):
        tiled = layout.to_mgpu()
        index, source, within = (
            rows.broadcast_in_dim(shape, (0,), tiled).registers for rows in (index, source, within)
        )
        registers = np.empty(index.shape, dtype=object)
        length = tiled.vector_length
        *_, halves, _ = tiled.registers_shape(shape)
        columns = tiled.thread_idxs(shape)
        for place, (_, column) in zip(np.ndindex(index.shape), columns, strict=True):
            *tile, half, _ = place
            if half:  # loaded together with its left neighbour
                continue
            column = arith.addi(column, mgpu.c(start, column.type))
            row = _Row.find(refs, source[place], index[place], all_present)
            loaded = row.load(run, within[place], column, halves * length)
            for side in range(halves):
                registers[(*tile, side, 0)] = mgpu.utils.vector_slice(
                    loaded, slice(length * side, length * (side + 1))
                )
        signed = mgpu.utils.is_signed(dtype)
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=signed)

    return load(list(sources), source, index, within)


def gather_words(
    sources: Sequence[Ref],
    source: jax.Array,
    index: jax.Array,
    *,
    word: int,
    layout: Layout = ROW,
    all_present: bool = False,
    run: int = 1,
    within: jax.Array | None = None,
) -> jax.Array:
    """Loads one 32-bit word of each of the named rows.

    Args:
      sources: refs [R, n] in device memory, of one n and a dtype of 8 or 32 bits.
      source: as in `gather_rows`.
      index: as in `gather_rows`.
      word: its number in the row.
      layout: of `source` and `index`.
      all_present: as in `gather_rows`.
      run: as in `gather_rows`.
      within: as in `gather_rows`.

    Returns:
      i32[64] in `layout`; zeros where `index` is -1.
    """
    size = sources[0].dtype.itemsize
    count = 4 // size
    within = index * 0 if within is None else within
    if interpreting():
        rows = _interpret_gather(sources, source, index, run, within)
        words = rows[:, word * count : (word + 1) * count]
        return lax.bitcast_convert_type(words[:, 0] if count == 1 else words, jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(sources), layout, layout, layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=layout),
    )
    def load(_, refs, source, index, within):
        column = mgpu.c(word * count, ir.IndexType.get())
        one_word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        registers = np.empty(index.registers.shape, dtype=object)
        for place in np.ndindex(registers.shape):
            row = _Row.find(refs, source.registers[place], index.registers[place], all_present)
            loaded = row.load(run, within.registers[place], column, count)
            registers[place] = mgpu.utils.bitcast(loaded, one_word)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=True)

    return load(list(sources), source, index, within)


def fetch_rows(
    target: Ref,
    source: Ref,
    index: jax.Array,
    *,
    layout: Layout,
    run: int,
    within: jax.Array,
) -> None:
    """Begins to copy the named rows into shared memory, for `take_rows`.

    Args:
      target: u8[M * width] in shared memory, M the length of `index`.
      source: u8[R, width] in device memory.
      index: i32[M] in `ROW` layout, number of a run of rows; there is always one.
      layout: `EVEN_ROWS`, in which `take_rows` will read.
      run: rows that `index` counts as one.
      within: i32[M] in `ROW` layout, the row counted from the run's first. What of it stays the
        same around a loop is added to the address once.
    """
    shape = (index.shape[0], source.shape[1])
    if interpreting():
        target[...] = _interpret_gather([source], index * 0, index, run, within).reshape(-1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), ROW, ROW))
    def fetch(_, target, source, index, within):
        tiled = layout.to_mgpu()
        index, within = (
            rows.broadcast_in_dim(shape, (0,), tiled).registers for rows in (index, within)
        )
        columns = tiled.thread_idxs(shape)
        for piece, (place, (_, column)) in enumerate(
            zip(np.ndindex(index.shape), columns, strict=True)
        ):
            row = _Row.find([source], None, index[place], True)
            address = row.address(run, within[place], column)
            _copy_async(_own_place(target, piece), address, _PIECE)

    fetch(target, source, index, within)


def fetch_words(
    target: Ref, source: Ref, index: jax.Array, *, layout: Layout, run: int, within: jax.Array
) -> None:
    """Begins to copy the first 32-bit word of each of the named rows into shared memory.

    Args:
      target: u8[2048] in shared memory: 16 bytes a thread, for up to four words.
      source: [R, n] in device memory, of 8 or 32 bits.
      index: as in `fetch_rows`, in `layout`.
      layout: in which `take_words` will read.
      run: as in `fetch_rows`.
      within: as in `fetch_rows`, in `layout`.
    """
    if interpreting():
        words = _interpret_gather([source], index * 0, index, run, within)
        words = words[:, : 4 // source.dtype.itemsize]
        target[: 4 * index.shape[0]] = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), layout, layout))
    def fetch(_, target, source, index, within):
        column = mgpu.c(0, ir.IndexType.get())
        byte = ir.IntegerType.get_signless(8)
        for word, place in enumerate(np.ndindex(index.registers.shape)):
            row = _Row.find([source], None, index.registers[place], True)
            address = row.address(run, within.registers[place], column)
            mine = mgpu.utils.getelementptr(_own_place(target, 0), [4 * word], byte)
            _copy_async(mine, address, 4)

    fetch(target, source, index, within)


def take_rows(source: Ref, shape: tuple[int, int], layout: Layout) -> jax.Array:
    """u8[M, width] that `fetch_rows` has put into shared memory."""
    if interpreting():
        return source[...].reshape(shape)
    result = plgpu.ShapeDtypeStruct(shape, jnp.uint8, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def take(_, source):
        tiled = layout.to_mgpu()
        bytes_of = ir.VectorType.get((_PIECE,), ir.IntegerType.get_signless(8))
        registers = np.empty(tiled.registers_shape(shape), dtype=object)
        for piece, place in enumerate(np.ndindex(registers.shape)):
            words = _load_shared(_own_place(source, piece), _PIECE // 4)
            registers[place] = mgpu.utils.bitcast(mgpu.utils.vector_concat(words), bytes_of)
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=False)

    return take(source)


def take_words(source: Ref, count: int, layout: Layout) -> jax.Array:
    """i32[count] that `fetch_words` has put into shared memory."""
    if interpreting():
        return lax.bitcast_convert_type(source[: 4 * count].reshape(count, 4), jnp.int32)
    result = plgpu.ShapeDtypeStruct((count,), jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def take(_, source):
        tiled = layout.to_mgpu()
        registers = np.empty(tiled.registers_shape((count,)), dtype=object)
        words = _load_shared(_own_place(source, 0), registers.size)
        for word, place in zip(words, np.ndindex(registers.shape), strict=True):
            registers[place] = word
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=True)

    return take(source)


def commit_fetches() -> None:
    """Ends a group of fetches, begun by this thread since the last."""
    _asm("cp.async.commit_group;")


def wait_fetched(behind: int) -> None:
    """Waits until at most the last `behind` groups are on their way."""
    _asm(f"cp.async.wait_group {behind};")


def store(target: Ref, values: jax.Array, layout: Layout) -> None:
    """Stores an array of the given layout in shared memory.

    Unlike an assignment it does not wait for the warpgroup's threads before and after, so that
    many can follow each other; `commit_smem` makes those in shared memory visible.

    Args:
      target: [n], or [M, N] in `SWIZZLED` or `SWIZZLED_BYTES` form.
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


def store_run(target: Ref, first: jax.Array, values: jax.Array, layout: Layout) -> None:
    """Stores `values` in device memory from element `first` on, and waits for nobody.

    Args:
      target: [N] of 32-bit elements.
      first: i32[].
      values: of the target's dtype, one vector of 1 per thread and row.
      layout: of `values`.
    """
    if interpreting():
        target[pl.ds(first, values.shape[0])] = values
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), layout))
    def write(_, target, first, values):
        i64, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        tiled = values.layout
        base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(target))
        offset = arith.muli(arith.extsi(i64, first.registers.flat[0]), mgpu.c(4, i64))
        for place, (row,) in zip(
            np.ndindex(values.registers.shape), tiled.thread_idxs(values.shape), strict=True
        ):
            mine = arith.muli(arith.index_cast(i64, row), mgpu.c(4, i64))
            address = mgpu.utils.getelementptr(base, [mine], byte)
            address = mgpu.utils.getelementptr(address, [offset], byte)
            llvm.store(vector.extract(values.registers[place], [], [0]), address, alignment=4)

    write(target, jnp.int32(first), values)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Where a thread finds a row in device memory.

    Attributes:
      ref_type: of the sources.
      base: address of its source's first element.
      index: i32, of a run of rows; 0 where there is none.
      present: i1, whether there is one; None where there always is.
    """

    ref_type: ir.MemRefType
    base: ir.Value
    index: ir.Value
    present: ir.Value | None

    @classmethod
    def find(
        cls, refs: Sequence[ir.Value], source: ir.Value | None, index: ir.Value, all_present: bool
    ) -> _Row:
        """Row `index` of the source of that number, both as vectors of one."""
        i32 = ir.IntegerType.get_signless(32)
        index = vector.extract(index, [], [0])
        if source is not None:
            source = vector.extract(source, [], [0])
        device_memory = llvm.PointerType.get(1)
        bases = [llvm.addrspacecast(device_memory, mgpu.utils.memref_ptr(ref)) for ref in refs]
        base = bases[0]
        for number, other in enumerate(bases[1:], 1):
            chosen = arith.cmpi(arith.CmpIPredicate.eq, source, mgpu.c(number, i32))
            base = arith.select(chosen, other, base)
        ref_type = ir.MemRefType(refs[0].type)
        if all_present:
            return cls(ref_type, base, index, None)
        present = arith.cmpi(arith.CmpIPredicate.ne, index, mgpu.c(-1, i32))
        return cls(ref_type, base, arith.select(present, index, mgpu.c(0, i32)), present)

    def address(self, run: int, within: ir.Value, column: ir.Value) -> ir.Value:
        """Of a column of row `index * run + within`."""
        i64 = ir.IntegerType.get_signless(64)
        byte = ir.IntegerType.get_signless(8)
        size = mgpu.bitwidth(self.ref_type.element_type) // 8
        width = self.ref_type.shape[1]

        def wide(number: ir.Value, factor: int) -> ir.Value:
            return arith.muli(arith.extsi(i64, number), mgpu.c(factor, i64))

        within = vector.extract(within, [], [0])
        element = arith.addi(wide(within, width), arith.index_cast(i64, column))
        address = mgpu.utils.getelementptr(
            self.base, [arith.muli(element, mgpu.c(size, i64))], byte
        )
        return mgpu.utils.getelementptr(address, [wide(self.index, run * width * size)], byte)

    def load(self, run: int, within: ir.Value, column: ir.Value, count: int) -> ir.Value:
        """`count` elements from a column on, of row `index * run + within`; zeros where none is."""
        byte = ir.IntegerType.get_signless(8)
        size = mgpu.bitwidth(self.ref_type.element_type) // 8
        address = self.address(run, within, column)
        total = count * size // 4
        words = [
            _load_words(
                mgpu.utils.getelementptr(address, [offset], byte), self.present, min(total, 4)
            )
            for offset in range(0, 4 * total, 16)
        ]
        return mgpu.utils.bitcast(
            mgpu.utils.vector_concat(words),
            ir.VectorType.get((count,), self.ref_type.element_type),
        )


def _load_words(address: ir.Value, present: ir.Value | None, count: int) -> ir.Value:
    """One load of 1 or 4 words, or zeros.

    A select after an ordinary load would wait for each before the next is issued. Loads through the
    non-coherent path (ld.global.nc) would be moved past barriers, to where they are used.
    """
    target, suffix = _vector_of(count)
    load = f"ld.global.L1::no_allocate{suffix}.b32 {target}, [${count}];"
    operands, constraints = [address], ["=&r"] * count + ["l"]
    if present is not None:
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
        load = f"""{{
          .reg .pred present;
          setp.ne.b32 present, ${count + 1}, 0;
          {zeros}
          @present {load}
        }}"""
        present = arith.extui(ir.IntegerType.get_signless(32), present)
        operands, constraints = [address, present], [*constraints, "r"]
    return mgpu.utils.vector_concat(_words_of(load, operands, constraints, count))


def _own_place(ref: ir.Value, piece: int) -> ir.Value:
    """Address of the thread's `piece`-th 16 bytes in shared memory, beside those of others."""
    i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(_THREADS, i32))
    base = llvm.addrspacecast(llvm.PointerType.get(3), mgpu.utils.memref_ptr(ref))
    base = mgpu.utils.getelementptr(base, [arith.muli(thread, mgpu.c(_PIECE, i32))], byte)
    return mgpu.utils.getelementptr(base, [piece * _PIECE * _THREADS], byte)


def _copy_async(target: ir.Value, source: ir.Value, size: int) -> None:
    """Of 16 bytes past the L1 cache, or of 4 through it: it takes no others past."""
    level = "cg" if size == 16 else "ca"
    copy = f"cp.async.{level}.shared.global [$0], [$1], {size};"
    llvm.inline_asm(None, [target, source], copy, "r,l", has_side_effects=True)


def _load_shared(address: ir.Value, count: int) -> list[ir.Value]:
    """1, 2 or 4 words, vectors of one; not an ordinary load, which could move before the wait."""
    target, suffix = _vector_of(count)
    load = f"ld.shared{suffix}.b32 {target}, [${count}];"
    return _words_of(load, [address], ["=r"] * count + ["r"], count)


def _vector_of(count: int) -> tuple[str, str]:
    """The first operands of an instruction as its target, and its suffix."""
    results = [f"${i}" for i in range(count)]
    return ("{" + ", ".join(results) + "}", f".v{count}") if count > 1 else (results[0], "")


def _words_of(
    text: str, operands: Sequence[ir.Value], constraints: Sequence[str], count: int
) -> list[ir.Value]:
    """What an instruction gives, made where it stands: `count` vectors of one word."""
    i32 = ir.IntegerType.get_signless(32)
    result = llvm.StructType.get_literal([i32] * count) if count > 1 else i32
    given = llvm.inline_asm(
        result, list(operands), text, ",".join(constraints), has_side_effects=True
    )
    parts = [llvm.extractvalue(i32, given, [i]) for i in range(count)] if count > 1 else [given]
    one = ir.VectorType.get((1,), i32)
    return [vector.broadcast(one, part) for part in parts]


def _asm(text: str) -> None:
    """An instruction without operands, made where it stands; none in the interpreter."""
    if interpreting():
        return

    @plgpu.inline_mgpu()
    def emit(_):
        llvm.inline_asm(None, [], text, "~{memory}", has_side_effects=True)

    emit()


def _interpret_gather(
    sources: Sequence[Ref], source: jax.Array, index: jax.Array, run: int, within: jax.Array
) -> jax.Array:
    """Rows as a GPU would load them; one outside its source is all ones, NaN in floats."""
    chosen = jnp.zeros((), sources[0].dtype)
    row = index * run + within
    for number, ref in enumerate(sources):
        rows = ref[...]
        inside = (row >= 0) & (row < rows.shape[0])
        loaded = jnp.where(inside[:, None], rows[jnp.where(inside, row, 0)], _all_ones(rows.dtype))
        chosen = jnp.where((source == number)[:, None], loaded, chosen)
    return jnp.where((index == -1)[:, None], jnp.zeros((), chosen.dtype), chosen)


def _all_ones(dtype: Any) -> jax.Array:
    return jnp.asarray(np.full(np.dtype(dtype).itemsize, 255, np.uint8).view(dtype)[0])
