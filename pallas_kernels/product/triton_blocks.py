"""Triton kernel of products with block FP8 whose scales are of 32 x 32, as DeepSeek-V4.1 has them.

    64 outputs of a weight, a run of its inputs, 128 at a time     -> codes times scales, in bf16
    the same inputs of up to 64 rows, rounded to E4M3 and back     -> their product, in f32

Codes times powers of two are exact in bf16, and so are rounded rows: the products are those of the
definition, added up in another order. No tensor core of Hopper takes a scale for 32 inputs, and a
factor for each 32 of them on sums would cost more than one on codes. Few rows are rounded by each
program that reads them, more by a launch before (`triton_groups`), and of many XLA multiplies what
the codes stand for.

Bytes: the weights, once for each 64 rows. Inputs are split where tiles of outputs are too few to
keep the card busy. On an H200 it reads them at 1.0 TB/s, so that up to 64 rows are Mosaic's there
(`small_blocks`); more rows and Blackwell's were compiled, and compared in the interpreter.
Source: deepseek_v4.md section 4.5, deepseek_v41.md section 10.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.common import numbers
from pallas_kernels.common.pending import ByToken, Pending, finish
from pallas_kernels.common.swiglu import swiglu
from pallas_kernels.common.weights import BlockFP8, Weight
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.devices import current_device
from pallas_kernels.product import decoded
from pallas_kernels.product.results import normed, take_apart
from pallas_kernels.product.triton_groups import as_e4m3, round_groups

Ref = Any
BLOCK = 32
_OUTPUTS, _INPUTS = 64, 128
"""Of a tile."""
_LEAST_ROWS, _MOST_ROWS = 16, 64
"""Of a tile: the fewest that tensor cores take, and as many as leave registers for codes."""
_ROUNDED_HERE = 16
"""Rows that each program rounds; more would be more work than the codes are."""
_DECODED_ROWS = 512
"""Rows from which on XLA multiplies decoded weights, which each tile of rows would decode anew."""
_PROGRAMS_OF_SM = 4
_MOST_SUMS = 0.25
"""Bytes of partial sums that a call may write, of the bytes of its weights."""
_NUM_WARPS, _NUM_STAGES = 4, 4


def serves(weights: Sequence[Weight]) -> bool:
    """Whether some of these weights have such blocks."""
    return any(isinstance(weight, BlockFP8) and weight.block == BLOCK for weight in weights)


def find_obstacle(x: jax.Array | Pending, *weights: Weight) -> str | None:
    """Why the kernel can't serve a call, as the rest of a sentence; None where it can."""
    for weight in weights:
        if not isinstance(weight, BlockFP8) or weight.block != BLOCK:
            return f"takes FP8 scales of {BLOCK} x {BLOCK} alone"
        if weight.activations != weights[0].activations:  # pyright: ignore[reportAttributeAccessIssue]
            return "takes weights of one form of activations, got several"
        if weight.scale.dtype != jnp.uint8:
            return f"takes scales that are powers of two, got {weight.scale.dtype}"
        if weight.shape[-1] % BLOCK or weight.shape[-2] % _OUTPUTS:
            return f"takes weights of multiples of {_OUTPUTS} x {BLOCK}, got {weight.shape=}"
    return None if x.dtype == jnp.bfloat16 else f"takes rows in bfloat16, got {x.dtype}"


def multiply_rows(
    x: jax.Array | Pending,
    weights: Sequence[BlockFP8],
    *,
    norms: Sequence[jax.Array | None] = (),
    eps: float = 0.0,
    dtype: DTypeLike = jnp.float32,
    in_parts: bool = False,
) -> list[Any]:
    """[T, in] times [out, in] -> [T, out] for each weight; or [G, T, in], [G, out, in] likewise.

    See `block_linear.op.block_linears`.
    """
    is_stack = x.ndim == 3
    if not is_stack:
        assert not isinstance(x, ByToken), "which is of a stack"
        x, weights = x.reshape(1, *x.shape), [_stack(weight) for weight in weights]
    num_weights, num_rows, _ = x.shape
    of_rows = x.rows.swapaxes(0, 1) if isinstance(x, ByToken) else finish(x)
    is_rounded = weights[0].activations == "fp8"
    if is_rounded and num_rows > _ROUNDED_HERE:
        of_rows, is_rounded = round_groups(of_rows, BLOCK), False
    if num_rows >= _DECODED_ROWS:
        results = [decoded.multiply(of_rows, weight, dtype=dtype) for weight in weights]
        results = normed(results, norms, eps)
    else:
        splits = choose_splits(weights, num_rows, num_sms=current_device().num_sms)
        sums_dtype = jnp.dtype(dtype if splits == 1 else jnp.float32)
        sums = _multiply(of_rows, weights, splits, sums_dtype, rounds_rows=is_rounded)
        sums = sums.reshape(splits, num_weights * num_rows, -1)
        widths = [weight.shape[-2] for weight in weights]
        results = take_apart(sums, x, widths, norms=norms, eps=eps, dtype=dtype, in_parts=in_parts)
    return results if is_stack else [result.reshape(*result.shape[1:]) for result in results]


def swiglu_rows(x: jax.Array, gate: BlockFP8, up: BlockFP8, *, limit: float) -> jax.Array:
    """[T, in], [out, in] twice -> [T, out]; see `block_linear.op.swiglu_linear`."""
    gated, raised = multiply_rows(x, [gate, up], dtype=x.dtype)
    return swiglu(gated, raised, limit).astype(x.dtype)


def choose_splits(weights: Sequence[BlockFP8], num_rows: int, *, num_sms: int) -> int:
    """Programs that share a tile's inputs: as many as keep all SMs busy and pay for their sums."""
    num_weights, _, dim = weights[0].shape
    tiles = num_weights * sum(weight.shape[-2] // _OUTPUTS for weight in weights)
    tiles *= pl.cdiv(num_rows, _MOST_ROWS)
    most = int(_MOST_SUMS * dim / (4 * num_rows))  # 4 bytes of a sum, one of each code
    runs = pl.cdiv(dim, _INPUTS)
    splits = max(1, min(runs, most, _PROGRAMS_OF_SM * num_sms // tiles))
    # None that leaves a split idle.
    return pl.cdiv(runs, pl.cdiv(runs, splits))


def _multiply(
    x: jax.Array, weights: Sequence[BlockFP8], splits: int, dtype: jnp.dtype, *, rounds_rows: bool
) -> jax.Array:
    """[G, T, in] -> [S, G, T, out], the outputs of all weights side by side."""
    num_weights, num_rows, dim = x.shape
    height = min(_MOST_ROWS, max(_LEAST_ROWS, pl.next_power_of_2(num_rows)))
    widths = [weight.shape[-2] for weight in weights]
    tiles = [width // _OUTPUTS for width in widths]
    firsts = [0, *itertools.accumulate(tiles)]
    runs, is_whole = pl.cdiv(dim, _INPUTS), dim % _INPUTS == 0
    of_split = pl.cdiv(runs, splits)

    def kernel(inputs: tuple[Ref, list[BlockFP8]], sums: Ref) -> None:
        x, weights = inputs
        tile, group = pl.program_id(0), pl.program_id(2) // splits
        split, first_row = pl.program_id(2) % splits, pl.program_id(1) * height
        row = first_row + jnp.arange(height, dtype=jnp.int32)
        for number, weight in enumerate(weights):
            # Programs are numbered through the tiles of all weights.
            of_weight = tile - firsts[number]

            @pl.when((of_weight >= 0) & (of_weight < tiles[number]))
            def _(weight: BlockFP8 = weight, first_output: jax.Array = of_weight) -> None:
                out = first_output * _OUTPUTS + jnp.arange(_OUTPUTS, dtype=jnp.int32)
                total = multiply(x, weight, group, row, out, split)
                to = tile * _OUTPUTS + jnp.arange(_OUTPUTS, dtype=jnp.int32)
                at = split, group, row[None], to[:, None]
                live = jnp.broadcast_to((row < num_rows)[None], total.shape)
                triton.store_where(sums, at, total.astype(sums.dtype), live)

    def multiply(
        x: Ref, weight: BlockFP8, group: jax.Array, row: jax.Array, out: jax.Array, split: jax.Array
    ) -> jax.Array:
        """f32[64, height], a run of inputs."""
        is_row = (row < num_rows)[:, None]
        column = jnp.arange(_INPUTS, dtype=jnp.int32)[None]

        def find_run(step: jax.Array | int) -> tuple[jax.Array, jax.Array]:
            """The first input of a run, i32[], and whether it is one of the split's, bool[]."""
            run = split * of_split + step
            # The last split may have fewer runs, and the turn before the last has none to load.
            inside = (run < runs) & (step < of_split)
            return jnp.where(inside, run, 0) * _INPUTS, inside

        def load_codes(step: jax.Array | int) -> jax.Array:
            first, inside = find_run(step)
            inside = inside if is_whole else inside & (first + column < dim)
            live = jnp.broadcast_to(inside, (_OUTPUTS, _INPUTS))
            return triton.load_where(weight.codes, (group, out[:, None], first + column), live)

        def add(step: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total, codes = state
            # The next turn's codes are on their way while these are multiplied.
            following = load_codes(step + 1)
            first, inside = find_run(step)
            # Rows of a run that is not there are zeros, and add nothing; so are inputs beyond the
            # last one, in the last run.
            inside = inside if is_whole else inside & (first + column < dim)
            live = jnp.broadcast_to(is_row & inside, (height, _INPUTS))
            values = triton.load_where(x, (group, row[:, None], first + column), live)
            if rounds_rows:
                values = _rounded(values)
            matrix = _decoded(codes, weight.scale, group, out[:, None], first // BLOCK)
            over_inputs = ((1,), (1,)), ((), ())
            product = jax.lax.dot_general(
                matrix, values, over_inputs, preferred_element_type=jnp.float32
            )
            return total + product, following

        zeros = jnp.zeros((_OUTPUTS, height), jnp.float32)
        return jax.lax.fori_loop(0, of_split, add, (zeros, load_codes(0)))[0]

    total = sum(widths)
    return triton.launch(
        kernel,
        # Tiles are the fastest axis, so that rows stay in the caches.
        grid=(sum(tiles), pl.cdiv(num_rows, height), num_weights * splits),
        inputs=(x, list(weights)),
        outputs=jax.ShapeDtypeStruct((splits, num_weights, num_rows, total), dtype),
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        name="multiply_blocks",
    )


def _decoded(
    codes: jax.Array, scales: Ref, group: jax.Array, out: jax.Array, first_block: jax.Array
) -> jax.Array:
    """bf16[64, 128], the values of a tile of codes: exact, since scales are powers of two."""
    per_run = _INPUTS // BLOCK
    block = first_block + jnp.arange(per_run, dtype=jnp.int32)[None]
    there = jnp.ones((codes.shape[0], per_run), jnp.bool_)
    if scales.shape[2] % per_run:  # the last run has fewer
        there &= block < scales.shape[2]
    # A row of scales for each output, of which 32 have the same: loads out of L1.
    scale = numbers.decode_ue8m0(triton.load_where(scales, (group, out // BLOCK, block), there))
    # E4M3 becomes f16 in one instruction.
    wide = codes.astype(jnp.float16).astype(jnp.float32).reshape(codes.shape[0], per_run, BLOCK)
    return (wide * scale[..., None]).reshape(codes.shape).astype(jnp.bfloat16)


def _rounded(x: jax.Array) -> jax.Array:
    """bf16[n, 128] -> the same, as E4M3 keeps them, with a scale for 32."""
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, BLOCK)
    return as_e4m3(groups).reshape(x.shape).astype(jnp.bfloat16)


def _stack(weight: BlockFP8) -> BlockFP8:
    return jax.tree.map(lambda leaf: leaf[None], weight)
