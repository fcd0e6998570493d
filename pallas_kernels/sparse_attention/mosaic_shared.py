"""What the kernels of sparse attention for Hopper and Blackwell share: all but the products.

Where a tile's keys lie, in the ring, among the call's own rows or in the pool; how they come
through registers into shared memory; how a program's sums become its output, or add up with those
of other splits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats, mosaic
from pallas_kernels.backend import compute_capability
from pallas_kernels.formats import Codec, Planes

Ref = Any

TILE, HEADS, GROUP = 64, 64, 64
"""Keys of a tile, heads of a program, columns that share a scale and are fetched together."""
MAX_DIM = 512
SECTION = 2
"""Chunks whose next rows are fetched together, as soon as they are stored: the barrier after them
keeps the compiler from putting off loads to the end of a tile, where nothing would hide them."""
LOG2_E = math.log2(math.e)
FLOOR = np.float32(-1e30)
"""Below any logit, and finite: a difference of two such maxima is not NaN."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work of one token and 64 heads is cut.

    Attributes:
      splits: programs that share the keys.
    """

    splits: int


PROGRAM_US, TILE_US, COMBINE_US = 8.0, 2.8, 3.0
"""Of a program without keys, of a tile, of a second launch; an H200's."""
BYTES_PER_US = 4.2e6


def choose_tiling(num_programs: int, num_tiles: int, num_cores: int, dim: int) -> Tiling:
    """The splits of least time: more of them wait for fewer tiles, and write and read more sums."""

    def microseconds(splits: int) -> float:
        rounds = -(-num_programs * splits // num_cores)
        time = rounds * (PROGRAM_US + TILE_US * -(-num_tiles // splits))
        if splits == 1:
            return time
        bytes_of_sums = num_programs * splits * HEADS * dim * 4
        return time + COMBINE_US + 2 * bytes_of_sums / BYTES_PER_US

    most = max(1, min(num_tiles, num_cores // max(1, num_programs)))
    # Equal tiles per split, so that none is cut for nothing.
    cuts = {-(-num_tiles // -(-num_tiles // splits)) for splits in range(1, most + 1)}
    return Tiling(splits=min(sorted(cuts), key=microseconds))


def find_obstacle(queries: jax.Array, ring: Planes, codec: Codec) -> str | None:
    """Why these kernels can't serve a call, as the rest of a sentence; None where they can."""
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
    if capability is not None and capability[0] not in (9, 10):
        return f"is for Hopper and Blackwell, got compute capability {capability}"
    return None


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of a call, its format and its tiling.

    Attributes:
      num_heads: H.
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
      splits: programs that share the keys.
    """

    num_heads: int
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
    splits: int = 1

    @property
    def dtype(self) -> Any:
        """Of products.

        f16 holds E4M3 codes times powers of two as bf16 does, from steps of 2^-24 to 65,504, far
        around what a norm leaves of an entry, and takes one instruction for two in place of six.
        """
        exact = isinstance(self.codec, formats.GroupedFP8Codec)
        return jnp.float16 if exact else jnp.bfloat16

    @property
    def window_tiles(self) -> int:
        """Of a token; its entries' tiles come after."""
        return -(-self.window // TILE)

    @property
    def num_tiles(self) -> int:
        """Of a token."""
        return self.window_tiles + self.num_entries // TILE

    @property
    def tiles_per_split(self) -> int:
        """The last split's may go beyond those of the token."""
        return -(-self.num_tiles // self.splits)

    def fetch_rows(self, sources, source, index, chunk):
        """64 stored columns of the named rows."""
        name, start = self.place(chunk)
        return mosaic.gather_rows(sources[name], source, index, start=start, width=GROUP)

    def fetch_scales(self, sources, source, index, chunks):
        """The words of scales that chunks of the named rows need, by plane and number."""
        words = {word for chunk in chunks if (word := self.scale_word(chunk)) is not None}
        return {
            f"{name} {number}": mosaic.gather_words(sources[name], source, index, word=number)
            for name, number in sorted(words)
        }

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

    def decode(self, rows, scales, chunk):
        """[64, 64] in ROWS layout: a chunk's values."""
        word = self.scale_word(chunk)
        if word is None:
            return rows.astype(self.dtype)
        scale = scales[f"{word[0]} {word[1]}"]
        if word[0] == "scale":
            scale = ((scale >> (8 * (chunk % 4))) & 255) << 23
        wide = self.dtype if self.dtype == jnp.float16 else jnp.float32
        scale = lax.bitcast_convert_type(scale, jnp.float32).astype(wide)
        scale = plgpu.layout_cast(lax.broadcast_in_dim(scale, rows.shape, [0]), mosaic.ROWS)
        codes = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn)
        return (codes.astype(wide) * scale).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A kernel's operands in device memory; see `op.sparse_attention`.

    Attributes:
      queries: bf16[T H, C].
      sink, selected: as there, the last padded to whole tiles.
      table: i32[B LB, 1].
      request_ids, slots, positions, lengths: as there.
      layer: i32[1].
      ring, rows, pool: planes as [rows, n], in the order of their names.
    """

    queries: Ref
    sink: Ref
    selected: Ref
    table: Ref
    request_ids: Ref
    slots: Ref
    positions: Ref
    lengths: Ref
    layer: Ref
    ring: Sequence[Ref]
    rows: Sequence[Ref]
    pool: Sequence[Ref]


def load_queries(
    inputs: Inputs,
    shapes: Shapes,
    first: jax.Array,
    chunks: Sequence[int],
    *,
    target_of: Callable[[int], Ref],
    store: Callable[[Ref, jax.Array, Any], None],
) -> None:
    """One warpgroup brings chunks of 64 columns of 64 heads' queries, in the dtype of products.

    Args:
      inputs: operands.
      shapes: of the call.
      first: row of the first head.
      chunks: the columns, in 64s.
      target_of: the place in shared memory of a chunk, [64, 64].
      store: as in `gather_keys`.
    """
    place = plgpu.broadcasted_iota(jnp.int32, (HEADS, GROUP), 0, layout=mosaic.ROWS).max(axis=1)
    index = first + place
    for chunk in chunks:
        rows = mosaic.gather_rows(
            [inputs.queries], index * 0, index, start=chunk * GROUP, width=GROUP, all_present=True
        )
        store(target_of(chunk), rows.astype(shapes.dtype), mosaic.ROWS)
    plgpu.commit_smem()


def gather_keys(
    inputs: Inputs,
    shapes: Shapes,
    token: jax.Array,
    first_tile: jax.Array,
    chunks: Sequence[int],
    *,
    keys_smem: Ref,
    bias_smem: Ref | None,
    keys_ready: Ref,
    keys_free: Ref,
    store: Callable[[Ref, jax.Array, Any], None],
) -> None:
    """One warpgroup brings chunks of 64 columns of all keys of a split, one tile ahead.

    Args:
      inputs: operands.
      shapes: of the call.
      token: of this program.
      first_tile: of this program.
      chunks: the columns, in 64s.
      keys_smem: [2, 64, C], where tiles come to lie in turn.
      bias_smem: f32[2, 64], to be filled with 0 for a key and minus infinity for none; or None.
      keys_ready: 2 barriers, arrived at once a tile is there.
      keys_free: 2 barriers, waited for before a place is filled again.
      store: to shared memory; takes the target, values and their layout.
    """
    s = shapes
    num_tiles = s.tiles_per_split
    place = plgpu.broadcasted_iota(jnp.int32, (TILE, GROUP), 0, layout=mosaic.ROWS).max(axis=1)
    request, slot_of_token = inputs.request_ids[token], inputs.slots[token]
    position, length = inputs.positions[token], inputs.lengths[token]
    layer_number = inputs.layer[0]
    sources = {
        name: list(of_plane)
        for (name, _), *of_plane in zip(
            s.planes, inputs.ring, inputs.rows, inputs.pool, strict=True
        )
    }

    def load_entries(i):
        """Entry numbers of tile i of this split; arbitrary in a window tile."""
        first = (first_tile + i - s.window_tiles) * TILE
        first = jnp.clip(first, 0, max(s.num_entries - TILE, 0))
        return plgpu.load(
            inputs.selected.at[token, pl.ds(first, TILE)], layout=mosaic.ROW, optimized=False
        )

    def load_blocks(entry):
        """Physical blocks of entries; 0 where there is no table row to look at."""
        logical = lax.div(jnp.maximum(entry, 0), s.entries_per_block)
        inside = (entry >= 0) & (logical < s.table_width) & (request >= 0)
        where = jnp.where(inside, request * s.table_width + logical, -1)
        return mosaic.gather_words([inputs.table], where * 0, where, word=0)

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
        (rows, scales), index, entry, block, later_entry = carry
        slot = lax.rem(i, 2)
        source, next_index = locate(i + 1, entry, block)
        next_scales = s.fetch_scales(sources, source, next_index, chunks)

        @pl.when(i >= 2)
        def _():
            plgpu.barrier_wait(keys_free.at[slot])

        if bias_smem is not None:
            bias = jnp.where(index == -1, -jnp.inf, 0.0).astype(jnp.float32)
            store(bias_smem.at[slot], bias, mosaic.ROW)
        next_rows = []
        for chunk, stored in zip(chunks, rows, strict=True):
            target = keys_smem.at[slot, :, pl.ds(chunk * GROUP, GROUP)]
            store(target, s.decode(stored, scales, chunk), mosaic.ROWS)
            # Into the registers that have just become free.
            next_rows.append(s.fetch_rows(sources, source, next_index, chunk))
            if len(next_rows) % SECTION == 0 or len(next_rows) == len(chunks):
                plgpu.commit_smem()
        plgpu.barrier_arrive(keys_ready.at[slot])
        later_block = load_blocks(later_entry)
        return (next_rows, next_scales), next_index, later_entry, later_block, load_entries(i + 3)

    entries = [load_entries(i) for i in range(3)]
    blocks = [load_blocks(entry) for entry in entries[:2]]
    source, index = locate(0, entries[0], blocks[0])
    stored = (
        [s.fetch_rows(sources, source, index, chunk) for chunk in chunks],
        s.fetch_scales(sources, source, index, chunks),
    )
    carry = stored, index, entries[1], blocks[1], entries[2]
    lax.fori_loop(0, num_tiles, step, carry)
    for last in range(max(num_tiles - 2, 0), num_tiles):
        plgpu.barrier_wait(keys_free.at[last % 2])


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


def sparse_attention(
    kernel: Callable[..., None],
    scratch_types: Callable[[int, Any], Sequence[Any]],
    num_threads: int,
    num_cores: int,
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
    """Runs a kernel on the arguments of `op.sparse_attention`.

    The kernel has the axes token, head, split and warpgroup, `num_threads` of the last, and takes
    `Inputs`, outputs, scratch of `scratch_types(C, dtype)` and `shapes=`. Its output is the bits of
    bf16[T, H, C] in the dtype of products, which is that of shared memory; with more than one split
    f32[S, T, H, C], sums, and f32[S, T, 2, H], largest logit and sum of weights.
    """
    num_tokens, num_heads, dim = queries.shape
    names = tuple(sorted(ring))
    num_slots, window = ring[names[0]].shape[1:3]
    if pool is None or selected is None:
        pool, selected = ring, jnp.zeros((num_tokens, 0), jnp.int32)
    num_blocks, entries_per_block = pool[names[0]].shape[1:3]
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
        table_width=block_table.shape[1],
        scale=scale,
        codec=codec,
        planes=tuple((name, math.prod(ring[name].shape[3:])) for name in names),
    )
    num_programs = num_tokens * num_heads // HEADS
    tiling = tiling or choose_tiling(num_programs, shapes.num_tiles, num_cores, dim)
    shapes = dataclasses.replace(shapes, splits=tiling.splits)

    out_type = [jax.ShapeDtypeStruct(queries.shape, shapes.dtype)]
    if tiling.splits > 1:
        out_type = [
            jax.ShapeDtypeStruct((tiling.splits, *queries.shape), jnp.float32),
            jax.ShapeDtypeStruct((tiling.splits, num_tokens, 2, num_heads), jnp.float32),
        ]
    planes = [
        *[_rows_of(ring[name], 3) for name in names],
        *[_rows_of(rows[name], 1) for name in names],
        *[_rows_of(pool[name], 3) for name in names],
    ]

    def sparse_attention_kernel(*refs):
        arrays, refs = refs[:9], refs[9:]
        planes = [refs[i * len(names) : (i + 1) * len(names)] for i in range(3)]
        refs = refs[3 * len(names) :]
        outputs, scratch = refs[: len(out_type)], refs[len(out_type) :]
        kernel(Inputs(*arrays, *planes), outputs, scratch, shapes=shapes)

    out = plgpu.kernel(
        sparse_attention_kernel,
        out_type=out_type,
        grid=(num_tokens, num_heads // HEADS, tiling.splits),
        grid_names=("token", "head", "split"),
        num_threads=num_threads,
        thread_name="warpgroup",
        scratch_types=scratch_types(dim, shapes.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(
        queries.reshape(-1, dim),
        sink,
        selected if shapes.num_entries else jnp.zeros((num_tokens, TILE), jnp.int32),
        block_table.reshape(-1, 1),
        request_ids,
        slots,
        positions,
        lengths,
        layer[None],
        *planes,
    )
    if tiling.splits == 1:
        return lax.bitcast_convert_type(out[0], queries.dtype)
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
