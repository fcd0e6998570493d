"""Calls that read rows of DeepSeek-V4.1's Engram tables."""

from benchmarks.cases.product import V41
from dsv4_jax.config.engram import GROUP

_ENGRAM = V41.engram
TABLES, COLUMNS = len(_ENGRAM.layers), _ENGRAM.num_columns
ROW_BYTES = _ENGRAM.head_dim, _ENGRAM.head_dim // GROUP
"""Of codes, and of scales."""
TOKENS = 1, 8, 64, 4096
"""Of a call: decode steps, and a chunk of a prompt."""
TABLE_ROWS = 2**22
"""Of a table that is timed: 1.1 GB, far more than any cache holds."""
