"""Calls of `sparse_attention`: heads, entries and tokens."""

from benchmarks.cases.product import FLASH

DIM, ROPE, WINDOW = FLASH.head_dim, FLASH.rope_dim, FLASH.sliding_window
SCALE = DIM**-0.5
BATCHES = [1, 8, 32, 64, 128, 256]
CSA = [(64, 512, 1), (128, 1024, 1), (64, 512, 2), (128, 1024, 2)]
HCA = [(64, 32, 1), (64, 1024, 1), (64, 8192, 1), (64, 1024, 2)]
"""(heads, entries, query tokens of a request)."""
ROOM = [(64, 128, 1, 8192), (64, 1024, 1, 8192)]
"""HCA, with a fourth number: the entries that a request has room for."""
BASELINE_RING, BASELINE_ROOM = 2 * WINDOW, 4096
"""Of a request in a baseline's cache: rows of its window, and the least of its entries."""

COMPILED = [
    ("fp8_ue8m0", 256, 64, 512),
    ("fp8_ue8m0", 8, 128, 1024),
    ("bf16", 256, 64, 512),
    ("fp8_per_entry", 256, 64, 512),
    ("fp8_ue8m0", 256, 8, 512),
    ("fp8_ue8m0", 1, 8, 512),
    ("fp8_ue8m0", 32, 32, 512),
    ("bf16", 256, 16, 512),
]
"""(cache format, query tokens, heads, entries), of Mosaic's kernels."""
COMPILED_AS_PROJECTED = [
    ("fp8_ue8m0", 1024, 64, 512),
    ("bf16", 1024, 64, 512),
    ("fp8_ue8m0", 1, 64, 512),
]
"""The same of queries that the kernel norms and rotates."""
COMPILED_FEW_TOKENS = [
    ("fp8_ue8m0", 1, 64, 512),
    ("fp8_ue8m0", 8, 16, 32),
    ("fp8_per_entry", 1, 64, 512),
    ("bf16", 1, 64, 512),
]
"""The same of Triton's kernel."""
COMPILED_APART = [
    ("fp4_e4m3", 8, 64, 512),
    ("fp4_e4m3", 64, 64, 512),
    ("fp4_e4m3", 64, 16, 512),
    ("fp4_e4m3", 1024, 64, 512),
    ("fp8_ue8m0", 64, 64, 512),
]
"""The same of entries that have another format than the window, of Mosaic's kernels."""
COMPILED_APART_TRITON = [
    ("fp4_e4m3", 1, 64, 512),
    *(case for case in COMPILED_APART if case[0] == "fp4_e4m3"),
]
