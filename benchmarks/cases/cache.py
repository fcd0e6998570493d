"""Calls that keep tokens or move what is kept: appends, flushes, gathers and rows of planes.

Sizes of a cache are Flash's: C channels of an entry, IC of an index key, of which ROPE rotate.
"""

from typing import NamedTuple

from benchmarks.cases.product import FLASH, PRO
from dsv4_jax.config.layer_types import AttentionType

C, IC, ROPE, WINDOW = FLASH.head_dim, FLASH.indexer_head_dim, FLASH.rope_dim, FLASH.sliding_window
HEADS, INDEX_HEADS = FLASH.num_attention_heads, FLASH.indexer_num_heads
EPS, BLOCK_TOKENS = FLASH.rms_norm_eps, FLASH.block_tokens
COMPRESSION_RATIO = {"csa": FLASH.csa_compression_ratio, "hca": FLASH.hca_compression_ratio}
ENTRIES_PER_BLOCK = {kind: BLOCK_TOKENS // ratio for kind, ratio in COMPRESSION_RATIO.items()}
NUM_LAYERS = {str(kind): FLASH.layer_types.count(kind) for kind in AttentionType}
RELEASED = "fp8_ue8m0"
"""The cache format."""


def state_shape(kind, *lead, dim):
    """What a compressor keeps of a request: the values, or scores, of CSA; sums and such of HCA."""
    return (*lead, 2 * COMPRESSION_RATIO["csa"], 2 * dim) if kind == "csa" else (*lead, 3, dim)


BATCHES, BATCHES_WITH_INDEX = (1, 8, 64, 256), (1, 64, 256)
"""Requests whose decode step appends, and those whose index queries it rounds too."""
DECODE_LENGTH = 2048
"""Tokens that each of them has."""
TOKENS, PROMPT = (64, 8192), 8192
"""Tokens that are encoded and whose index queries are rounded; those of an append of a prompt."""
FLUSHED = (8192, 32768)
"""Tokens of a prompt whose windows are flushed."""
LAYERS = {"decode": 20, "prefill": 4}
"""Of which a round of calls goes through each, so that no call finds its arrays in L2."""

REQUESTS = 64
SELECTED = [(1, 16384), (32, 16384), (512, 16384), (512, 1 << 17), (1024, 16384)]
"""(entries of CSA that a request gathers, tokens that it has)."""
ALL_HCA = [32, 1024, 8192]
"""Entries of HCA, all of them."""

MOVED, MOVED_AMONG = (1, 4, 16, 64), 2048
"""Rows that are packed, unpacked and summed, and blocks of the pool where they lie."""

COMPILED_ENCODED = [(RELEASED, 8192, HEADS)]
"""(cache format, tokens, heads)."""
COMPILED_APPENDED = [
    ("swa", RELEASED, 64, HEADS),
    ("csa", RELEASED, 64, HEADS),
    ("csa", "fp8_per_entry", 64, PRO.num_attention_heads),
    ("hca", RELEASED, 64, HEADS),
]
"""(attention type, cache format, tokens, heads), a token of each request."""
COMPILED_FLUSHED = [
    ("csa", RELEASED, 64, 64),
    ("csa", "fp8_ue8m0_fp8_index", 8192, 1),
    ("csa", "fp8_per_entry", 64, 64),
    ("hca", RELEASED, 64, 64),
    ("hca", RELEASED, 8192, 1),
]
COMPILED_APPENDED_ALONE = [("csa", RELEASED, 64, 64), ("hca", RELEASED, 8192, 1)]
"""(attention type, cache format, tokens, requests)."""
KEPT_LAYERS, KEPT_SLOTS, KEPT_BLOCKS, KEPT_LOGICAL = 2, 64, 4096, 2048
"""Of the caches in these: layers, slots, blocks of a pool, and those of a request's table."""


class Written(NamedTuple):
    """A call of `flush_write` that is compiled: entries, and the pool and table of their blocks."""

    cache_format: str
    entries: int
    layers: int
    blocks: int
    entries_per_block: int
    requests: int
    logical: int


COMPILED_WRITTEN = [Written("fp4_e4m3", 64, 3, 65536, 64, REQUESTS, 1024)]

COMPILED_QUERIES = [("mxfp4", 8192), ("fp8", 64), ("nvfp4", 64)]
"""(form of the index keys, tokens whose index queries are rounded)."""

COMPILED_GATHERED = [
    ("selected", "csa", FLASH.indexer_top_k, 16384),
    ("all_hca", "hca", 8192, 1 << 20),
]
"""(name, attention type, entries that a request gathers, tokens that it has)."""
COMPILED_WINDOWS = FLASH.num_layers
"""Layers whose windows are in one ring."""

COMPILED_MOVED = [
    ("pack", "blocks", 64),
    ("pack", "slots", 4),
    ("unpack", "blocks", 64),
    ("unpack", "slots", 4),
    ("sum", "blocks", 64),
]
"""(op, rows of which pool, how many)."""
COMPILED_MOVED_AMONG = {"blocks": 16384, "slots": 256}
"""Rows that there are."""
