"""Which pairs of a token and an expert a tile's rows are, where its CTA finds that itself.

Of few pairs no launch sorts them. An item is a pair, and the first one that names an expert has all
that do: a lane of each warp compares one pair's expert, or two, with the item's, and the votes of
the lanes are a bit for each pair. Row n of the tile is the n-th pair whose bit is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.backend import interpreting

Ref = Any
plgpu: Any = mosaic_gpu
MOST_PAIRS = 64
"""Bits of two words."""
_LANES = 32
_SCALAR = plgpu.Layout.WG_SPLAT(())
_NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs that name one expert.

    Attributes:
      words: i32[] twice, bit p % 32 of word p // 32 for pair p.
      first: i32[], the first of them.
      count: i32[], how many.
      most: how many there are at most; static.
    """

    words: tuple[jax.Array, jax.Array]
    first: jax.Array
    count: jax.Array
    most: int

    @classmethod
    def find(cls, experts: Ref, wanted: jax.Array, most: int) -> Pairs:
        """Those that name an expert, one of them at least.

        Args:
          experts: i32[P] in device memory, of each pair; at most `MOST_PAIRS`.
          wanted: i32[], the expert.
          most: pairs that name it at most.
        """
        if interpreting():
            named = [(experts[pair] == wanted).astype(jnp.int32) for pair in range(len(experts))]
            bits = jnp.stack(named)
            words = [jnp.int32(0), jnp.int32(0)]
            for pair, bit in enumerate(named):
                words[pair // _LANES] |= bit << (pair % _LANES)
            return cls((words[0], words[1]), jnp.argmax(bits).astype(jnp.int32), bits.sum(), most)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=(_NUMBER,) * 4)
        def vote(_, experts, wanted):
            words = _vote(experts, wanted.registers.flat[0])
            counts = [_ptx("popc.b32 $0, $1;", [word]) for word in words]
            zero = mgpu.c(0, ir.IntegerType.get_signless(32))
            numbers = *words, _nth(words, zero, 1), arith.addi(*counts)
            return tuple(mgpu.FragmentedArray.splat(n, (), is_signed=True) for n in numbers)

        low, high, first, count = vote(experts, wanted)
        return cls((low, high), first, count, most)

    def nth(self, row: Any) -> Any:
        """The pair that a row of the tile is, i32[], in the interpreter."""
        numbers = jnp.arange(MOST_PAIRS, dtype=jnp.int32)
        word = jnp.where(numbers < _LANES, *self.words)
        before = jnp.cumsum((word >> (numbers % _LANES)) & 1)
        return jnp.sum(before <= row, dtype=jnp.int32)

    def nth_in_kernel(self, words: Sequence[Any], row: ir.Value) -> ir.Value:
        """The same of an MLIR value that threads may have each their own of, and `words` of it."""
        return _nth([word.registers.flat[0] for word in words], row, self.most)

    def load(self, source: Ref, first: Any, num_rows: jax.Array, count: int, layout: Any) -> Any:
        """An element for each of some rows of the tile, of its pair.

        Args:
          source: f32[P] in device memory.
          first: i32[], the first row.
          num_rows: i32[], rows of the tile; those beyond have the last one's element.
          count: how many rows.
          layout: of the result, f32[count].
        """
        last = num_rows - 1
        if interpreting():
            pairs = [self.nth(jnp.minimum(first + row, last)) for row in range(count)]
            return jnp.stack([source[pair] for pair in pairs])

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *[_SCALAR] * 4),
            return_type=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=layout),
        )
        def load(_, source, first, last, *words):
            i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
            first, last = first.registers.flat[0], last.registers.flat[0]
            of_result = layout.to_mgpu()
            registers = np.empty(of_result.registers_shape((count,)), dtype=object)
            kind = ir.VectorType.get((of_result.vector_length,), f32)
            places = of_result.thread_idxs((count,))
            for at, (row,) in zip(np.ndindex(registers.shape), places, strict=True):
                register, row = llvm.mlir_undef(kind), arith.index_cast(i32, row)
                for i in range(of_result.vector_length):
                    number = arith.addi(arith.addi(first, row), mgpu.c(i, i32))
                    pair = self.nth_in_kernel(words, arith.minsi(number, last))
                    value = llvm.load(f32, _address(source, pair))
                    register = vector.insert(value, register, [], [i])
                registers[at] = register
            return mgpu.FragmentedArray(_registers=registers, _layout=of_result, _is_signed=None)

        return load(source, jnp.int32(first), last, *self.words)


def _vote(experts: ir.Value, wanted: ir.Value) -> list[ir.Value]:
    """The two words of `Pairs`, in all lanes."""
    i32 = ir.IntegerType.get_signless(32)
    [count] = ir.MemRefType(experts.type).shape
    lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(_LANES, i32))
    words = []
    for start in range(0, MOST_PAIRS, _LANES):
        if start >= count:
            words.append(mgpu.c(0, i32))
            continue
        pair = arith.addi(lane, mgpu.c(start, i32))
        # Lanes beyond the last pair load that one again, and vote against.
        address = _address(experts, arith.minsi(pair, mgpu.c(count - 1, i32)))
        is_named = arith.cmpi(arith.CmpIPredicate.eq, llvm.load(i32, address), wanted)
        is_pair = arith.cmpi(arith.CmpIPredicate.slt, pair, mgpu.c(count, i32))
        asm = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
        words.append(_ptx(asm, [arith.extui(i32, arith.andi(is_named, is_pair))], has_effects=True))
    return words


def _nth(words: Sequence[ir.Value], row: ir.Value, most: int) -> ir.Value:
    """Number of a bit that is set, of which there are `row` below it, fewer than `most`."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    low, high = (arith.extui(i64, word) for word in words)
    bits = arith.ori(low, arith.shli(high, mgpu.c(_LANES, i64)))
    for passed in range(most - 1):
        without_lowest = arith.andi(bits, arith.subi(bits, mgpu.c(1, i64)))
        is_above = arith.cmpi(arith.CmpIPredicate.sgt, row, mgpu.c(passed, i32))
        bits = arith.select(is_above, without_lowest, bits)
    return _ptx("{ .reg .b64 r; brev.b64 r, $1; clz.b64 $0, r; }", [bits], letter="l")


def _address(array: ir.Value, index: ir.Value) -> ir.Value:
    """Of an element of 32 bits of a vector in device memory."""
    byte = ir.IntegerType.get_signless(8)
    base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(array))
    offset = arith.muli(index, mgpu.c(4, ir.IntegerType.get_signless(32)))
    return mgpu.utils.getelementptr(base, [offset], byte)


def _ptx(
    asm: str, operands: list[ir.Value], letter: str = "r", *, has_effects: bool = False
) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, operands, asm, f"=r,{letter}", has_side_effects=has_effects)
