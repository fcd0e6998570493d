"""Loads and stores of Mosaic GPU kernels that each thread makes for itself.

Pallas has no gather from device memory by a vector of indices. `load_indexed_rows` and
`load_indexed_words` do it into registers, a thread loading the 16 elements of each row that its
layout gives it; in the interpreter they are indexed reads. A row number of -1 reads nothing and
gives zeros, so that what lies there (NaN, or a row of somebody else) is never seen.
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

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu.mosaic import ROW, ROWS, SWIZZLED, SWIZZLED_BYTES, Layout, Ref, plgpu

LINE_BYTES = 128
"""Bytes of a cache line."""


def load_indexed_rows(
    sources: Sequence[Ref],
    source: jax.Array,
    index: jax.Array,
    *,
    start: int,
    width: int,
    layout: Layout = ROWS,
) -> jax.Array:
    """Loads columns start .. start + width - 1 of the named rows.

    Args:
      sources: refs [R, n] in device memory, of one n and dtype.
      source: i32[64] in `ROW` layout, number of the source of each row.
      index: i32[64] in `ROW` layout, number of the row in its source; -1 is none.
      start: a multiple of 16.
      width: a multiple of 64, or of what the layout repeats.
      layout: `ROWS`, or one that gives a lane the same row and fewer columns.

    Returns:
      [64, width] in that layout; zeros where `index` is -1.
    """
    shape, dtype = (index.shape[0], width), sources[0].dtype
    if interpreting():
        rows = _interpret_gather(sources, source, index)
        return rows[:, start : start + width]

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(sources), ROW, ROW),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
    )
    def load(_, refs, source, index):
        tiled = layout.to_mgpu()
        index, source = (
            rows.broadcast_in_dim(shape, (0,), tiled).registers for rows in (index, source)
        )
        registers = np.empty(index.shape, dtype=object)
        length = tiled.vector_length
        *_, halves, _ = tiled.registers_shape(shape)
        # Row numbers are beside each register now, so that a thread knows which row it is to fill
        # it from.
        columns = tiled.thread_idxs(shape)
        for at, (_, column) in zip(np.ndindex(index.shape), columns, strict=True):
            *tile, half, _ = at
            if half:  # loaded together with its left neighbour
                continue
            column = arith.addi(column, mgpu.c(start, column.type))
            row = _Row.find(refs, source[at], index[at], all_present=False)
            # A lane's neighbouring columns at once: sixteen are two vectors of eight.
            loaded = row.load(column, halves * length)
            for side in range(halves):
                registers[(*tile, side, 0)] = mgpu.utils.vector_slice(
                    loaded, slice(length * side, length * (side + 1))
                )
        signed = mgpu.utils.is_signed(dtype)
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=signed)

    return load(list(sources), source, index)


def load_indexed_words(
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
      source: as in `load_indexed_rows`, in `layout`.
      index: as in `load_indexed_rows`, in `layout`.
      word: its number in the row.
      layout: a layout of one dim.
      all_present: promises that no `index` is -1, which saves looking.

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
        # Lanes that share a row ask for the same word, which is one access of the warp.
        one_word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        registers = np.empty(index.registers.shape, dtype=object)
        for at in np.ndindex(registers.shape):
            row = _Row.find(
                refs, source.registers[at], index.registers[at], all_present=all_present
            )
            loaded = row.load(column, count)
            registers[at] = mgpu.utils.bitcast(loaded, one_word)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=True)

    return load(list(sources), source, index)


def prefetch_rows(planes: Sequence[Sequence[Ref]], source: jax.Array, index: jax.Array) -> None:
    """Asks for whole rows to come into the L2 cache; waits for nothing and changes nothing.

    Args:
      planes: for each plane its sources, as in `load_indexed_rows`.
      source: as in `load_indexed_rows`.
      index: as in `load_indexed_rows`.
    """
    if interpreting():
        return
    shape, lanes = (index.shape[0], 64), 4
    count = len(planes[0])

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * (count * len(planes)), ROW, ROW))
    def prefetch(_, refs, source, index):
        tiled = ROWS.to_mgpu()
        index, source = (
            rows.broadcast_in_dim(shape, (0,), tiled).registers for rows in (index, source)
        )
        columns = tiled.thread_idxs(shape)
        for at, (_, column) in zip(np.ndindex(index.shape), columns, strict=True):
            if at[-2]:  # the right half of what its neighbour stands for
                continue
            # A row's four lanes have columns 0, 16, 32 and 48: as bytes 0, 128, 256 and 384, where
            # lines begin.
            line = arith.muli(column, mgpu.c(lanes * LINE_BYTES // shape[1], column.type))
            for first in range(0, len(refs), count):
                sources = refs[first : first + count]
                row = _Row.find(sources, source[at], index[at], all_present=False)
                row.prefetch(line, lanes)

    prefetch([ref for sources in planes for ref in sources], source, index)


def store_shared(target: Ref, values: jax.Array, layout: Layout) -> None:
    """Stores an array of the given layout in shared memory.

    Unlike an assignment it does not wait for the warpgroup's threads before and after, so that
    many can follow each other; `commit_smem` makes those in shared memory visible.

    Args:
      target: [n], or [M, N] in `SWIZZLED` or `SWIZZLED_BYTES` form.
      values: values of that shape.
      layout: layout of `values`.
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
      values: values of the target's dtype, one vector of 1 per thread and row.
      layout: layout of `values`.
    """
    if interpreting():
        target[pl.ds(first, values.shape[0])] = values
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), layout))
    def write(_, target, first, values):
        i64, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        tiled = values.layout
        base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(target))
        # A row's value is in several lanes, which store the same word to the same address.
        offset = arith.muli(arith.extsi(i64, first.registers.flat[0]), mgpu.c(4, i64))
        for at, (row,) in zip(
            np.ndindex(values.registers.shape), tiled.thread_idxs(values.shape), strict=True
        ):
            mine = arith.muli(arith.index_cast(i64, row), mgpu.c(4, i64))
            address = mgpu.utils.getelementptr(base, [mine], byte)
            address = mgpu.utils.getelementptr(address, [offset], byte)
            llvm.store(vector.extract(values.registers[at], [], [0]), address, alignment=4)

    write(target, jnp.int32(first), values)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Where a thread finds a row in device memory.

    Attributes:
      ref_type: type of the sources.
      base: address of its source's first element.
      index: i32, of the row; 0 where there is none.
      present: i1, whether there is one; None where there always is.
    """

    ref_type: ir.MemRefType
    base: ir.Value
    index: ir.Value
    present: ir.Value | None

    @classmethod
    def find(
        cls,
        refs: Sequence[ir.Value],
        source: ir.Value | None,
        index: ir.Value,
        *,
        all_present: bool,
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
            # Sources differ from lane to lane: a select for each, where a branch would split the
            # warp.
            chosen = arith.cmpi(arith.CmpIPredicate.eq, source, mgpu.c(number, i32))
            base = arith.select(chosen, other, base)
        ref_type = ir.MemRefType(refs[0].type)
        if all_present:
            return cls(ref_type, base, index, None)
        present = arith.cmpi(arith.CmpIPredicate.ne, index, mgpu.c(-1, i32))
        # Row 0 where there is none keeps the address inside the array; the predicate keeps it
        # unread.
        return cls(ref_type, base, arith.select(present, index, mgpu.c(0, i32)), present)

    @property
    def element_bytes(self) -> int:
        """Bytes of one column."""
        return mgpu.bitwidth(self.ref_type.element_type) // 8

    @property
    def num_bytes(self) -> int:
        """Bytes of the row."""
        return self.ref_type.shape[1] * self.element_bytes

    def prefetch(self, line: ir.Value, lanes: int) -> None:
        """Asks for the line at that byte of the row, and for every `lanes`-th after it."""
        i64, i32, byte = (ir.IntegerType.get_signless(bits) for bits in (64, 32, 8))
        assert self.present is not None
        start = arith.muli(arith.extsi(i64, self.index), mgpu.c(self.num_bytes, i64))
        start = mgpu.utils.getelementptr(self.base, [start], byte)
        for first in range(0, self.num_bytes, lanes * LINE_BYTES):
            inside = arith.cmpi(
                arith.CmpIPredicate.slt, line, mgpu.c(self.num_bytes - first, line.type)
            )
            wanted = arith.extui(i32, arith.andi(inside, self.present))
            offset = arith.addi(arith.index_cast(i64, line), mgpu.c(first, i64))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [mgpu.utils.getelementptr(start, [offset], byte), wanted],
                """{
                  .reg .pred wanted;
                  setp.ne.b32 wanted, $1, 0;
                  @wanted prefetch.global.L2 [$0];
                }""",
                "l,r",
                has_side_effects=True,
            )

    def load(self, column: ir.Value, count: int) -> ir.Value:
        """`count` elements from a column on; zeros where there is no row."""
        i64, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        size = self.element_bytes
        column = arith.muli(arith.index_cast(i64, column), mgpu.c(size, i64))
        address = mgpu.utils.getelementptr(self.base, [column], byte)
        # In 64 bits: a plane may be larger than 2^31 bytes.
        row = arith.muli(arith.extsi(i64, self.index), mgpu.c(self.num_bytes, i64))
        address = mgpu.utils.getelementptr(address, [row], byte)
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
    """One load of 1, 2 or 4 words, or zeros.

    A select after an ordinary load would wait for each before the next is issued. Loads through the
    non-coherent path (ld.global.nc) would be moved past barriers, to where they are used.
    """
    target, suffix = _vector_of(count)
    load = f"ld.global.L1::no_allocate{suffix}.b32 {target}, [${count}];"
    # Results are written before the address is read (the zeros), so that they may not share a
    # register with it: `=&`.
    operands, constraints = [address], ["=&r"] * count + ["l"]
    if present is not None:  # zeros first, which a load that does not happen leaves
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
        load = f"""{{
          .reg .pred present;
          setp.ne.b32 present, ${count + 1}, 0;
          {zeros}
          @present {load}
        }}"""
        present = arith.extui(ir.IntegerType.get_signless(32), present)  # PTX takes no i1
        operands, constraints = [address, present], [*constraints, "r"]
    return mgpu.utils.vector_concat(_words_of(load, operands, constraints, count))


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
    one_word = ir.VectorType.get((1,), i32)
    return [vector.broadcast(one_word, part) for part in parts]


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
