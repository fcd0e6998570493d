"""Instructions that Pallas does not have: what the steps of a selection are built of.

Values here are MLIR's, of one thread; `radix_steps.py` gives them meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

THREADS = 128
"""Threads of a warpgroup."""
WARPS = 4
"""Warps of a warpgroup."""
LANES = 32
MAX_WARPS = 32
"""Warps that a CTA can have."""
BARRIER = "bar.sync 0;"
"""Where all threads of the CTA wait for each other."""

REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


def strided(n: int) -> Any:
    """Entry i of a warpgroup's n lies in register i // 128 of its thread i % 128."""
    return plgpu.Layout.WG_STRIDED((n,), 1)


def ranks_type(n: int) -> plgpu.ShapeDtypeStruct:
    """Result u32[n], `strided`."""
    return plgpu.ShapeDtypeStruct((n,), np.dtype(np.uint32), layout=strided(n))


def scalar_type(dtype: Any) -> plgpu.ShapeDtypeStruct:
    """Result of one value, the same in all threads."""
    return plgpu.ShapeDtypeStruct((), np.dtype(dtype), layout=SCALAR)


def inline(
    arg_types: Sequence[Any] = (), return_type: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`plgpu.inline_mgpu`: what is decorated takes a context and arguments as MLIR sees them."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def ptx(
    code: str, args: Sequence[ir.Value] = (), result: ir.Type | None = None, *, joint: bool = False
) -> Any:
    """Instructions of which $0 is the result, if there is one, and the arguments follow.

    Args:
      code: PTX; declarations first.
      args: operands.
      result: its type; without one, or if `joint`, the code reads or writes memory.
      joint: whether the threads of a warp do this together.
    """
    code = f"{{ {code} }}"
    if result is None:
        # Not to be moved, merged or made conditional: it touches memory, or threads do it together.
        mgpu.utils.inline_ptx(code, *args, has_side_effects=True, convergent=True)
        return None
    return mgpu.utils.inline_ptx(
        code, *args, result_types=[result], has_side_effects=joint, convergent=joint
    )[0]


def ptx_many(code: str, args: Sequence[ir.Value], num_results: int) -> tuple[ir.Value, ...]:
    """Instructions with several i32 results, the first operands, that read memory."""
    return mgpu.utils.inline_ptx(
        f"{{ {code} }}",
        *args,
        result_types=[i32()] * num_results,
        has_side_effects=True,
        convergent=True,
    )


def exclusive_sum(value: ir.Value, scratch: ir.Value) -> ir.Value:
    """Sum of an i32 over the threads before one's own; a barrier for all.

    Args:
      value: each thread's.
      scratch: address of MAX_WARPS words of shared memory.
    """
    # Within a warp by shuffles; then lane 31, which has the warp's sum, leaves it for all. Each
    # warp adds up those of the warps before it, a lane each, after the barrier.
    steps = "".join(
        f"shfl.sync.up.b32 t|p, v, {1 << i}, 0, -1; @p add.s32 v, v, t;" for i in range(5)
    )
    return ptx(
        ".reg .pred p; .reg .b32 t, v, a, warp, lane;"
        f"mov.b32 v, $1; {steps}"
        "mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; mad.lo.u32 a, warp, 4, $2;"
        "mov.u32 lane, %laneid; setp.eq.u32 p, lane, 31; @p st.shared.b32 [a], v;"
        # Until all warps have left their sums, which every warp reads.
        f"{BARRIER} setp.lt.u32 p, lane, warp; mad.lo.u32 a, lane, 4, $2; mov.u32 t, 0;"
        "@p ld.shared.b32 t, [a]; redux.sync.add.s32 t, t, -1;"
        "sub.s32 v, v, $1; add.s32 v, v, t; mov.b32 $0, v;",
        [value, scratch],
        i32(),
        joint=True,
    )


def add(values: Sequence[ir.Value]) -> ir.Value:
    """Their sum, i32."""
    total = values[0]
    for value in values[1:]:
        total = ptx("add.s32 $0, $1, $2;", [total, value], i32())
    return total


def own_entry(share: int) -> ir.Value:
    """The first entry of this thread, in a CTA whose warpgroups hold `share` each."""
    return ptx(
        ".reg .b32 t, g; mov.u32 t, %tid.x; shr.u32 g, t, 7; and.b32 t, t, 127;"
        f"mad.lo.u32 $0, g, {share}, t;",
        [],
        i32(),
    )


def rank_of(bits: ir.Value) -> ir.Value:
    """u32 that ascends as scores descend, from the bits of a score.

    That of 0 - score, so that both zeros are +0 and every NaN is the GPU's one, 0x7fffffff, whose
    rank is the last.
    """
    return ptx(
        ".reg .f32 x; .reg .b32 y, t; mov.b32 x, $1; sub.rn.f32 x, 0f00000000, x; mov.b32 y, x;"
        "shr.s32 t, y, 31; or.b32 t, t, 0x80000000; xor.b32 $0, y, t;",
        [bits],
        i32(),
    )


def row_address(source: ir.Value, row: ir.Value) -> ir.Value:
    """Where a row of 32-bit entries begins in device memory, as an i64."""
    base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(source))
    stride = 4 * ir.MemRefType(source.type).shape[1]
    return ptx(f"mad.wide.s32 $0, $1, {stride}, $2;", [row, base], i64())


def shared_address(ref: ir.Value) -> ir.Value:
    """Where an array begins in shared memory, as an i32."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def holds_scores(source: ir.Value) -> bool:
    """Whether an array is f32."""
    return isinstance(ir.MemRefType(source.type).element_type, ir.F32Type)


def registers_of(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """The i32 that this thread holds of a `strided` array."""
    return [vector.extract(register, [], [0]) for register in array.registers]


def array_of(registers: Sequence[ir.Value], n: int) -> mgpu.FragmentedArray:
    """The `strided` u32[n] of which this thread holds these."""
    one_word = ir.VectorType.get((1,), i32())
    packed = np.empty(len(registers), dtype=object)
    packed[:] = [vector.broadcast(one_word, register) for register in registers]
    return mgpu.FragmentedArray(_registers=packed, _layout=strided(n).to_mgpu(), _is_signed=False)


def value_of(scalar: mgpu.FragmentedArray) -> ir.Value:
    """A scalar argument as a value."""
    return scalar.registers.item()


def scalar_of(value: ir.Value, *, signed: bool) -> mgpu.FragmentedArray:
    """A value that all threads share as a scalar result."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=signed)


def i32() -> ir.Type:
    """MLIR's type of 32 bits, signed or unsigned."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """MLIR's type of 64 bits."""
    return ir.IntegerType.get_signless(64)
