"""Calls of sparse attention that catch reads of anything a query may not see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers import inputs, token_oracle
from helpers.calls import call_specs
from helpers.inputs import CASE_LAYER, LAYER, NUM_LAYERS, pack_call, poison, shuffled_table
from pallas_kernels import LayerPlanes, get_cache_format, sparse_attention
from pallas_kernels.common import chunks
from pallas_kernels.common.backend import interpreting
from pallas_kernels.sparse_attention import call_shapes, mosaic_blackwell, op

SLOTS, NUM_SLOTS = [3, 1, 4], 6
INDICES = ("segment_ids", "slots", "visible")
TOLERANCE = 2.0**-7
"""Of what an output would be with all values positive.

A weight is rounded to bf16, by 2^-8 of it at most, or to f16, and the output to bf16; the
exponential of the GPU and a logit's sum of C products in f32 add some 2^-20. Keys are exact.
"""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a model and a call.

    Attributes:
      dim, rope_dim, num_heads, window: C, R, H, W.
      compression_ratio: tokens per entry.
      top_k: K.
      num_tokens: T.
      dtype: of the queries.
    """

    dim: int
    rope_dim: int
    num_heads: int
    window: int
    compression_ratio: int
    top_k: int
    num_tokens: int
    dtype: str = "float32"

    @property
    def scale(self):
        return self.dim**-0.5

    def sink(self):
        return np.resize(np.array([0.5, 2.0, -1.0], np.float32), self.num_heads)


SMALLEST_FOR_A_KERNEL = Sizes(
    dim=256,
    rope_dim=64,
    num_heads=64,
    window=70,
    compression_ratio=4,
    top_k=40,
    num_tokens=5,
    dtype="bfloat16",
)
"""Of dims and heads; a window and entries that end within a tile."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and what is stored; whatever no query may read is poison (known bug B32).

    Attributes:
      sizes: of the call.
      arguments: of the op, but for the sink.
      call: the tokens.
      window: each request's history of window entries, as stored.
      entries: each request's entries, as stored.
      selected: by request and position, the entries a query attends to.
    """

    sizes: Sizes
    arguments: dict
    call: inputs.Call
    window: list
    entries: list
    selected: list

    def attend(self, sink=None, **changes):
        """The op's output; changes are of its arguments, `backend` among them, or of the call's."""
        sink = self.sizes.sink() if sink is None else sink
        indices = {name: changes.pop(name) for name in INDICES if name in changes}
        call = dataclasses.replace(self.arguments["call"], **indices)
        arguments = self.arguments | {"sink": sink, "scale": self.sizes.scale, "call": call}
        run = _program(
            interpreting(),
            op.choose_kernel(),
            call_shapes.choose_tiling,
            mosaic_blackwell.plgpu.async_store_tmem,
            chunks.CHUNK_ELEMENTS,
        )
        return np.asarray(run(**arguments | changes)).astype(np.float32)

    def expected(self, sink=None, *, window=None, selected=slice(None), absolute=False):
        """The oracle's output, and its broken variants; `absolute` sums sizes of values."""
        sink = self.sizes.sink() if sink is None else sink
        window = self.sizes.window if window is None else window
        queries = np.asarray(self.arguments["queries"], np.float32)
        out = np.zeros(queries.shape)
        for token, request in enumerate(self.call.request_ids):
            if request >= 0:
                position = self.call.positions[token]
                chosen = self.selected[request][position][selected]
                seen = token_oracle.window_positions(position, window)
                keys = [*self.window[request][seen], *self.entries[request][chosen]]
                values = np.abs(keys) if absolute else None
                out[token] = token_oracle.attend(
                    queries[token], keys, sink, scale=self.sizes.scale, values=values
                )
        return out

    def error(self, actual, **variant):
        """The largest deviation of a kernel in 16 bits from the oracle, in units of `TOLERANCE`."""
        allowed = TOLERANCE * self.expected(absolute=True)
        deviation = np.abs(actual - self.expected(**variant))
        return np.nan_to_num(deviation / np.maximum(allowed, 1e-30), nan=np.inf).max()

    def ulps(self, actual, expected):
        """Of f32: products of C terms in a logit, and sums over W + K keys."""
        s = self.sizes
        largest = max(abs(x).max(initial=0) for x in (*self.window, *self.entries))
        unit = 2.0**-23 * (s.dim + s.window + s.top_k) ** 0.5 * largest
        return np.nan_to_num(abs(actual - expected) / unit, nan=np.inf).max()


@functools.cache
def _program(*_exchanged):
    """One for all calls, and another for whoever exchanges what the op finds while it is traced."""
    static = "scale", "query_eps", "apart", "backend"
    return jax.jit(functools.partial(sparse_attention), static_argnames=static)


def draw_case(
    sizes,
    codec,
    lengths,
    counts,
    *,
    entry_codec=None,
    entry_layer=LAYER,
    entries_per_block=2,
    packing=0,
    magnitude=1.0,
):
    """Requests that add counts to lengths; `packing` changes places, never contents.

    Keys are normal, times `magnitude`. Entries are stored as the window is, in its layer, unless
    told otherwise.
    """
    entry_codec = entry_codec or codec
    dim, rope_dim, compression_ratio, top_k = (
        sizes.dim,
        sizes.rope_dim,
        sizes.compression_ratio,
        sizes.top_k,
    )
    rng, places = np.random.default_rng(0), np.random.default_rng(packing)
    totals = [n + c for n, c in zip(lengths, counts, strict=True)]

    def draw_keys(counts, codec):
        keys = [magnitude * rng.normal(size=(n, dim)) for n in counts]
        return inputs.encode(codec, keys, rope_dim)

    encoded, window = draw_keys(totals, codec)
    rows, entries = draw_keys([n // compression_ratio for n in totals], entry_codec)
    all_queries = [rng.normal(size=(n, sizes.num_heads, dim)).astype(np.float32) for n in totals]
    selected = [
        [
            np.sort(rng.permutation((p + 1) // compression_ratio)[: rng.integers(top_k + 1)])
            for p in range(n)
        ]
        for n in totals
    ]
    logical = -(-max(totals) // (compression_ratio * entries_per_block))
    num_blocks = [-(-n // (compression_ratio * entries_per_block)) for n in totals]
    table = shuffled_table(
        places, num_blocks, num_logical=logical, num_physical=sum(num_blocks) + 3
    )
    ring = poison(codec.plane_shapes(dim, rope_dim), NUM_LAYERS, NUM_SLOTS, sizes.window)
    pool = poison(
        entry_codec.plane_shapes(dim, rope_dim), NUM_LAYERS, sum(num_blocks) + 3, entries_per_block
    )
    for r, n in enumerate(lengths):
        stored = {name: plane[:n] for name, plane in encoded[r].items()}
        ring = token_oracle.append_ring(
            ring, stored, np.full(n, SLOTS[r]), np.arange(n), layer=LAYER
        )
        count = len(entries[r])
        pool = token_oracle.flush_write(
            pool, rows[r], table, np.full(count, r), np.arange(count), layer=entry_layer
        )
    call = pack_call(places, SLOTS, lengths, counts, num_tokens=sizes.num_tokens)
    index = np.full((sizes.num_tokens, top_k), -1, np.int32)
    for token, request in enumerate(call.request_ids):
        if request >= 0:
            chosen = selected[request][call.positions[token]]
            index[token, : len(chosen)] = chosen
    arguments = {
        "queries": call.rows(all_queries).astype(sizes.dtype),
        "ring": LayerPlanes(ring, CASE_LAYER, codec),
        "rows": call.rows(encoded),
        "pool": LayerPlanes(pool, jnp.int32(entry_layer), entry_codec),
        "selected": index,
        "call": call.indices(
            table, np.where(call.request_ids >= 0, (call.positions + 1) // compression_ratio, 0)
        ),
    }
    return Case(sizes, arguments, call, window, entries, selected)


def flash_specs(num_tokens, num_heads, top_k, name):
    """Specs of a call at Flash's sizes, 64 slots and 4,096 blocks of 32 entries."""
    fmt = get_cache_format(name)

    def planes(codec, *lead):
        shapes = codec.plane_shapes(512, 64)
        return {n: jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype) for n, s in shapes.items()}

    layer = jax.ShapeDtypeStruct((), jnp.int32)
    return {
        "queries": jax.ShapeDtypeStruct((num_tokens, num_heads, 512), jnp.bfloat16),
        "sink": jax.ShapeDtypeStruct((num_heads,), jnp.float32),
        "ring": LayerPlanes(planes(fmt.ring, 2, 64, 128), layer, fmt.ring),
        "rows": planes(fmt.ring, num_tokens),
        "pool": LayerPlanes(planes(fmt.entry, 2, 4096, 32), layer, fmt.entry),
        "selected": jax.ShapeDtypeStruct((num_tokens, top_k), jnp.int32),
        "call": call_specs(num_tokens, 512),
        "frequencies": jax.ShapeDtypeStruct((32,), jnp.float32),
    }
