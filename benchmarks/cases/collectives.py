"""Calls of collectives: rows of a data shard that are timed, and what peers add up or exchange."""

from typing import NamedTuple

from benchmarks.cases.product import FLASH, PRO

ROWS = (1, 8, 64, 256)
CONTEXT = FLASH.max_position_embeddings
"""Tokens of a request whose cache is split."""
SECOND_WIDTH = 256
"""Columns of the second array of an exchange that is compiled."""


class Sum(NamedTuple):
    """A sum that is compiled: so many terms of parts, of which the first may be sums of splits."""

    devices: int
    parts: int
    size: int
    terms: int = 1
    splits: int = 0


COMPILED_SUMS = [
    Sum(2, 1, FLASH.hidden_size, terms=2),
    Sum(4, 4, 64 * FLASH.hidden_size),
    Sum(8, 8, PRO.hidden_size),
    Sum(4, 1, FLASH.hidden_size, terms=2, splits=6),
]

_ROW_AND_ROUTES = FLASH.hidden_size + 4 * FLASH.num_experts_per_token
_SUMS_OF_A_HEAD = PRO.head_dim + 2
COMPILED_EXCHANGES = [
    (4, 1, 64 * _ROW_AND_ROUTES, "uint16"),
    (8, 8, PRO.num_attention_heads // 8 * _SUMS_OF_A_HEAD, "float32"),
]
"""(devices, parts, size of each, dtype): 64 rows with their experts and shares, in words of two
bytes; sums of attention of one row, for each device those of its heads."""
