"""Calls of `index_scores`, `listed_scores` and `select_top_k`: requests and entries of each."""

from benchmarks.cases.product import FLASH, PRO, V41

HEADS, DIM, ENTRIES_PER_BLOCK = FLASH.indexer_num_heads, FLASH.indexer_head_dim, 32

SHAPES = [(1, 262144), (8, 65536), (8, 262144), (32, 16384), (64, 4096), (64, 16384), (64, 65536)]
"""(requests, entries of each)."""
SELECTED = [FLASH.indexer_top_k, PRO.indexer_top_k]
"""Entries that Flash and Pro select."""

COMPILED_TOP_K = [(1, 262144, 1024), (64, 65536, 512), (64, 4096, 512)]
"""(requests, entries of each, selected ones)."""
COMPILED_SCORES = [(64, 16384), (1, 262144)]
COMPILED_POOL = (2, 16384, ENTRIES_PER_BLOCK)
"""(layers, blocks, entries of a block)."""
COMPILED_NEIGHBOURS = (8192, 8192, 4)
"""(tokens of one prompt, entries of each, tokens that a CTA scores)."""
COMPILED_HEADS_OF_V41 = (64, 131072, V41.indexer_num_heads)
"""(requests, entries of each, heads)."""
COMPILED_LISTED = [(1, 16384), (64, 16384)]
"""(requests, listed entries of each)."""
COMPILED_LISTED_POOL, COMPILED_LISTED_LOGICAL = (1, 8192, 128), 1024
"""As above, and the blocks of a request's table."""
