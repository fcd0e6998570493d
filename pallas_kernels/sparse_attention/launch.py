"""How a kernel of sparse attention is launched, and how splits' sums become an output.

Both kinds of GPU share it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.checks import first_plane
from pallas_kernels.common.codecs import Planes
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.gpu.devices import Device
from pallas_kernels.sparse_attention import call_shapes, combine_triton
from pallas_kernels.sparse_attention.call_shapes import FLOOR, HEADS, LOG2_E, TILE, Shapes, Tiling
from pallas_kernels.sparse_attention.loads import Operands, Outputs
from pallas_kernels.sparse_attention.reference import Arguments, AttentionPart, JoinArguments
from pallas_kernels.sparse_attention.rope import angles_of, rotated_columns
from pallas_kernels.sparse_attention.stored_rows import StoredRows


def as_bf16(values: jax.Array, dtype: Any) -> jax.Array:
    """f32 -> the bits of their bf16, as an array of a 16-bit dtype."""
    rounded = values.astype(jnp.bfloat16)
    return rounded if dtype == jnp.bfloat16 else lax.bitcast_convert_type(rounded, dtype)


def inverse_total(largest: jax.Array, total: jax.Array, sink: jax.Array) -> jax.Array:
    """1 / (sum of weights and sink), relative to the largest; 0 where there is neither."""
    sink = sink * LOG2_E
    top = jnp.maximum(largest, jnp.maximum(sink, FLOOR))  # f32[64]
    scale = jnp.exp2(largest - top)  # from the largest of keys to that of keys and sink
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
    entries = _in_whole_tiles(arguments)
    shapes = _shapes_of(arguments, entries)
    shapes = _cut(kernel, arguments, shapes, tiling, in_parts=in_parts)
    out = _run(kernel, shapes, _operands(arguments, entries, shapes))
    parts, queries = AttentionPart(out.sums, out.statistics), arguments.queries
    if in_parts:
        return _add_splits(parts, shapes.num_heads)
    if shapes.splits == 1:
        # The kernel left bits of bf16, in the dtype that its shared memory has.
        return lax.bitcast_convert_type(out.sums, queries.dtype)
    positions, frequencies = arguments.call.positions, arguments.frequencies
    return combine_triton.combine(
        JoinArguments(parts, arguments.sink, positions, frequencies, queries.dtype)
    )


class _Entries(NamedTuple):
    """Entries of the call's tokens.

    Attributes:
      pool: where they lie.
      selected: i32[T, K], in whole tiles; -1 for none.
      visible: i32[T], how many of them a token looks at, the first ones.
    """

    pool: LayerPlanes
    selected: jax.Array
    visible: jax.Array


def _in_whole_tiles(arguments: Arguments) -> _Entries:
    """The entries, filled up to whole tiles with what is no entry; none where there is no pool."""
    pool, selected, visible = arguments.pool, arguments.selected, arguments.call.visible
    num_tokens = arguments.queries.shape[0]
    if pool is None or selected is None:
        # No tile reads the pool then; the ring stands in for it, as planes of the same types.
        pool, selected = arguments.ring, jnp.zeros((num_tokens, 0), jnp.int32)
    if visible is None:
        visible = jnp.full(num_tokens, selected.shape[1], jnp.int32)
    # A tile of entries loads 64 numbers at once; -1 is no key, and has no address.
    padding = -selected.shape[1] % TILE
    selected = jnp.pad(selected, ((0, 0), (0, padding)), constant_values=-1)
    return _Entries(pool, selected, visible)


def _shapes_of(arguments: Arguments, entries: _Entries) -> Shapes:
    """Sizes of a call that does not split its keys."""
    ring, pool = arguments.ring, entries.pool
    num_slots, window = first_plane(ring.planes).shape[1:3]
    num_blocks, entries_per_block = first_plane(pool.planes).shape[1:3]
    dtype = call_shapes.product_dtype(ring.codec, pool.codec)
    return Shapes(
        num_heads=arguments.queries.shape[1],
        dim=arguments.queries.shape[2],
        window=window,
        num_slots=num_slots,
        num_entries=entries.selected.shape[1],
        num_blocks=num_blocks,
        entries_per_block=entries_per_block,
        table_width=arguments.call.block_table.shape[1],
        scale=arguments.scale,
        window_form=_form_of(ring, dtype),
        entry_form=_form_of(pool, dtype),
    )


def _cut(
    kernel: Kernel, arguments: Arguments, shapes: Shapes, tiling: Tiling | None, *, in_parts: bool
) -> Shapes:
    """The same with splits, and with what the kernel rotates and norms."""
    # Without splits; splits are there to give idle SMs some of the keys.
    num_ctas = arguments.queries.shape[0] * pl.cdiv(shapes.num_heads, HEADS)
    tiling = tiling or call_shapes.choose_tiling(
        num_ctas, shapes.num_tiles, kernel.device.num_sms, shapes.dim
    )
    if in_parts:
        tiling = dataclasses.replace(tiling, splits=max(2, tiling.splits))
    if tiling.splits > shapes.num_tiles:
        raise ValueError(
            f"tiling must cut the keys' {shapes.num_tiles} tiles of {TILE} into no more splits, "
            f"got {tiling.splits=}; None chooses one"
        )
    shapes = dataclasses.replace(shapes, splits=tiling.splits)
    frequencies, query_eps = arguments.frequencies, arguments.query_eps
    # The output of splits is rotated once it is whole, by who adds them up.
    if frequencies is None or (shapes.splits > 1 and query_eps is None):
        return shapes
    return dataclasses.replace(shapes, rotated=rotated_columns(frequencies), query_eps=query_eps)


def _operands(arguments: Arguments, entries: _Entries, shapes: Shapes) -> Operands:
    """The arrays as the kernel reads them: rows of planes, and 16-bit queries of its own dtype."""
    call, ring, pool = arguments.call, arguments.ring, entries.pool
    queries, selected, sink = arguments.queries, entries.selected, arguments.sink
    angles, frequencies = None, arguments.frequencies
    if frequencies is not None and shapes.rotated:
        angles = angles_of(call.positions, frequencies)
    if shapes.splits == 1 and shapes.num_heads < HEADS:  # a CTA reads 64
        sink = jnp.pad(sink, (0, HEADS - shapes.num_heads))
    if not shapes.num_entries:  # a ref may not be empty; no tile reads it
        selected = jnp.zeros((queries.shape[0], TILE), jnp.int32)
    return Operands(
        queries=lax.bitcast_convert_type(queries, shapes.dtype).reshape(-1, shapes.dim),
        sink=sink,
        selected=selected,
        table=call.block_table.reshape(-1, 1),
        visible=entries.visible,
        segment_ids=call.segment_ids,
        slots=call.slots,
        positions=call.positions,
        lengths=call.lengths,
        layer=ring.layer[None],
        entry_layer=pool.layer[None] if arguments.apart else None,
        angles=angles,
        ring=_rows_of(ring.planes, 3),
        rows=_rows_of(arguments.rows, 1),
        pool=_rows_of(pool.planes, 3),
    )


def _run(kernel: Kernel, shapes: Shapes, operands: Operands) -> Outputs:
    """One launch: a CTA for each token, 64 of its heads and split."""
    num_tokens, num_heads = operands.visible.shape[0], shapes.num_heads
    if shapes.splits == 1:
        of_output = num_tokens, num_heads, shapes.dim
        out_type = Outputs(sums=jax.ShapeDtypeStruct(of_output, shapes.dtype))
    else:
        # Threads store the sums of all 64 rows; `own_heads` bounds bulk copies alone.
        per_split, written = (shapes.splits, num_tokens), max(num_heads, HEADS)
        out_type = Outputs(
            sums=jax.ShapeDtypeStruct((*per_split, written, shapes.dim), jnp.float32),
            statistics=jax.ShapeDtypeStruct((*per_split, 2, written), jnp.float32),
        )

    def sparse_attention_kernel(inputs: Operands, outputs: Outputs, scratch: Any) -> None:
        kernel.body(inputs, outputs, scratch, shapes=shapes)

    [out] = plgpu.kernel(
        sparse_attention_kernel,
        out_type=[out_type],
        grid=(num_tokens, pl.cdiv(num_heads, HEADS), shapes.splits),
        grid_names=("token", "head", "split"),
        num_threads=kernel.num_warpgroups,
        thread_name="warpgroup",
        scratch_types=[kernel.scratch_of(shapes.dim, shapes.dtype)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(operands)
    return out


def _form_of(stored: LayerPlanes, dtype: Any) -> StoredRows:
    """How rows of planes [L, n, m, ...] are stored."""
    sizes = [(name, math.prod(plane.shape[3:])) for name, plane in sorted(stored.planes.items())]
    return StoredRows(stored.codec, tuple(sizes), dtype)


def _add_splits(splits: AttentionPart, num_heads: int) -> AttentionPart:
    """All splits' sums, relative to the largest logit of all."""
    sums, statistics = splits.sums[:, :, :num_heads], splits.statistics[..., :num_heads]
    largest, total = statistics[:, :, 0], statistics[:, :, 1]  # f32[S, T, H]
    top = jnp.max(largest, axis=0)  # f32[T, H]
    # Each split's sums are relative to its own largest logit.
    weight = jnp.exp2(largest - top[None])
    # A sum too large for f32 is that of a split which counts for nothing.
    sums = jnp.where(weight[..., None] == 0, 0.0, sums * weight[..., None])
    total = jnp.sum(total * weight, axis=0)
    return AttentionPart(jnp.sum(sums, axis=0), jnp.stack([top, total], axis=1))


def _rows_of(planes: Planes, lead: int) -> Planes:
    """[..., n], with `lead` leading axes, as [R, n] in order of names; n = 1 for scalars."""
    return {
        name: plane.reshape(math.prod(plane.shape[:lead]), -1)
        for name, plane in sorted(planes.items())
    }
