"""Sparse attention through Mosaic GPU, for Hopper.

One program: one query token, 64 of its heads, one split of its keys, in tiles of 64. Warpgroups:

    gatherer     addresses of a tile through ring and block table; its rows from device memory into
                 registers, one tile ahead; to bf16, swizzled              -> keys_smem [2, 64, C]
    attender a   owns tiles a, a + 2, ...: logits Q K^T, softmax           -> weights_smem[a]
                 all tiles: out[:, a C / 2 :] += weights keys[:, a C / 2 :]

64 x C sums in f32 do not fit one warpgroup's registers at C = 512, so two hold half each; that one
multiplies while the other takes exponentials comes with it. Splits are cut by shape, never by
lengths, and combined by XLA: a token's result depends on shapes and itself alone.

Bytes: those of the keys, and 2 * 64 * C of queries and of output. Bound by the gatherer, which
spends some 1,000 instructions a tile and thread on fetching and dequantising, and in small calls by
latency. Products are of bf16 with f32 sums; weights are rounded to bf16.

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
from pallas_kernels.backend import compute_capability
from pallas_kernels.formats import Codec, Planes

TILE, HEADS, GROUP = 64, 64, 64
"""Keys of a tile, heads of a program, columns that share a scale and are fetched together."""
MAX_DIM = 512
LOG2_E = math.log2(math.e)
GATHERERS = 1
REGISTERS = (200, 104)
"""Of a thread that attends and one that gathers; 2 of each share the 4 * 128 of the launch."""
DECAY, LARGEST, TOTAL = range(3)
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


def find_obstacle(queries: jax.Array, ring: Planes, codec: Codec) -> str | None:
    """Why this kernel can't serve a call, as the rest of a sentence; None where it can."""
    num_heads, dim = queries.shape[1:]
    capability = compute_capability()
    if queries.dtype != jnp.bfloat16:
        return f"takes bf16 queries, for its products are of bf16, got {queries.dtype}"
    if codec == formats.PlainCodec("float32"):
        return "would round keys of cache format 'f32' to bf16"
    if num_heads % HEADS or dim % (4 * GROUP):
        return f"needs H % {HEADS} == 0 and C % {4 * GROUP} == 0, got {queries.shape=}"
    if dim > MAX_DIM:
        return f"needs C <= {MAX_DIM} to hold its sums, got {queries.shape=}"
    if "rope" in ring and ring["rope"].shape[-1] % GROUP:
        return f"needs R % {GROUP} == 0, got {ring['rope'].shape=}"
    if capability is not None and capability[0] != 9:
        return f"is of Hopper's instructions, got compute capability {capability}"
    return None


def _attention_kernel(*refs, shapes: _Shapes, tiling: Tiling):
    s = shapes
    queries, sink, selected, table, request_ids, slots, positions, lengths, layer, *refs = refs
    num_planes = len(s.planes)
    ring, rows, pool = (refs[i * num_planes : (i + 1) * num_planes] for i in range(3))
    refs = refs[3 * num_planes :]
    outputs, refs = refs[: len(refs) - 11], refs[-11:]
    (
        queries_smem,
        keys_smem,
        weights_smem,
        bias_smem,
        statistics_smem,
        queries_ready,
        keys_ready,
        keys_free,
        weights_ready,
        weights_free,
        totals_ready,
    ) = refs
    token, head, split = (lax.axis_index(name) for name in ("token", "head", "split"))
    group = lax.axis_index("warpgroup")
    heads = pl.ds(head * HEADS, HEADS)
    half = s.dim // 2
    num_tiles = -(-s.num_tiles // tiling.splits)
    first_tile = split * num_tiles
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def columns(which):
        return pl.ds(which * half, half)

    def attend(me):
        """Owns tiles me, me + 2, ...; sums all tiles over columns me * C / 2 and on."""
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        other = 1 - me
        quarters = [pl.ds((2 * me + i) * (half // 2), half // 2) for i in range(2)]

        def per_row(value):
            return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), by_row)

        def load_statistic(owner, which):
            return plgpu.load(statistics_smem.at[owner, which], layout=by_row, optimized=False)

        def scaled(out, factor):
            return [part * lax.broadcast_in_dim(factor, part.shape, [0]) for part in out]

        def add_tile(state, owner, decay, largest):
            """Takes up a tile's weights and keys, which lie in the slots of its owner."""
            out, _, total = state
            slot = mosaic.opaque(owner)
            keys = [keys_smem.at[slot, :, quarter] for quarter in quarters]
            out = mosaic.multiply_add(scaled(out, decay), weights_smem.at[slot], keys)
            plgpu.barrier_arrive(keys_free.at[owner])
            return out, largest, total * decay

        def add_tile_of_other(state):
            plgpu.barrier_wait(weights_ready.at[other])
            decay, largest = load_statistic(other, DECAY), load_statistic(other, LARGEST)
            state = add_tile(state, other, decay, largest)
            plgpu.barrier_arrive(weights_free.at[other])
            return state

        def add_own_tile(turn, state, *, is_first=False):
            plgpu.barrier_wait(keys_ready.at[me])
            slot, first = mosaic.opaque(me), mosaic.opaque(0)
            logits = mosaic.multiply(
                [
                    (
                        queries_smem.at[first + w],
                        keys_smem.at[slot, :, columns(w)].transpose((1, 0)),
                    )
                    for w in range(2)
                ]
            )
            if not is_first:
                state = add_tile_of_other(state)
            bias = plgpu.load(bias_smem.at[me], layout=by_column, optimized=False)
            bias = lax.broadcast_in_dim(bias, logits.shape, [1])
            logits = jnp.where(bias < 0, bias, logits * (s.scale * LOG2_E))  # a NaN query too
            largest = jnp.maximum(state[1], logits.max(axis=1))
            decay = jnp.exp2(state[1] - largest)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(largest, logits.shape, [0]))

            added = weights.sum(axis=1)

            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(weights_free.at[me])

            mosaic.store(weights_smem.at[me], weights.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
            mosaic.store(statistics_smem.at[me, DECAY], decay, by_row)
            mosaic.store(statistics_smem.at[me, LARGEST], largest, by_row)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready.at[me])
            out, largest, total = add_tile(state, me, decay, largest)
            return out, largest, total + added

        if me == 0:
            for which in range(2):
                source = queries.at[token, heads, columns(which)]
                plgpu.copy_gmem_to_smem(source, queries_smem.at[which], queries_ready)
        plgpu.barrier_wait(queries_ready)
        zeros = jnp.zeros((HEADS, half // 2), jnp.float32)
        no_output = [plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for _ in quarters]
        state = no_output, per_row(FLOOR), per_row(0.0)
        turns = (num_tiles + other) // 2
        if me == 0:
            state = add_own_tile(0, state, is_first=True)
        state = lax.fori_loop(other, turns, add_own_tile, state)
        if num_tiles % 2 == me:  # the last one
            state = add_tile_of_other(state)
        out, largest, total = state
        if turns > 0:
            plgpu.barrier_wait(weights_free.at[me])

        mosaic.store(statistics_smem.at[me, TOTAL], total, by_row)
        plgpu.commit_smem()
        plgpu.barrier_arrive(totals_ready)
        plgpu.barrier_wait(totals_ready)
        total = load_statistic(0, TOTAL) + load_statistic(1, TOTAL)
        if tiling.splits > 1:
            for quarter, part in zip(quarters, out, strict=True):
                outputs[0].at[split, token, heads, quarter][...] = part
            if me == 0:
                outputs[1].at[split, token, 0, heads][...] = largest
                outputs[1].at[split, token, 1, heads][...] = total
            return
        own_sink = plgpu.load(sink.at[heads], layout=by_row, optimized=False)
        out = scaled(out, _inverse_total(largest, total, own_sink))
        for i, part in enumerate(out):
            place = pl.ds(i * (half // 2), half // 2)
            target = queries_smem.at[me, :, place]
            mosaic.store(target, part.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries_smem.at[me], outputs[0].at[token, heads, columns(me)])
        plgpu.wait_smem_to_gmem(0)

    for me in range(2):
        pl.when(group == me)(functools.partial(attend, me))

    def gather(share):
        """Fetches every `GATHERERS`-th chunk of 64 columns of all tiles."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        chunks = range(share, s.dim // GROUP, GATHERERS)
        place = plgpu.broadcasted_iota(jnp.int32, (TILE, GROUP), 0, layout=mosaic.ROWS).max(axis=1)
        request, slot_of_token = request_ids[token], slots[token]
        position, length, layer_number = positions[token], lengths[token], layer[0]
        sources = [list(of_plane) for of_plane in zip(ring, rows, pool, strict=True)]

        def load_entries(i):
            """Entry numbers of tile i of this split; arbitrary in a window tile."""
            first = (first_tile + i - s.window_tiles) * TILE
            first = jnp.clip(first, 0, max(s.num_entries - TILE, 0))
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
            return source, jnp.where((i < num_tiles) & (tile < s.num_tiles), index, -1)

        def step(i, carry):
            stored, index, entry, block, later_entry = carry
            slot = lax.rem(i, 2)

            @pl.when(i >= 2)
            def _():
                plgpu.barrier_wait(keys_free.at[slot])

            if share == 0:
                bias = jnp.where(index == -1, -jnp.inf, 0.0).astype(jnp.float32)
                mosaic.store(bias_smem.at[slot], bias, mosaic.ROW)
            for chunk in chunks:
                target = keys_smem.at[slot, :, pl.ds(chunk * GROUP, GROUP)]
                mosaic.store(target, s.decode(stored, chunk), mosaic.ROWS)
            plgpu.commit_smem()
            plgpu.barrier_arrive(keys_ready.at[slot])
            source, index = locate(i + 1, entry, block)
            stored = s.fetch(sources, source, index, chunks)
            return stored, index, later_entry, load_blocks(later_entry), load_entries(i + 3)

        entries = [load_entries(i) for i in range(3)]
        blocks = [load_blocks(entry) for entry in entries[:2]]
        source, index = locate(0, entries[0], blocks[0])
        stored = s.fetch(sources, source, index, chunks)
        carry = stored, index, entries[1], blocks[1], entries[2]
        lax.fori_loop(0, num_tiles, step, carry)
        for last in range(max(num_tiles - 2, 0), num_tiles):
            plgpu.barrier_wait(keys_free.at[last % 2])

    for share in range(GATHERERS):
        pl.when(group == 2 + share)(functools.partial(gather, share))


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

    def fetch(self, sources, source, index, chunks):
        """What is stored of the rows: chunks of 64 columns, and words of scales, by name."""
        planes = dict(zip((name for name, _ in self.planes), sources, strict=True))
        stored = {}
        for chunk in chunks:
            name, start = self.place(chunk)
            rows = mosaic.gather_rows(planes[name], source, index, start=start, width=GROUP)
            stored[f"chunk {chunk}"] = rows
            if (word := self.scale_word(chunk)) is not None:
                name, number = word
                if f"{name} {number}" not in stored:
                    words = mosaic.gather_words(planes[name], source, index, word=number)
                    stored[f"{name} {number}"] = words
        return stored

    def place(self, chunk):
        """Plane and first column in it of columns 64 chunk .. 64 chunk + 63 of a row."""
        if isinstance(self.codec, formats.PlainCodec):
            return "values", chunk * GROUP
        nope = dict(self.planes)["nope"]
        start = chunk * GROUP
        return ("nope", start) if start < nope else ("rope", start - nope)

    def scale_word(self, chunk):
        """Plane and 32-bit word of the chunk's scale; None where it has none."""
        if self.place(chunk)[0] != "nope":
            return None
        if isinstance(self.codec, formats.GroupedFP8Codec):
            return "scale", chunk // 4
        return "inv_scale", 0

    def decode(self, stored, chunk):
        """bf16[64, 64] in ROWS layout: a chunk's values."""
        rows = stored[f"chunk {chunk}"]
        word = self.scale_word(chunk)
        if word is None:
            return rows.astype(jnp.bfloat16)
        scale = stored[f"{word[0]} {word[1]}"]
        if word[0] == "scale":
            scale = ((scale >> (8 * (chunk % 4))) & 255) << 23
        scale = lax.bitcast_convert_type(scale, jnp.float32)
        scale = plgpu.layout_cast(lax.broadcast_in_dim(scale, rows.shape, [0]), mosaic.ROWS)
        codes = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn)
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
        num_threads=2 + GATHERERS,
        thread_name="warpgroup",
        scratch_types=[
            bf16_tile((2, HEADS, dim // 2)),
            bf16_tile((2, TILE, dim)),
            bf16_tile((2, HEADS, TILE)),
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.SMEM((2, 3, HEADS), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=GATHERERS, num_barriers=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        queries,
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
    if tiling.splits == 1:
        return out
    sums, statistics = out
    return _combine(sums, statistics, sink).astype(queries.dtype)


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
