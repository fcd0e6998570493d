"""How a kernel of sparse attention is launched, and how splits' sums become an output.

Both kinds of GPU share it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.devices import Device
from pallas_kernels.sparse_attention import call_shapes, combine_triton
from pallas_kernels.sparse_attention.call_shapes import FLOOR, HEADS, LOG2_E, TILE, Shapes, Tiling
from pallas_kernels.sparse_attention.loads import Operands, Outputs
from pallas_kernels.sparse_attention.reference import Arguments, AttentionPart, JoinArguments
from pallas_kernels.sparse_attention.rope import angles_of


def as_bf16(values: jax.Array, dtype: Any) -> jax.Array:
    """f32 -> the bits of their bf16, as an array of a 16-bit dtype."""
    rounded = values.astype(jnp.bfloat16)
    return rounded if dtype == jnp.bfloat16 else lax.bitcast_convert_type(rounded, dtype)


def inverse_total(largest: jax.Array, total: jax.Array, sink: jax.Array) -> jax.Array:
    """1 / (sum of weights and sink), relative to the largest; 0 where there is neither."""
    sink = sink * LOG2_E
    top = jnp.maximum(largest, jnp.maximum(sink, FLOOR))
    scale = jnp.exp2(largest - top)
    whole = total * scale + jnp.exp2(sink - top)
    return jnp.where(whole > 0, scale / jnp.where(whole > 0, whole, 1.0), 0.0)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of one kind of GPU; its axes are token, head, split and warpgroup.

    Attributes:
      body: is called as body(`Operands`, `Outputs`, scratch_of(C, dtype), shapes=), refs all of
        them. Its output is the bits of bf16[T, H, C] in the dtype of products, which is that of
        shared memory; with more than one split f32[S, T, H, C], sums, with their `statistics`.
      scratch_of: types of what a CTA has to itself.
      num_warpgroups: warpgroups of a CTA.
      device: whose sizes choose the tiling.
    """

    body: Callable[..., None]
    scratch_of: Callable[[int, Any], Any]
    num_warpgroups: int
    device: Device


def launch(
    kernel: Kernel, arguments: Arguments, *, tiling: Tiling | None = None, in_parts: bool = False
) -> Any:
    """Runs a kernel on the arguments of `op.sparse_attention`.

    With `in_parts` it gives the `AttentionPart` of those keys: what splits are combined from, so
    that there are two at least, and no sink.
    """
    queries, ring, call = arguments.queries, arguments.ring, arguments.call
    num_tokens, num_heads, dim = queries.shape
    names = tuple(sorted(ring.planes))
    num_slots, window = ring.planes[names[0]].shape[1:3]
    pool, selected = arguments.pool, arguments.selected
    if pool is None or selected is None:
        # Without entries the kernel has no tile that reads the pool; the ring stands in for its
        # type.
        pool, selected = ring, jnp.zeros((num_tokens, 0), jnp.int32)
    num_blocks, entries_per_block = pool.planes[names[0]].shape[1:3]
    visible = call.visible
    if visible is None:
        visible = jnp.full(num_tokens, selected.shape[1], jnp.int32)
    # Whole tiles of entries, filled up with what is no entry.
    padding = -selected.shape[1] % TILE
    selected = jnp.pad(selected, ((0, 0), (0, padding)), constant_values=-1)
    shapes = Shapes(
        num_heads=num_heads,
        dim=dim,
        window=window,
        num_slots=num_slots,
        num_entries=selected.shape[1],
        num_blocks=num_blocks,
        entries_per_block=entries_per_block,
        table_width=call.block_table.shape[1],
        scale=arguments.scale,
        codec=ring.codec,
        planes=tuple((name, math.prod(ring.planes[name].shape[3:])) for name in names),
    )
    num_ctas = num_tokens * pl.cdiv(num_heads, HEADS)
    tiling = tiling or call_shapes.choose_tiling(
        num_ctas, shapes.num_tiles, kernel.device.num_sms, dim
    )
    if in_parts:
        tiling = dataclasses.replace(tiling, splits=max(2, tiling.splits))
    if tiling.splits > shapes.num_tiles:
        raise ValueError(
            f"tiling must cut the keys' {shapes.num_tiles} tiles of {TILE} into no more splits, "
            f"got {tiling.splits=}; None chooses one"
        )
    shapes = dataclasses.replace(shapes, splits=tiling.splits)
    angles, frequencies, query_eps = None, arguments.frequencies, arguments.query_eps
    if frequencies is not None and (tiling.splits == 1 or query_eps is not None):
        angles = angles_of(call.positions, frequencies)
        shapes = dataclasses.replace(shapes, rotated=angles.shape[-1], query_eps=query_eps)

    written_heads = max(num_heads, HEADS)
    if tiling.splits == 1:
        out_type = Outputs(sums=jax.ShapeDtypeStruct(queries.shape, shapes.dtype))
    else:
        per_split = tiling.splits, num_tokens
        out_type = Outputs(
            sums=jax.ShapeDtypeStruct((*per_split, written_heads, dim), jnp.float32),
            statistics=jax.ShapeDtypeStruct((*per_split, 2, written_heads), jnp.float32),
        )

    own_sink = arguments.sink
    if tiling.splits == 1 and num_heads < HEADS:  # a CTA reads 64
        own_sink = jnp.pad(own_sink, (0, HEADS - num_heads))

    def sparse_attention_kernel(inputs: Operands, outputs: Outputs, scratch: Any) -> None:
        kernel.body(inputs, outputs, scratch, shapes=shapes)

    [out] = plgpu.kernel(
        sparse_attention_kernel,
        out_type=[out_type],
        grid=(num_tokens, pl.cdiv(num_heads, HEADS), tiling.splits),
        grid_names=("token", "head", "split"),
        num_threads=kernel.num_warpgroups,
        thread_name="warpgroup",
        scratch_types=[kernel.scratch_of(dim, shapes.dtype)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        Operands(
            queries=lax.bitcast_convert_type(queries, shapes.dtype).reshape(-1, dim),
            sink=own_sink,
            selected=selected if shapes.num_entries else jnp.zeros((num_tokens, TILE), jnp.int32),
            table=call.block_table.reshape(-1, 1),
            visible=visible,
            segment_ids=call.segment_ids,
            slots=call.slots,
            positions=call.positions,
            lengths=call.lengths,
            layer=ring.layer[None],
            angles=angles,
            ring={name: _rows_of(ring.planes[name], 3) for name in names},
            rows={name: _rows_of(arguments.rows[name], 1) for name in names},
            pool={name: _rows_of(pool.planes[name], 3) for name in names},
        )
    )
    parts = AttentionPart(out.sums, out.statistics)
    if in_parts:
        return _add_splits(parts, num_heads)
    if tiling.splits == 1:
        return lax.bitcast_convert_type(out.sums, queries.dtype)
    return combine_triton.combine(
        JoinArguments(parts, arguments.sink, call.positions, frequencies, queries.dtype)
    )


def _add_splits(splits: AttentionPart, num_heads: int) -> AttentionPart:
    """All splits' sums, relative to the largest logit of all."""
    sums, statistics = splits.sums[:, :, :num_heads], splits.statistics[..., :num_heads]
    largest, total = statistics[:, :, 0], statistics[:, :, 1]
    top = jnp.max(largest, axis=0)
    weight = jnp.exp2(largest - top[None])
    # A sum too large for f32 is that of a split which counts for nothing.
    sums = jnp.where(weight[..., None] == 0, 0.0, sums * weight[..., None])
    total = jnp.sum(total * weight, axis=0)
    return AttentionPart(jnp.sum(sums, axis=0), jnp.stack([top, total], axis=1))


def _rows_of(plane: jax.Array, lead: int) -> jax.Array:
    """[..., n], with `lead` leading axes, as [R, n]; n = 1 for a plane of scalars."""
    return plane.reshape(math.prod(plane.shape[:lead]), -1)
