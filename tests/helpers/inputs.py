"""Inputs that catch an op reading or writing what it has no business with.

Every such byte is 0xFF, which is NaN in f32, bf16 and E4M3. Layers are stacked and the one in use
is in the middle. Nobody owns the first or the last slot or block, where an index of -1 ends that
is clamped or wraps.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers.arrays import on_device, ones, zeros
from helpers.host_tables import addresses_of
from pallas_kernels import (
    AttentionPart,
    CallIndices,
    Compressor,
    LayerPlanes,
    NormRope,
    get_cache_format,
)

LAYER, NUM_LAYERS = 1, 3
CASE_LAYER = on_device(LAYER, jnp.int32)


def poisoned(*shape, dtype=np.float32):
    """An array whose every byte is 0xFF."""
    dtype = np.dtype(dtype)
    return np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype)[..., 0]


def poison(shapes, *lead):
    """Planes [*lead, ...] of the given shapes and dtypes, every byte 0xFF."""
    return {name: poisoned(*lead, *s.shape, dtype=s.dtype) for name, s in shapes.items()}


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encode_and_decode(codec, x, rope_dim):
    planes = codec.encode(x, rope_dim)
    return planes, codec.decode(planes, x.shape[-1])


def encode(codec, vectors, rope_dim):
    """Each request's vectors [n, dim] as planes [n, ...], and as a cache would give them back."""
    flat = np.concatenate(vectors).astype(np.float32)
    # Rows to a power of four, and not to a small one, so that many calls share a program.
    padding = max(4 ** -(-(len(flat) + 1).bit_length() // 2), 1024) - len(flat)
    padded = np.pad(flat, ((0, padding), (0, 0)))
    stored = _encode_and_decode(codec, padded, rope_dim)
    planes, decoded = jax.tree.map(lambda plane: np.asarray(plane)[: len(flat)], stored)
    ends = np.cumsum([len(x) for x in vectors])[:-1]
    pieces = {name: np.split(plane, ends) for name, plane in planes.items()}
    per_request = [{name: pieces[name][r] for name in planes} for r in range(len(vectors))]
    return per_request, np.split(decoded, ends)


def shuffled_table(rng, num_blocks, *, num_logical, num_physical):
    """i32[B, LB]: request r owns num_blocks[r] physical blocks in any order, then -1."""
    owned = iter(rng.permutation(np.arange(1, num_physical - 1)))
    table = np.full((len(num_blocks), num_logical), -1, np.int32)
    for row, count in enumerate(num_blocks):
        table[row, :count] = [next(owned) for _ in range(count)]
    return table


@dataclasses.dataclass(frozen=True)
class Call:
    """One call's tokens and rows, as NumPy arrays; padding may lie anywhere between requests.

    Attributes:
      request_ids, slots, positions, lengths: i32[T]; a padding token has request and slot -1.
      row_slots, row_lengths, row_counts, row_offsets: i32[B]; an idle row has slot -1.
    """

    request_ids: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    row_slots: np.ndarray
    row_lengths: np.ndarray
    row_counts: np.ndarray
    row_offsets: np.ndarray

    def rows(self, histories):
        """[T, ...]: each token's row of its request's history, poison for padding.

        Histories are arrays [n, ...], or planes of them.
        """
        if isinstance(histories[0], dict):
            return {name: self.rows([h[name] for h in histories]) for name in histories[0]}
        rows = poisoned(len(self.slots), *histories[0].shape[1:], dtype=histories[0].dtype)
        for token, request in enumerate(self.request_ids):
            if request >= 0:
                rows[token] = histories[request][self.positions[token]]
        return rows

    def indices(self, block_table=None, visible=None, *, max_row_tokens=None):
        """`CallIndices` as an op takes them; without a table, of one block that no row has.

        `max_row_tokens` is that of this call, unless a larger one lets calls share a program.
        """
        if block_table is None:
            block_table = np.full((len(self.row_slots), 1), -1, np.int32)
        fields = dataclasses.asdict(self)
        fields["segment_ids"] = fields.pop("request_ids")
        arrays = {name: on_device(array, jnp.int32) for name, array in fields.items()}
        return CallIndices(
            **arrays,
            block_table=on_device(block_table, jnp.int32),
            visible=None if visible is None else on_device(visible, jnp.int32),
            max_row_tokens=max_row_tokens or max(1, int(max(self.row_counts, default=1))),
        )

    def last_of_each_row(self, size):
        """i32[T], slots with -1 for tokens whose row of a ring a later token of the call takes."""
        ends = dict(zip(self.row_slots, self.row_lengths + self.row_counts, strict=True))
        last = self.positions >= [ends.get(slot, 0) - size for slot in self.slots]
        return np.where(last, self.slots, -1)

    def closing(self, compression_ratio, size, rng):
        """i32[size], tokens that close a window among -1, in any order, as definitions take it."""
        closes = (self.slots >= 0) & ((self.positions + 1) % compression_ratio == 0)
        tokens = np.flatnonzero(closes)
        padded = np.full(size, -1, np.int32)
        padded[rng.permutation(size)[: len(tokens)]] = tokens
        return padded


def pack_call(rng, slots, lengths, counts, *, num_tokens, num_rows=None):
    """A call that adds counts[r] tokens to request r of slot slots[r], which holds lengths[r].

    Args:
      rng: puts the requests in any order, with padding between them.
      slots: of each request.
      lengths: tokens of each request before the call.
      counts: tokens of each request in the call.
      num_tokens: T.
      num_rows: B, by default the number of requests.
    """
    num_rows = num_rows or len(slots)
    call = Call(
        request_ids=np.full(num_tokens, -1, np.int32),
        slots=np.full(num_tokens, -1, np.int32),
        positions=rng.integers(0, 9, num_tokens, np.int32),
        lengths=rng.integers(0, 9, num_tokens, np.int32),
        row_slots=np.full(num_rows, -1, np.int32),
        row_lengths=np.zeros(num_rows, np.int32),
        row_counts=np.zeros(num_rows, np.int32),
        row_offsets=np.zeros(num_rows, np.int32),
    )
    start, spare = 0, num_tokens - sum(counts)
    rows = rng.permutation(num_rows)
    for request in rng.permutation(len(slots)):
        gap = rng.integers(0, spare + 1)
        start, spare = start + gap, spare - gap
        tokens = slice(start, start := start + counts[request])
        call.request_ids[tokens] = request
        call.slots[tokens] = slots[request]
        call.positions[tokens] = np.arange(lengths[request], lengths[request] + counts[request])
        call.lengths[tokens] = lengths[request]
        row = rows[request]
        call.row_slots[row] = slots[request]
        call.row_lengths[row] = lengths[request]
        call.row_counts[row] = counts[request]
        call.row_offsets[row] = tokens.start
    return call


def small_call():
    """Two segments of one token each, and a token of padding; T = 3, B = 2."""
    per_token = {"segment_ids": [0, 1, -1], "slots": [0, 1, -1]}
    per_token |= {name: [0, 0, 0] for name in ("positions", "lengths")}
    per_row = {"slots": [0, 1], "lengths": [0, 0], "counts": [1, 1], "offsets": [0, 1]}
    fields = per_token | {f"row_{name}": value for name, value in per_row.items()}
    arrays = {name: on_device(value, jnp.int32) for name, value in fields.items()}
    return CallIndices(**arrays, block_table=zeros((2, 3), jnp.int32), max_row_tokens=3)


def replace_argument(arguments, name, value):
    """The arguments with one exchanged; "call.slots" is a field of one of them."""
    name, _, field = name.partition(".")
    return arguments | {
        name: dataclasses.replace(arguments[name], **{field: value}) if field else value
    }


def valid_arguments(op):
    """Small arguments, by name, that the op of that name accepts."""

    def f32(*shape):
        return ones(shape)

    def i32(*shape):
        return zeros(shape, jnp.int32)

    tokens, dim, compression_ratio = 3, 8, 2
    ring, rows = {"values": f32(NUM_LAYERS, 3, 4, dim)}, {"values": f32(tokens, dim)}
    pool, table = {"values": f32(NUM_LAYERS, 4, 2, dim)}, i32(2, 3)
    plain = {"codec": get_cache_format("f32").entry}
    state = {
        name: f32(NUM_LAYERS, 3, 2 * compression_ratio, 2 * dim) for name in ("values", "scores")
    }
    wide = {"values": f32(tokens, 2 * dim), "scores": f32(tokens, 2 * dim)}
    narrow = {"values": f32(tokens, dim), "scores": f32(tokens, dim)}
    running = f32(NUM_LAYERS, 3, 3, dim)
    windows = {"call": small_call(), "compression_ratio": compression_ratio}
    flushed = windows | {"frequencies": f32(2), "eps": 1e-6}
    query = {"queries": f32(tokens, 2, dim), **plain}
    norm_rope = NormRope(f32(dim), f32(2), 1e-6)
    projected = {"queries": f32(tokens, 2, dim), "kv": f32(tokens, dim)}
    mixed = {"products": f32(tokens, 1, 8), "scale": f32(3), "base": f32(8), "norm": f32(dim)}
    csa = Compressor(state, wide, f32(dim), pool, plain["codec"])
    hca = Compressor(running, narrow, f32(dim), pool, plain["codec"])
    stored = {"pool": LayerPlanes(pool, CASE_LAYER, plain["codec"]), "call": small_call()}
    attended = {"ring": LayerPlanes(ring, CASE_LAYER, plain["codec"]), "rows": rows}
    attended |= {"call": small_call()}
    without_layer = ("append_and_flush", "encode_tokens", "hyper_connections")
    without_layer += ("round_index_queries", "gather_entries", "gather_window")
    without_layer += ("index_topk", "sparse_attention", "expert_mlp")
    without_layer += ("block_linear", "block_linears", "swiglu_linear", "joined_linears")
    without_layer += ("pick_experts", "write_streams", "mixture_mlp")
    without_layer += ("limit_tokens", "pack_rows", "sum_rows", "unpack_rows", "gather_host_rows")
    without_layer += ("index_scores", "select_top_k", "attend_in_part", "join_parts")
    experts = {"w1": f32(4, 6, dim), "w3": f32(4, 6, dim), "w2": f32(4, dim, 6)}
    return {
        "append_and_flush": projected
        | windows
        | {"ring": LayerPlanes(ring, CASE_LAYER, plain["codec"]), "compressors": [csa]}
        | {"norm_rope": norm_rope}
        | {"index_queries": f32(tokens, 2, dim), "index_codec": plain["codec"]},
        "append_tokens": windows
        | {"rings": [ring], "rows": [rows], "running": running, "projections": narrow},
        "attend_in_part": stored
        | attended
        | {"queries": f32(tokens, 2, dim), "selected": i32(tokens, 3), "scale": 1.0},
        "block_linear": {"x": f32(tokens, dim), "weight": f32(6, dim)},
        "block_linears": {"x": f32(tokens, dim), "weights": [f32(6, dim), f32(5, dim)]},
        "joined_linears": {"x": f32(tokens, dim), "weights": [f32(6, dim), f32(5, dim)]}
        | {"biases": [None, f32(2, 5)], "positions": i32(tokens)},
        "encode_tokens": projected | plain | {"norm_rope": norm_rope, "positions": i32(tokens)},
        "expert_mlp": {"x": f32(tokens, dim), "expert_ids": i32(tokens, 2), "limit": 1.0}
        | {"expert_weights": f32(tokens, 2)}
        | experts,
        "flush_csa": flushed | {"compressors": [csa]},
        "flush_hca": flushed | {"compressor": hca},
        "flush_write": {"pool": pool, "rows": rows, "block_table": table}
        | {"segment_ids": i32(tokens), "entries": i32(tokens)},
        "gather_entries": stored | {"index": i32(tokens, 3), "dim": dim},
        "gather_host_rows": {"rows": i32(tokens, 2, 3), "row_bytes": [8]}
        | {"addresses": addresses_of([[np.zeros((1, 8), np.uint8)]] * 2)},
        "gather_window": attended | {"dim": dim},
        "index_scores": stored
        | {"queries": f32(tokens, 2, dim), "weights": f32(tokens, 2)}
        | {"call": dataclasses.replace(small_call(), visible=i32(tokens))},
        "index_topk": stored
        | {"queries": f32(tokens, 2, dim), "weights": f32(tokens, 2), "k": 3}
        | {"call": dataclasses.replace(small_call(), visible=i32(tokens))},
        "hyper_connections": mixed
        | {"streams": f32(tokens, 2, dim), "iters": 2, "eps": 1e-6, "norm_eps": 1e-6},
        "join_parts": {
            "parts": AttentionPart(f32(2, tokens, 2, dim), f32(2, tokens, 2, 2)),
            "sink": f32(2),
            "positions": i32(tokens),
            "dtype": jnp.float32,
        },
        "limit_tokens": {"scaled": f32(tokens, dim), "top_k": i32(tokens)} | {"top_p": f32(tokens)},
        "mixture_mlp": {"x": f32(tokens, dim), "expert_ids": i32(tokens, 2), "limit": 1.0}
        | {"expert_weights": f32(tokens, 2), "shared": (f32(6, dim), f32(6, dim), f32(dim, 6))}
        | experts,
        "pack_rows": {"planes": [f32(2, 5, dim)], "rows": i32(tokens)},
        "pick_experts": {"logits": f32(tokens, 4), "bias": f32(4), "count": 2, "scaling": 1.0},
        "round_index_queries": query | {"frequencies": f32(2), "positions": i32(tokens)},
        "select_top_k": {"scores": f32(tokens, dim), "visible": i32(tokens), "k": 3},
        "swiglu_linear": {"x": f32(tokens, dim), "gate": f32(6, dim), "up": f32(6, dim)}
        | {"limit": 1.0},
        "sparse_attention": stored
        | attended
        | {"queries": f32(tokens, 2, dim), "sink": f32(2)}
        | {"selected": i32(tokens, 3), "scale": 1.0},
        "sum_rows": {"packed": ones((tokens, dim), jnp.uint8)},
        "unpack_rows": {"planes": [f32(2, 5, dim)], "rows": i32(tokens)}
        | {"packed": ones((tokens, 2 * dim * 4), jnp.uint8)},
        "write_streams": {"streams": f32(tokens, 2, dim), "output": f32(tokens, dim)}
        | {"post": f32(tokens, 2), "comb": f32(tokens, 2, 2), "fn": f32(8, 2 * dim)},
    }[op] | ({} if op in without_layer else {"layer": CASE_LAYER})
