"""FP8 products of a Hopper GPU that run while their warpgroup does something else.

    begin A    begin B    finish A, add it    begin C    finish B, add it    ...

What `begin` returned may not be used before `finish` returned it. A left operand in registers must
be there before a product begins that still runs, and a product must end in the round of a loop in
which it begins; else the compiler waits for each instruction, which ptxas reports (C7513, C7514).
The first step of the inner dimension overwrites the sums, so that no registers are zeroed. The
interpreter multiplies in `begin`.

Source: PTX ISA 9.0, sections 9.7.15.5 and 9.7.15.7, wgmma.mma_async and wgmma.wait_group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.common.backend import interpreting
from pallas_kernels.gpu.mosaic import SWIZZLED_BYTES

Ref = Any
plgpu: Any = mosaic_gpu
_LAYOUT = plgpu.Layout.WGMMA
_OPERAND = plgpu.RefType(SWIZZLED_BYTES)
_HEIGHT = 64
_INNER = 128
_STEP = 32
"""Inner dimension of an instruction."""
_DESCRIPTOR = 1 << 30 | 8 * _INNER >> 4
"""Upper half: a swizzle of 128 bytes; what lies between eight rows and the next, in 16 bytes."""


def begin(left: Ref | jax.Array, right: Ref, widths: Sequence[int]) -> list[jax.Array]:
    """Begins left @ right.T, by one warpgroup.

    Args:
      left: e4m3[64, 128] in shared memory, `SWIZZLED_BYTES`, or in `WGMMA_8BIT` layout.
      right: e4m3[..., 128] in shared memory, `SWIZZLED_BYTES`, N rows that follow each other, a
        multiple of 8 and at most 256.
      widths: columns of each result, which add up to N.

    Returns:
      f32[64, width] in WGMMA layout for each width; for `finish`.
    """
    in_registers = isinstance(left, jax.Array)
    firsts = [0, *itertools.accumulate(widths)]
    if interpreting():
        rows = right[...].reshape(-1, _INNER).astype(jnp.float32)
        values = left if in_registers else left[...]
        product = values.astype(jnp.float32) @ rows.T
        return [product[:, a:b] for a, b in itertools.pairwise(firsts)]
    kinds = [
        plgpu.ShapeDtypeStruct((_HEIGHT, width), jnp.float32, layout=_LAYOUT) for width in widths
    ]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_8BIT if in_registers else _OPERAND, _OPERAND),
        return_type=tuple(kinds),
    )
    def issue(_, left, right):
        if in_registers:
            # WGMMA_8BIT gives a thread the bytes that the instruction asks of it, four registers
            # for each 32 inputs: they are handed over as they are.
            steps = [left[:, first : first + _STEP] for first in range(0, _INNER, _STEP)]
            lefts = [[_word(r) for r in step.registers.flat] for step in steps]
        else:
            lefts = [[step] for step in _steps(left)]
        sums = _issue(lefts, _steps(right), firsts[-1])
        # A thread has half as many sums as a product has columns: 64 rows in 128 threads.
        of_results = [sums[a // 2 : b // 2] for a, b in itertools.pairwise(firsts)]
        return tuple(
            _array(some, (_HEIGHT, width)) for some, width in zip(of_results, widths, strict=True)
        )

    return list(issue(left, right))


def begin_steps(
    left: Ref, right: Ref, steps: Sequence[int], over: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Begins a product for each of some steps of 32 inputs, left @ right.T of these alone.

    Args:
      left: e4m3[64, 128] in shared memory, as of `begin`.
      right: e4m3[N, 128], as of `begin`.
      steps: of 0 .. 3, each 32 inputs.
      over: results of an earlier call with as many steps, whose registers these take: all that
        reads those comes first. The assembler would else put it off past products that follow, and
        keep the sums of all. None is any registers.

    Returns:
      f32[64, N] for each step; for `finish`, as one product.
    """
    width = right.shape[0]
    if interpreting():
        rows, values = (operand[...].astype(jnp.float32) for operand in (right, left))
        runs = [slice(step * _STEP, (step + 1) * _STEP) for step in steps]
        return [values[:, run] @ rows[:, run].T for run in runs]
    kind = plgpu.ShapeDtypeStruct((_HEIGHT, width), jnp.float32, layout=_LAYOUT)

    @plgpu.inline_mgpu(
        arg_types=(_OPERAND, _OPERAND, [_LAYOUT] * len(over)), return_type=(kind,) * len(steps)
    )
    def issue(_, left, right, over):
        lefts, rights = _steps(left), _steps(right)
        lefts, rights = [[lefts[step]] for step in steps], [rights[step] for step in steps]
        olds = [_element(pair, i) for old in over for pair in old.registers.flat for i in range(2)]
        sums = _issue(lefts, rights, width, apart=True, olds=olds)
        count = width // 2
        runs = [sums[i * count : (i + 1) * count] for i in range(len(steps))]
        return tuple(_array(run, (_HEIGHT, width)) for run in runs)

    return list(issue(left, right, list(over)))


def _element(pair: ir.Value, i: int) -> ir.Value:
    return llvm.extractelement(pair, mgpu.c(i, ir.IntegerType.get_signless(32)))


def _word(register: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32))


def finish(products: list[jax.Array], *, in_flight: int = 0) -> list[jax.Array]:
    """Waits for a product.

    Args:
      products: what `begin` returned.
      in_flight: products begun after it, which need not have ended.
    """
    if interpreting():
        return products
    kinds = [plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=_LAYOUT) for p in products]

    @plgpu.inline_mgpu(arg_types=(_LAYOUT,) * len(products), return_type=tuple(kinds))
    def wait(_, *products):
        # Groups of products end in the order in which they began.
        nvvm.wgmma_wait_group_sync_aligned(in_flight)
        # The sums are the threads' from here on; nothing that reads them may be moved above.
        return tuple(mgpu.optimization_barrier(product) for product in products)

    return list(wait(*products))


def settle(values: jax.Array) -> jax.Array:
    """The same f32[64, N] in WGMMA layout, computed before any product that is begun later.

    A compiler would else add products when all have ended, and hold them in registers till then.
    """
    if interpreting():
        return values

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=_LAYOUT),
    )
    def fence(_, values):
        # It keeps its place among instructions with side effects, as products are.
        return mgpu.optimization_barrier(values)

    return fence(values)


def _steps(ref: ir.Value) -> list[ir.Value]:
    """i32 each: the lower halves of an operand's descriptors, one for each instruction."""
    i32 = ir.IntegerType.get_signless(32)
    address = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
    # A descriptor has the address in units of 16 bytes; the offset that is 1 here is none's that
    # is swizzled.
    first = arith.addi(arith.shrui(address, mgpu.c(4, i32)), mgpu.c(1 << 16, i32))
    steps = range(0, _INNER >> 4, _STEP >> 4)
    return [arith.addi(first, mgpu.c(step, i32)) if step else first for step in steps]


def _issue(
    lefts: list[list[ir.Value]],
    rights: list[ir.Value],
    width: int,
    *,
    apart: bool = False,
    olds: Sequence[ir.Value] = (),
) -> list[ir.Value]:
    """One instruction for each step; returns the sums' registers, each step's where `apart`.

    Those of `olds` become theirs.
    """
    of_step = width // 2
    count = of_step * len(lefts) if apart else of_step
    numbers = itertools.count(count)
    # The fence orders the registers' last writes before the instructions that take them.
    lines = ["{", ".reg .pred adds;", ".reg .b64 left, right;", "wgmma.fence.sync.aligned;"]
    if olds:
        # No launch has no CTA, so nothing is added to the old sums; but the assembler can't know,
        # and so takes them for operands.
        lines += [".reg .b32 count;", "mov.u32 count, %nctaid.z;", "setp.eq.u32 adds, count, 0;"]
    operands = []
    for i, (words, right) in enumerate(zip(lefts, rights, strict=True)):
        operands += [*words, right]
        names = [f"${next(numbers)}" for _ in words]
        left = f"{{{', '.join(names)}}}"
        if (
            len(words) == 1
        ):  # one word is a descriptor's lower half: the operand is in shared memory
            lines.append(f"mov.b64 left, {{{names[0]}, {_DESCRIPTOR}}};")
            left = "left"
        first = i * of_step if apart else 0
        sums = ", ".join(f"${number}" for number in range(first, first + of_step))
        lines += [
            f"mov.b64 right, {{${next(numbers)}, {_DESCRIPTOR}}};",
            *([] if olds else [f"setp.ne.b32 adds, {0 if apart else min(i, 1)}, 0;"]),
            f"wgmma.mma_async.sync.aligned.m64n{width}k{_STEP}.f32.e4m3.e4m3"
            f" {{{sums}}}, {left}, right, adds, 1, 1;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    f32 = ir.F32Type.get()
    issued = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*operands, *olds],
        "\n".join(lines),
        ",".join([*["=&f"] * count, *["r"] * len(operands), *map(str, range(len(olds)))]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, issued, [i]) for i in range(count)]


def _array(sums: list[ir.Value], shape: tuple[int, int]) -> mgpu.FragmentedArray:
    """An instruction's registers, of which two neighbours are of one row, as an array."""
    layout, f32, i32 = _LAYOUT.to_mgpu(), ir.F32Type.get(), ir.IntegerType.get_signless(32)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for number in range(registers.size):
        pair = llvm.mlir_undef(ir.VectorType.get((2,), f32))
        for i in range(2):
            pair = llvm.insertelement(pair, sums[2 * number + i], mgpu.c(i, i32))
        registers.flat[number] = pair
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
