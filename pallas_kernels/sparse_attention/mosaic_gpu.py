"""Sparse attention through Mosaic GPU, for Hopper.

One program: one query token, 64 of its heads, one split of its keys. Two kinds of warpgroups:

    gatherers    tile of 64 keys: addresses through ring and block table, rows from device memory
                 into registers, dequantised to bf16, stored swizzled     -> keys_smem [2, 64, C]
    attender 0   logits Q K^T, online softmax                             -> weights_smem [2, 64, 64]
                 out[:, : C / 2] += weights keys[:, : C / 2]
    attender 1   out[:, C / 2 :] += weights keys[:, C / 2 :]

64 x C sums in f32 do not fit one warpgroup's registers at C = 512, so two hold half each. The
splits are a static number, combined by XLA; a token's result depends on shapes and itself alone.

Bytes: 584 per key and 2 * 64 * C for queries, the same again for the output. Bound by the tensor
cores above some 32 query tokens, by latency below. Products are bf16 with f32 sums.

Source: deepseek_v4.md section 1.3, step 9.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats, mosaic
from pallas_kernels.formats import Codec, Planes

TILE = 64
HEADS = 64
GROUP = 64
LOG2_E = math.log2(math.e)
REGISTERS = (216, 160, 128)
"""Of a thread of attender 0, attender 1 and gatherer, who share the 3 * 168 of the launch."""
FLOOR = np.float32(-1e30)
"""Below any logit, and finite: a difference of two such maxima is not NaN."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work of one token and 64 heads is cut.

    Attributes:
      splits: programs that share the keys.
    """

    splits: int


def choose_tiling(num_programs: int, num_tiles: int, num_cores: int = 132) -> Tiling:
    """As many splits as fill the cores once; each split at least one tile."""
    splits = max(1, min(num_tiles, num_cores // max(1, num_programs)))
    tiles = -(-num_tiles // splits)
    return Tiling(splits=-(-num_tiles // tiles))


def _attention_kernel(*refs, shapes: _Shapes, tiling: Tiling):
    s = shapes
    queries, sink, selected, table, request_ids, slots, positions, lengths, layer, *refs = refs
    num_planes = len(s.planes)
    ring, rows, pool = (refs[i * num_planes : (i + 1) * num_planes] for i in range(3))
    refs = refs[3 * num_planes :]
    outputs, refs = refs[: len(refs) - 10], refs[-10:]
    (
        queries_smem,
        keys_smem,
        weights_smem,
        bias_smem,
        decay_smem,
        queries_ready,
        keys_ready,
        keys_free,
        weights_ready,
        weights_free,
    ) = refs
    token, head, split = (lax.axis_index(name) for name in ("token", "head", "split"))
    group = lax.axis_index("warpgroup")
    heads = pl.ds(head * HEADS, HEADS)
    half = s.dim // 2
    tiles_per_split = -(-s.num_tiles // tiling.splits)
    first_tile = split * tiles_per_split
    num_tiles = jnp.minimum(tiles_per_split, s.num_tiles - first_tile)
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def columns(which):
        return pl.ds(which * half, half)

    def accumulate(out, decay, slot, which):
        out = out * lax.broadcast_in_dim(decay, out.shape, [0])
        return mosaic.multiply_add(
            out, weights_smem.at[slot], keys_smem.at[slot, :, columns(which)]
        )

    def wait_for_last(barrier, num_pending):
        """Waits until the last `num_pending` tiles have been given back."""
        for age in range(num_pending, 0, -1):

            @pl.when(num_tiles >= age)
            def _(age=age):
                plgpu.barrier_wait(barrier.at[lax.rem(num_tiles - age, 2)])

    def no_output():
        return plgpu.layout_cast(jnp.zeros((HEADS, half), jnp.float32), plgpu.Layout.WGMMA)

    def write(out, which):
        """Stores what this warpgroup summed, in the output's dtype."""
        if tiling.splits > 1:
            outputs[0].at[split, token, heads, columns(which)][...] = out
            return
        queries_smem[which] = out.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            queries_smem.at[which], outputs[0].at[token, heads, columns(which)]
        )
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == 0)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        for which in range(2):
            source = queries.at[token, heads, columns(which)]
            plgpu.copy_gmem_to_smem(source, queries_smem.at[which], queries_ready)
        plgpu.barrier_wait(queries_ready)

        def per_row(value):
            return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), by_row)

        def step(i, carry):
            out, largest, total = carry
            slot = lax.rem(i, 2)
            plgpu.barrier_wait(keys_ready.at[slot])

            logits = mosaic.multiply(
                [
                    (queries_smem.at[w], keys_smem.at[slot, :, columns(w)].transpose((1, 0)))
                    for w in range(2)
                ]
            )
            bias = plgpu.load(bias_smem.at[slot], layout=by_column, optimized=False)
            logits = logits * (s.scale * LOG2_E) + lax.broadcast_in_dim(bias, logits.shape, [1])
            new_largest = jnp.maximum(largest, logits.max(axis=1))
            decay = jnp.exp2(largest - new_largest)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(new_largest, logits.shape, [0]))
            total = total * decay + weights.sum(axis=1)

            @pl.when(i >= 2)
            def _():
                plgpu.barrier_wait(weights_free.at[slot])

            weights_smem[slot] = weights.astype(jnp.bfloat16)
            decay_smem[slot] = decay
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready.at[slot])
            out = accumulate(out, decay, slot, 0)
            plgpu.barrier_arrive(keys_free.at[slot])
            return out, new_largest, total

        out, largest, total = lax.fori_loop(
            0, num_tiles, step, (no_output(), per_row(FLOOR), per_row(0.0))
        )
        slot = lax.rem(num_tiles, 2)

        wait_for_last(weights_free, 2)
        if tiling.splits > 1:
            outputs[1].at[split, token, 0, heads][...] = largest
            outputs[1].at[split, token, 1, heads][...] = total
            inverse = per_row(1.0)
        else:
            inverse = _inverse_total(
                largest, total, plgpu.load(sink.at[heads], layout=by_row, optimized=False)
            )
        decay_smem[slot] = inverse
        plgpu.commit_smem()
        plgpu.barrier_arrive(weights_ready.at[slot])
        write(out * lax.broadcast_in_dim(inverse, out.shape, [0]), 0)

    @pl.when(group == 1)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def decay_of(slot):
            plgpu.barrier_wait(weights_ready.at[slot])
            return plgpu.load(decay_smem.at[slot], layout=by_row, optimized=False)

        def step(i, out):
            slot = lax.rem(i, 2)
            out = accumulate(out, decay_of(slot), slot, 1)
            plgpu.barrier_arrive(weights_free.at[slot])
            plgpu.barrier_arrive(keys_free.at[slot])
            return out

        out = lax.fori_loop(0, num_tiles, step, no_output())
        inverse = decay_of(lax.rem(num_tiles, 2))
        write(out * lax.broadcast_in_dim(inverse, out.shape, [0]), 1)

    @pl.when(group >= 2)
    def _():
        plgpu.set_max_registers(REGISTERS[2], action="decrease")
        place = plgpu.broadcasted_iota(
            jnp.int32, (TILE, GROUP), 0, layout=mosaic.ROWS
        ).max(axis=1)
        request, slot_of_token = request_ids[token], slots[token]
        position, length, layer_number = positions[token], lengths[token], layer[0]
        sources = [list(of_plane) for of_plane in zip(ring, rows, pool, strict=True)]

        def load_entries(i):
            """Entry numbers of tile i of this split; arbitrary in a window tile."""
            first = (first_tile + i - s.window_tiles) * TILE
            first = jnp.clip(first, 0, s.num_entries - TILE)
            return plgpu.load(
                selected.at[token, pl.ds(first, TILE)], layout=mosaic.ROW, optimized=False
            )

        def load_blocks(entry):
            """Physical blocks of entries; 0 where there is no table row to look at."""
            logical = lax.div(jnp.maximum(entry, 0), s.entries_per_block)
            inside = (entry >= 0) & (logical < s.table_width) & (request >= 0)
            where = jnp.where(inside, request * s.table_width + logical, -1)
            return mosaic.gather_words([table], where * 0, where, word=0)

        def locate(i, entry, block):
            """Source (ring, call, pool) and row of each key of tile i of this split; -1 is none."""
            tile = first_tile + i
            steps = tile * TILE + place
            p = position - (s.window - 1) + steps
            in_call = p >= length
            ring_row = (layer_number * s.num_slots + slot_of_token) * s.window
            ring_row = ring_row + lax.rem(jnp.maximum(p, 0), s.window)
            window_row = jnp.where(in_call, token - (position - p), ring_row)
            in_window = (p >= 0) & (steps < s.window) & (slot_of_token >= 0)
            window_row = jnp.where(in_window, window_row, -1)

            entry_row = (layer_number * s.num_blocks + block) * s.entries_per_block
            entry_row = entry_row + lax.rem(jnp.maximum(entry, 0), s.entries_per_block)
            stored = (entry >= 0) & (entry < s.table_width * s.entries_per_block)
            entry_row = jnp.where(stored & (block >= 0) & (request >= 0), entry_row, -1)

            window_tile = tile < s.window_tiles
            source = jnp.where(window_tile, in_call.astype(jnp.int32), 2)
            index = jnp.where(window_tile, window_row, entry_row)
            return source, jnp.where(i < num_tiles, index, -1)

        def step(i, carry):
            stored, index, entry, block, later_entry = carry
            slot = lax.rem(i, 2)

            @pl.when(i >= 2)
            def _():
                plgpu.barrier_wait(keys_free.at[slot])

            bias_smem[slot] = jnp.where(index == -1, -jnp.inf, 0.0).astype(jnp.float32)
            for chunk in range(s.dim // GROUP):
                target = keys_smem.at[slot, :, pl.ds(chunk * GROUP, GROUP)]
                mosaic.store_rows(target, s.decode_chunk(stored, chunk))
            plgpu.commit_smem()
            plgpu.barrier_arrive(keys_ready.at[slot])
            source, index = locate(i + 1, entry, block)
            stored = s.fetch(sources, source, index)
            return stored, index, later_entry, load_blocks(later_entry), load_entries(i + 3)

        entries = [load_entries(i) for i in range(3)]
        blocks = [load_blocks(entry) for entry in entries[:2]]
        source, index = locate(0, entries[0], blocks[0])
        stored = s.fetch(sources, source, index)
        carry = stored, index, entries[1], blocks[1], entries[2]
        lax.fori_loop(0, num_tiles, step, carry)
        wait_for_last(keys_free, 2)


def _inverse_total(largest, total, sink):
    """1 / (sum of weights and sink), relative to the largest; 0 where there is neither."""
    sink = sink * LOG2_E
    top = jnp.maximum(largest, jnp.maximum(sink, FLOOR))
    scale = jnp.exp2(largest - top)
    whole = total * scale + jnp.exp2(sink - top)
    return jnp.where(whole > 0, scale / jnp.where(whole > 0, whole, 1.0), 0.0)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Static sizes of a call, and its format.

    Attributes:
      dim: C.
      window: W.
      num_slots: NS.
      num_entries: K, a multiple of the tile.
      num_blocks: NB.
      entries_per_block: EB.
      table_width: LB.
      scale: of the logits.
      codec: of the planes.
      planes: their names and lengths, in order.
    """

    dim: int
    window: int
    num_slots: int
    num_entries: int
    num_blocks: int
    entries_per_block: int
    table_width: int
    scale: float
    codec: Codec
    planes: tuple[tuple[str, int], ...]

    @property
    def window_tiles(self) -> int:
        return -(-self.window // TILE)

    @property
    def num_tiles(self) -> int:
        return self.window_tiles + self.num_entries // TILE

    def fetch(self, sources, source, index):
        """The stored rows: of each plane of values an array, of scales their 32-bit words."""
        stored = []
        for (name, length), refs in zip(self.planes, sources, strict=True):
            if name == "scale":
                words = range(-(-length // 4))
                stored += [mosaic.gather_words(refs, source, index, word=w) for w in words]
            elif name == "inv_scale":
                stored.append(mosaic.gather_words(refs, source, index, word=0))
            else:
                stored.append(mosaic.gather_rows(refs, source, index, start=0, width=length))
        return stored

    def decode_chunk(self, stored, chunk):
        """bf16[64, 64] in ROWS layout: columns 64 chunk .. 64 chunk + 63 of the stored rows."""
        columns = slice(chunk * GROUP, (chunk + 1) * GROUP)
        if isinstance(self.codec, formats.PlainCodec):
            return stored[0][:, columns].astype(jnp.bfloat16)
        named = dict(zip((name for name, _ in self.planes), stored, strict=False))
        nope = dict(self.planes)["nope"]
        if columns.start >= nope:
            return named["rope"][:, columns.start - nope : columns.stop - nope]
        if isinstance(self.codec, formats.GroupedFP8Codec):
            word = stored[[name for name, _ in self.planes].index("scale") + chunk // 4]
            scale = ((word >> (8 * (chunk % 4))) & 255) << 23
        else:
            scale = named["inv_scale"]
        scale = lax.bitcast_convert_type(scale, jnp.float32)
        codes = lax.bitcast_convert_type(named["nope"][:, columns], jnp.float8_e4m3fn)
        scale = plgpu.layout_cast(lax.broadcast_in_dim(scale, codes.shape, [0]), mosaic.ROWS)
        return (codes.astype(jnp.float32) * scale).astype(jnp.bfloat16)


def sparse_attention(
    queries: jax.Array,
    sink: jax.Array,
    ring: Planes,
    rows: Planes,
    pool: Planes | None,
    block_table: jax.Array,
    selected: jax.Array | None,
    *,
    request_ids: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    codec: Codec,
    scale: float,
    tiling: Tiling | None = None,
) -> jax.Array:
    """See `op.sparse_attention`."""
    num_tokens, num_heads, dim = queries.shape
    names = tuple(sorted(ring))
    num_slots, window = ring[names[0]].shape[1:3]
    if pool is None or selected is None:
        pool, selected = ring, jnp.zeros((num_tokens, 0), jnp.int32)
    num_blocks, entries_per_block = pool[names[0]].shape[1:3]
    padding = -selected.shape[1] % TILE
    selected = jnp.pad(selected, ((0, 0), (0, padding)), constant_values=-1)
    shapes = _Shapes(
        dim=dim,
        window=window,
        num_slots=num_slots,
        num_entries=selected.shape[1],
        num_blocks=num_blocks,
        entries_per_block=entries_per_block,
        table_width=block_table.shape[1],
        scale=scale,
        codec=codec,
        planes=tuple((name, math.prod(ring[name].shape[3:])) for name in names),
    )
    tiling = tiling or choose_tiling(num_tokens * num_heads // HEADS, shapes.num_tiles)

    def flat(planes: Planes) -> list[jax.Array]:
        return [_rows_of(planes[name], 3) for name in names]

    out_type = jax.ShapeDtypeStruct(queries.shape, jnp.bfloat16)
    if tiling.splits > 1:
        out_type = (
            jax.ShapeDtypeStruct((tiling.splits, *queries.shape), jnp.float32),
            jax.ShapeDtypeStruct((tiling.splits, num_tokens, 2, num_heads), jnp.float32),
        )
    bf16_tile = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=mosaic.SWIZZLED)
    out = plgpu.kernel(
        functools.partial(_attention_kernel, shapes=shapes, tiling=tiling),
        out_type=out_type,
        grid=(num_tokens, num_heads // HEADS, tiling.splits),
        grid_names=("token", "head", "split"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            bf16_tile((2, HEADS, dim // 2)),
            bf16_tile((2, TILE, dim)),
            bf16_tile((2, HEADS, TILE)),
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.SMEM((2, HEADS), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        queries.astype(jnp.bfloat16),
        sink,
        selected if shapes.num_entries else jnp.zeros((num_tokens, TILE), jnp.int32),
        block_table.reshape(-1, 1),
        request_ids,
        slots,
        positions,
        lengths,
        layer[None],
        *flat(ring),
        *[_rows_of(rows[name], 1) for name in names],
        *flat(pool),
    )
    if tiling.splits > 1:
        out = _combine(*out, sink)
    return out.astype(queries.dtype)


def _rows_of(plane: jax.Array, lead: int) -> jax.Array:
    """[..., n], with `lead` leading axes, as [R, n]; n = 1 for a plane of scalars."""
    return plane.reshape(math.prod(plane.shape[:lead]), -1)


def _combine(sums: jax.Array, statistics: jax.Array, sink: jax.Array) -> jax.Array:
    """Adds up splits: f32[S, T, H, C] and f32[S, T, 2, H], largest logit and sum of weights."""
    largest, total = statistics[:, :, 0], statistics[:, :, 1]
    sink = (sink * LOG2_E)[None, :]
    top = jnp.maximum(jnp.max(largest, axis=0), jnp.maximum(sink, FLOOR))
    scale = jnp.exp2(largest - top[None])
    whole = jnp.sum(total * scale, axis=0) + jnp.exp2(sink - top)
    factor = scale / jnp.where(whole > 0, whole, 1.0)[None]
    return jnp.sum(sums * factor[..., None], axis=0)
