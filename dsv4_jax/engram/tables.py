"""The Engram tables of a model, and what a token's rows of them hold."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dsv4_jax import checks
from dsv4_jax.config.engram import GROUP, EngramConfig
from dsv4_jax.engram.hashes import hash_ngrams, hash_rows, normalize
from dsv4_jax.engram.ids import normalize_ids
from dsv4_jax.engram.rows import EngramRows

_HASHED_ROWS = 2**16
"""Of a table, evenly spaced, in `EngramTables.digest`."""


@dataclasses.dataclass(frozen=True, eq=False)
class EngramTable:
    """One table; its arrays may be views of mapped files, of which rows are read as they are asked.

    Attributes:
      values: [rows, head_dim], dense, or E4M3 codes beside a scale.
      scale: UE8M0 as u8[rows, head_dim / 32], of each row and 32 columns; None of dense values.
    """

    values: np.ndarray
    scale: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Values and scales of rows i64[...] as `EngramRows` has them."""
        values = self.values[rows]
        if self.scale is None:
            return values, None
        return values.view(np.uint8), self.scale[rows]

    def read(self, rows: np.ndarray | slice) -> np.ndarray:
        """f32[..., head_dim] of rows i64[...]."""
        values = self.values[rows].astype(np.float32)
        if self.scale is None:
            return values
        scale = self.scale[rows].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        return values * np.repeat(scale, GROUP, axis=-1)[..., : values.shape[-1]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class EngramTables:
    """The tables of a model, one for each layer of `EngramConfig.layers`.

    Two of them are equal where they are the same object. In a tree they are no leaf, but static.

    Attributes:
      config: sizes of the tables.
      normalized: i64[V], of `normalize_ids`.
      tables: one for each layer.
      tokenizer_json: what `normalized` was made of, which a saved checkpoint has beside it.
    """

    config: EngramConfig
    normalized: np.ndarray
    tables: tuple[EngramTable, ...]
    tokenizer_json: str

    @classmethod
    def make(
        cls, config: EngramConfig, tokenizer_json: str, tables: tuple[EngramTable, ...]
    ) -> EngramTables:
        """Checks that tables and tokenizer are those of the config.

        Raises:
          ValueError: the tokenizer's texts give another number of normalised ids, which would hash
            every n-gram to another row; or a table has another shape.
        """
        normalized = normalize_ids(tokenizer_json)
        found = int(normalized.max(initial=-1)) + 1
        if found != config.num_normalized_ids:
            raise ValueError(
                f"the tokenizer must give engram_compressed_vocab_size={config.num_normalized_ids} "
                f"normalised ids, got {found}; take the tokenizer.json of this model"
            )
        wanted = [(rows, config.head_dim) for rows in config.table_rows]
        shapes = [table.values.shape for table in tables]
        if shapes != wanted:
            raise ValueError(f"Engram tables must be of {wanted}, got {shapes}")
        return cls(config, normalized, tables, tokenizer_json)

    def __repr__(self) -> str:
        """Says which sizes they have, which is what programs depend on."""
        return f"EngramTables({self.config})"

    def digest(self) -> bytes:
        """A hash of their sizes, of the normalised ids, and of some rows of each table."""
        told = hashlib.blake2b(f"{self.config}".encode(), digest_size=16)
        told.update(np.asarray(self.normalized, np.int64).tobytes())
        for table in self.tables:
            last = len(table.values) - 1
            rows = np.linspace(0, last, min(_HASHED_ROWS, last + 1)).astype(np.int64)
            for plane in (table.values, table.scale):
                if plane is not None:
                    told.update(f"{plane.dtype} {plane.shape} ".encode())
                    told.update(np.ascontiguousarray(plane[rows]).tobytes())
        return told.digest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.num_bytes for table in self.tables)

    def take(self, back: np.ndarray) -> EngramRows:
        """What tokens read, as it is stored.

        Args:
          back: i[..., max_ngram], ids of each token and of those before it, the nearest first; -1
            where the sequence has none.

        Raises:
          ValueError: a token has no normalised id.
        """
        ids = np.asarray(back)
        checks.in_range("token_ids", ids, -1, len(self.normalized))
        hashed = hash_ngrams(self.config, normalize(self.config, self.normalized, ids))
        taken = [table.take(hashed[..., n, :]) for n, table in enumerate(self.tables)]
        values, scales = zip(*taken, strict=True)
        has_scale = scales[0] is not None
        return EngramRows(
            values=np.stack(values, axis=-3), scale=np.stack(scales, axis=-3) if has_scale else None
        )

    def take_some(self, back: np.ndarray, places: np.ndarray, count: int) -> EngramRows:
        """`take` of some tokens, at their places among so many; zeros elsewhere.

        Args:
          back: i[n, max_ngram], as there.
          places: i[n].
          count: of all tokens.
        """
        rows = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.shapes(count))
        if len(places):
            taken = self.take(back)
            rows.values[places] = taken.values
            if rows.scale is not None:
                rows.scale[places] = taken.scale
        return rows

    def shapes(self, *lead: int) -> EngramRows:
        """Shapes and dtypes of `take` of ids i[*lead, max_ngram]."""
        first, sizes = self.tables[0], (*lead, len(self.tables), self.config.num_columns)
        shape: Any = jax.ShapeDtypeStruct
        if first.scale is None:
            return EngramRows(values=shape((*sizes, self.config.head_dim), first.values.dtype))
        return EngramRows(
            values=shape((*sizes, self.config.head_dim), np.uint8),
            scale=shape((*sizes, first.scale.shape[-1]), np.uint8),
        )

    def rows(self, token_ids: np.ndarray) -> np.ndarray:
        """What every token of whole sequences reads.

        Args:
          token_ids: i[..., T].

        Returns:
          f32[..., T, L, width], the rows of each layer beside each other.

        Raises:
          ValueError: a token has no normalised id.
        """
        ids = np.asarray(token_ids)
        checks.in_range("token_ids", ids, 0, len(self.normalized))
        hashed = hash_rows(self.config, self.normalized, ids)
        read = [table.read(hashed[..., n, :]) for n, table in enumerate(self.tables)]
        return np.stack([rows.reshape(*ids.shape, self.config.width) for rows in read], axis=-2)
