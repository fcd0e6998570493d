"""What a CTA of sparse attention reads, and how its queries come into shared memory; both GPUs'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.sparse_attention.call_shapes import GROUP, HEADS, Shapes
from pallas_kernels.sparse_attention.rope import rotate

Ref = Any


class Operands(NamedTuple):
    """Arrays that a kernel reads, and in it their refs in device memory; see `op.sparse_attention`.

    Attributes:
      queries: [T H, C], bits of bf16 in the dtype of products.
      sink: f32[H].
      selected: i32[T, K], padded to whole tiles.
      table: i32[B LB, 1].
      visible, segment_ids, slots, positions, lengths: i32[T], as in `CallIndices`.
      layer: i32[1].
      entry_layer: i32[1] of entries that are apart from the window, or stored otherwise; else None.
      angles: f32[T, 2, rotated], see `rope.angles_of`; None where nothing is rotated.
      ring, rows, pool: planes as [rows, n].
    """

    queries: Any
    sink: Any
    selected: Any
    table: Any
    visible: Any
    segment_ids: Any
    slots: Any
    positions: Any
    lengths: Any
    layer: Any
    entry_layer: Any
    angles: Any
    ring: Mapping[str, Any]
    rows: Mapping[str, Any]
    pool: Mapping[str, Any]


class Outputs(NamedTuple):
    """Arrays that a kernel writes, and in it their refs.

    Attributes:
      sums: [T, H, C], the output in the dtype of products; with splits f32[S, T, H, C], of 64
        heads where there are fewer.
      statistics: f32[S, T, 2, H] likewise, largest logit and sum of weights of each split; None
        without splits.
    """

    sums: Any
    statistics: Any = None


class Place(NamedTuple):
    """What one CTA attends with, and to what.

    Attributes:
      token: its token.
      split: its split of the keys.
      heads: its 64 heads.
      own_heads: those of them that there are.
      first_query: row of the first head's query.
      num_tiles: tiles of keys that it looks at; at least 1.
    """

    token: jax.Array
    split: jax.Array
    heads: pl.Slice
    own_heads: pl.Slice
    first_query: jax.Array
    num_tiles: jax.Array


def find_place(inputs: Operands, shapes: Shapes) -> Place:
    """That of the CTA which asks."""
    token, head, split = (lax.axis_index(name) for name in ("token", "head", "split"))
    return Place(
        token=token,
        split=split,
        heads=pl.ds(head * HEADS, HEADS),
        own_heads=pl.ds(head * HEADS, shapes.heads_of_cta),
        first_query=token * shapes.num_heads + head * HEADS,
        num_tiles=shapes.tiles_to_look_at(split, inputs.visible[token]),
    )


def load_queries(
    inputs: Operands,
    shapes: Shapes,
    cta: Place,
    halves: Sequence[tuple[int | jax.Array, Ref, Ref]],
    *,
    store_shared: Callable[[Ref, jax.Array, Any], None],
    add_squares: Callable[[jax.Array], jax.Array] = lambda squares: squares,
) -> None:
    """One warpgroup brings halves of the columns of 64 heads' queries, in the dtype of products.

    Rows of heads that are not there become zeros. In bulk, and turned into that dtype where they
    lie: as loads of a row's 64 bytes each they would keep those of the first keys waiting. Queries
    as projected are normed and rotated there too.

    Args:
      inputs: operands.
      shapes: sizes of the call.
      cta: place of this CTA.
      halves: for each its number, its place in shared memory, [64, C / 2], and a barrier of one
        arrival.
      store_shared: stores to shared memory; see `gather_keys.gather_keys`.
      add_squares: adds the sums of squares, f32[64] in `mosaic.ROW` layout, of columns that another
        warpgroup brings.
    """
    width, num_heads = shapes.dim // 2, shapes.heads_of_cta
    is_full = num_heads == HEADS
    for half, target, landed in halves:
        columns = pl.ds(half * width, width)
        rows = inputs.queries.at[pl.ds(cta.first_query, num_heads), columns]
        # The copy engine owns `target` from here until `landed`.
        plgpu.copy_gmem_to_smem(rows, target if is_full else target.at[pl.ds(0, num_heads)], landed)
    for _, _, landed in halves:
        plgpu.barrier_wait(landed)  # raw queries, the warpgroup's from here on
    # Bits of bf16 that products take as they are.
    if shapes.dtype == jnp.bfloat16 and is_full and shapes.query_eps is None:
        return
    chunks = [
        (half, start, target.at[:, pl.ds(start, GROUP)])
        for half, target, _ in halves
        for start in range(0, width, GROUP)
    ]
    factor = None
    if shapes.query_eps is not None:
        squares = functools.reduce(jnp.add, (jnp.square(_load_wide(p)) for _, _, p in chunks))
        # f32[64] of the columns here; the other half may be another warpgroup's.
        mean = add_squares(squares.sum(axis=1)) * (1 / shapes.dim)
        factor = lax.rsqrt(mean + shapes.query_eps)
    for half, start, chunk in chunks:
        # Each thread turns what it loads where it lies, so that none waits for another.
        if factor is None:
            rows = _load_bf16(chunk)
        else:
            values = _load_wide(chunk)
            # A factor a row, which all threads of the row have: the cast moves nothing.
            values = values * plgpu.layout_cast(
                lax.broadcast_in_dim(factor, values.shape, [0]), mosaic.ROWS
            )
            rows = _rotate(values.astype(jnp.bfloat16), half, start, inputs, shapes, cta)
        if not is_full:
            # What lies in the rows of absent heads was never written: zeros, so that no NaN comes
            # of it.
            head = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=mosaic.ROWS)
            rows = jnp.where(head < num_heads, rows, jnp.zeros_like(rows))
        store_shared(chunk, rows.astype(shapes.dtype), mosaic.ROWS)
    # Before tensor cores read what threads have stored.
    plgpu.commit_smem()


def _load_bf16(chunk: Ref) -> jax.Array:
    bits = plgpu.load(chunk, layout=mosaic.ROWS, optimized=False)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _load_wide(chunk: Ref) -> jax.Array:
    return _load_bf16(chunk).astype(jnp.float32)


def _rotate(
    rows: jax.Array,
    half: int | jax.Array,
    start: int,
    inputs: Operands,
    shapes: Shapes,
    cta: Place,
) -> jax.Array:
    """RoPE of 64 columns of queries from `start` of a half on, if they are among those rotated."""
    for column in range(0, shapes.rotated, GROUP):
        owner, first = divmod(shapes.dim - shapes.rotated + column, shapes.dim // 2)
        if first != start:
            continue
        angles = inputs.angles.at[cta.token, :, pl.ds(column, GROUP)]

        def turn(rows: jax.Array, angles: Ref = angles) -> jax.Array:
            return rotate(rows.astype(jnp.float32), angles).astype(jnp.bfloat16)

        if isinstance(half, int):
            rows = turn(rows) if half == owner else rows
        else:
            rows = lax.cond(half == owner, turn, lambda rows: rows, rows)
    return rows
