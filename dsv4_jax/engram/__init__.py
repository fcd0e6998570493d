"""Engram tables, which lie on the host: from token ids to the rows that each token reads.

    ids       token ids to normalised ones, by the texts of a tokenizer
    hashes    n-grams of those to rows of each table
    rows      what tokens read of them, as a step takes it
    tables    the tables, and what their rows hold
    placed_tables    the same for programs: device_hashes, and rows out of pinned_memory

Parameters on the device make keys and a value of the rows.

Source: deepseek_v41.md section 9.
"""

from dsv4_jax.engram.ids import normalize_ids
from dsv4_jax.engram.pinned_memory import PinError
from dsv4_jax.engram.placed_tables import PlacedTables, place_tables
from dsv4_jax.engram.rows import EngramRows
from dsv4_jax.engram.tables import EngramTable, EngramTables

__all__ = [
    "EngramRows",
    "EngramTable",
    "EngramTables",
    "PinError",
    "PlacedTables",
    "normalize_ids",
    "place_tables",
]
