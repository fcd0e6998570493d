"""Runs of rows from device memory into shared memory, by the engine that copies in bulk.

A tile's rows lie in pieces, each in a block of its own. One warp of a warpgroup sees to them all, a
lane to each piece, and the engine says when the bytes have arrived; nobody else spends an
instruction. A warpgroup has stages of its own, and for each stage a barrier:

    wait(barriers, stage, parity)       its tile is there; parity is 0, 1, 0, ... by its use
    ...                                 all four warps read it into registers
    all_have_read(...)                  the fetching warp waits for the others, which do not wait
    fetch(...)                          in that warp, another tile to the same stage

In the interpreter a fetch copies at once, and the rest is nothing.

Source: PTX ISA 9.0, cp.async.bulk, createpolicy, mbarrier, and bar.arrive with bar.sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.common.backend import interpreting

Ref = Any
plgpu: Any = mosaic_gpu
LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""[32]: a value of each lane, the same in the four warps."""
WORDS_OF_BARRIER = 2
"""i32 of shared memory."""
ALIGNMENT = 16
"""Bytes: of a piece's length, and of its place in either memory."""
_SCALAR = plgpu.Layout.WG_SPLAT(())
_FIRST_NAMED = 8
"""Hardware barriers below are the compiler's own, one for each of up to seven warpgroups."""


def make_barriers(barriers: Ref) -> None:
    """Prepares a warpgroup's barriers, i32[2 * stages] in shared memory, for all its threads."""
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def prepare(_, barriers):
        i32 = ir.IntegerType.get_signless(32)
        [size] = ir.MemRefType(barriers.type).shape
        # One arrival each: that of the lane which says how many bytes to expect. The engine counts
        # those.
        first = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        for stage in range(size // WORDS_OF_BARRIER):
            address = _barrier(barriers, mgpu.c(stage, i32)).get_ptr()
            nvvm.mbarrier_init(address, mgpu.c(1, i32), predicate=first)  # by one thread
        # The warpgroup waits for the one thread, and the copy engine sees the barriers as well.
        mgpu.utils.commit_shared()

    prepare(barriers)


def wait(barriers: Ref, stage: jax.Array, parity: jax.Array) -> None:
    """Waits until what was fetched into a stage is there."""
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR))
    def wait_for(_, barriers, stage, parity):
        # Every thread waits for itself, and so sees the bytes that have come.
        odd = arith.trunci(ir.IntegerType.get_signless(1), parity.registers.flat[0])
        _barrier(barriers, stage.registers.flat[0]).wait_parity(odd)

    wait_for(barriers, stage, parity)


def is_fetching(warpgroup: jax.Array) -> jax.Array:
    """bool[], true in the one warp of a warpgroup that fetches.

    Neighbouring warpgroups have different ones, which are not one scheduler's.
    """
    if interpreting():
        return jnp.bool_(True)

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
    )
    def find(_, warpgroup):
        i32 = ir.IntegerType.get_signless(32)
        warp = mgpu.utils.warp_idx(sync=True)
        # A CTA's warps go to the four schedulers of an SM in turn.
        mine = arith.remui(arith.subi(warp, warpgroup.registers.flat[0]), mgpu.c(4, i32))
        return mgpu.FragmentedArray.splat(mine, (), is_signed=True)

    return find(warpgroup) == 0


def all_have_read(fetching: jax.Array, warpgroup: jax.Array) -> None:
    """Has the fetching warp wait until the other three are here, which don't wait."""
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(_SCALAR, _SCALAR))
    def meet(_, fetching, warpgroup):
        i32 = ir.IntegerType.get_signless(32)
        # A hardware barrier of 128 threads, of which the fetching warp's 32 wait and the others
        # arrive: they have loaded the stage into registers, and have nothing to wait for. `memory`
        # keeps those loads above.
        name = arith.addi(warpgroup.registers.flat[0], mgpu.c(_FIRST_NAMED, i32))
        asm = """{
          .reg .pred waits;
          setp.ne.b32 waits, $0, 0;
          @waits bar.sync $1, 128;
          @!waits bar.arrive $1, 128;
        }"""
        llvm.inline_asm(
            None,
            [fetching.registers.flat[0], name],
            asm,
            "r,r,~{memory}",
            has_side_effects=True,
        )

    meet(fetching.astype(jnp.int32), warpgroup)


def fetch(
    targets: Sequence[Ref],
    sources: Sequence[Ref],
    first_rows: jax.Array,
    *,
    rows_of_piece: int,
    barriers: Ref,
    stage: jax.Array,
    last: bool = False,
) -> None:
    """Begins to copy a tile, in the fetching warp alone.

    Args:
      targets: u8[M, width] or i32[M] in shared memory, of the bytes that its source's rows have.
      sources: each [R, ...] in device memory.
      first_rows: i32[32] in `LANES`, the first row of each of the M / rows_of_piece pieces; those
        beyond them are nothing.
      rows_of_piece: rows that lie together. With a row's bytes a multiple of `ALIGNMENT`, as
        `first_rows` must be.
      barriers: the warpgroup's.
      stage: i32[], that `targets` are.
      last: whether hardly anything reads the rows again: L2 drops them before what it holds else.
    """
    num_rows = targets[0].shape[0]
    if interpreting():
        pieces = jnp.repeat(first_rows[: num_rows // rows_of_piece], rows_of_piece)
        rows = pieces + jnp.arange(num_rows, dtype=jnp.int32) % rows_of_piece
        for target, source in zip(targets, sources, strict=True):
            taken = lax.bitcast_convert_type(source[...][rows], jnp.uint8).reshape(num_rows, -1)
            words = target.dtype == jnp.int32
            target[...] = lax.bitcast_convert_type(taken, jnp.int32) if words else taken
        return

    @plgpu.inline_mgpu(
        arg_types=(
            [plgpu.RefType()] * len(targets),
            [plgpu.RefType()] * len(sources),
            LANES,
            plgpu.RefType(),
            _SCALAR,
        )
    )
    def begin(_, targets, sources, first_rows, barriers, stage):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        byte = ir.IntegerType.get_signless(8)
        barrier = _barrier(barriers, stage.registers.flat[0])
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(32, i32))
        widths = [_bytes_of_row(source) for source in sources]
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.c(0, i32))
        # Lane 0 arrives for the whole tile. The barrier's phase ends once the bytes have come too,
        # whatever the order of lanes.
        barrier.arrive_expect_tx(num_rows * sum(widths), predicate=is_first)
        [row] = first_rows.registers.flat
        # From here on 64 bits: a plane may be larger than 2^31 bytes.
        row = arith.extsi(i64, mgpu.utils.bitcast(row, i32))
        has_piece = arith.cmpi(
            arith.CmpIPredicate.ult, lane, mgpu.c(num_rows // rows_of_piece, i32)
        )
        # A copy of its own for each piece and plane; the engine owns the targets until `wait`.
        with mgpu.utils.when(has_piece):
            for target, source, width in zip(targets, sources, widths, strict=True):
                size = rows_of_piece * width  # bytes of a copy
                to = llvm.addrspacecast(llvm.PointerType.get(3), mgpu.utils.memref_ptr(target))
                to = mgpu.utils.getelementptr(to, [arith.muli(lane, mgpu.c(size, i32))], byte)
                start = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(source))
                start = mgpu.utils.getelementptr(start, [arith.muli(row, mgpu.c(width, i64))], byte)
                # Shared memory is named as a cluster's; outside of one that is the CTA's own.
                copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                asm = f"{copy} [$0], [$1], {size}, [$2];"
                if last:
                    asm = f"""{{
                      .reg .b64 policy;
                      createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
                      {copy}.L2::cache_hint [$0], [$1], {size}, [$2], policy;
                    }}"""
                operands = [to, start, barrier.get_ptr()]
                llvm.inline_asm(None, operands, asm, "r,l,r,~{memory}", has_side_effects=True)

    begin(list(targets), list(sources), first_rows, barriers, stage)


def _barrier(barriers: ir.Value, stage: ir.Value) -> Any:
    unused: Any = None  # where Pallas keeps parities
    base = llvm.addrspacecast(llvm.PointerType.get(3), mgpu.utils.memref_ptr(barriers))
    return mgpu.utils.BarrierRef(base, stage, unused, 1)


def _bytes_of_row(source: ir.Value) -> int:
    kind = ir.MemRefType(source.type)
    size = mgpu.bitwidth(kind.element_type) // 8
    for extent in kind.shape[1:]:
        size *= extent
    return size
