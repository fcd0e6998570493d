"""Engram tables, which lie on the host: from token ids to the rows that each token reads.

    ids       token ids to normalised ones, by the texts of a tokenizer
    hashes    n-grams of those to rows of each table
    rows      what tokens read of them, as a step takes it
    tables    the tables, and what their rows hold

Parameters on the device make keys and a value of the rows.

Source: deepseek_v41.md section 9.
"""

from dsv4_jax.engram.ids import normalize_ids
from dsv4_jax.engram.rows import EngramRows
from dsv4_jax.engram.tables import EngramTable, EngramTables

__all__ = ["EngramRows", "EngramTable", "EngramTables", "normalize_ids"]
