"""PlacedTables: the tables where programs on a device read them, without the host.

pinned    in the host's memory, where they are: the device reads rows over PCIe
device    in the device's own memory, for tables that are small
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.config.engram import EngramConfig
from dsv4_jax.engram.device_hashes import hash_ngrams
from dsv4_jax.engram.pinned_memory import bytes_to_pin, pin
from dsv4_jax.engram.rows import EngramRows
from dsv4_jax.engram.tables import EngramTable, EngramTables
from pallas_kernels.gather_host_rows import gather_host_rows
from pallas_kernels.gather_host_rows.op import split_address

PINNED, DEVICE = "pinned", "device"
PLACES = (PINNED, DEVICE)


@flax.struct.dataclass(kw_only=True)
class PlacedTables:
    """The tables of a model as programs have them; on a mesh every device has these arrays.

    Attributes:
      normalized: i32[V], of `normalize_ids`.
      addresses: i32[L, P, 2], where values and scales of each table begin in the host's memory, as
        `gather_host_rows` takes them; None of tables that lie on the device.
      arrays: values [rows, head_dim] and scales [rows, head_dim / 32] of each table, or values
        alone, as `EngramTable` has them but E4M3 as u8; None of tables on the host.
      source: the tables as the host has them.
      dtypes: of the values, and of the scales if there are any, as in `EngramRows`.
    """

    normalized: jax.Array
    addresses: jax.Array | None
    arrays: tuple[tuple[jax.Array, ...], ...] | None
    source: EngramTables
    dtypes: tuple[np.dtype, ...] = flax.struct.field(pytree_node=False)

    def digest(self) -> bytes:
        """`EngramTables.digest`."""
        return self.source.digest()

    @property
    def tables(self) -> tuple[EngramTable, ...]:
        """One for each layer, as the host has them."""
        return self.source.tables

    @property
    def tokenizer_json(self) -> str:
        """What `normalized` was made of."""
        return self.source.tokenizer_json

    @property
    def config(self) -> EngramConfig:
        """Sizes of the tables."""
        return self.source.config

    def take(self, back: jax.Array) -> EngramRows:
        """What tokens read, as `EngramTables.take` has it; ids that are none read what they read.

        Args:
          back: i32[T, max_ngram], ids of each token and of those before it, the nearest first; -1
            where the sequence has none.
        """
        ids = jnp.where(back < 0, self.config.pad_token_id, back)
        hashed = hash_ngrams(self.config, self.normalized.at[ids].get(mode="clip"))
        if self.arrays is not None:
            tables = zip(*self.arrays, strict=True)
            found = [
                jnp.stack([table[hashed[:, n]] for n, table in enumerate(planes)], axis=1)
                for planes in tables
            ]
        else:
            assert self.addresses is not None
            widths = self.config.head_dim, -(-self.config.head_dim // 32)
            sizes = [w * dtype.itemsize for w, dtype in zip(widths, self.dtypes, strict=False)]
            planes = gather_host_rows(hashed, self.addresses, row_bytes=sizes)
            found = [_as(plane, dtype) for plane, dtype in zip(planes, self.dtypes, strict=True)]
        return EngramRows(values=found[0], scale=found[1] if len(found) > 1 else None)

    def rows(self, token_ids: jax.Array) -> jax.Array:
        """f32[B, T, L, width], what every token of whole sequences i32[B, T] reads."""
        width = self.config.max_ngram
        past = jnp.full((token_ids.shape[0], width - 1), -1, token_ids.dtype)
        whole = jnp.concatenate([past, token_ids], axis=1)
        num = token_ids.shape[1]
        back = jnp.stack([whole[:, width - 1 - s :][:, :num] for s in range(width)], axis=-1)
        found = self.take(back.reshape(-1, width))
        rows = [found.of_table(n) for n in range(len(self.config.layers))]
        return jnp.stack(rows, axis=1).reshape(*token_ids.shape, len(rows), -1)


def place_tables(tables: EngramTables, where: str) -> PlacedTables:
    """The tables where programs read them.

    Args:
      tables: in the host's memory, or mapped there.
      where: one of `PLACES`. What is pinned stays so until the process ends, and the tables stay in
        memory as long.

    Raises:
      ValueError: there is no such place; or a row has no whole words, and cannot be read there.
      PinError: the driver refuses to pin the memory.
    """
    checks.choice("where", where, PLACES)
    stored = _planes(tables)
    addresses = arrays = None
    if where == DEVICE:
        arrays = tuple(tuple(map(jnp.asarray, table)) for table in stored)
    else:
        for plane in stored[0]:
            if plane.strides[0] % 4:
                raise ValueError(
                    f"tables must have rows of whole words of 4 bytes, got {plane.strides[0]} "
                    "bytes; leave them to the host"
                )
        begin = iter(pin([plane for table in stored for plane in table]))
        halves = [[split_address(next(begin)) for _ in table] for table in stored]
        addresses = jnp.asarray(halves, jnp.int32)
    return PlacedTables(
        normalized=jnp.asarray(tables.normalized, jnp.int32),
        addresses=addresses,
        arrays=arrays,
        source=tables,
        dtypes=tuple(plane.dtype for plane in stored[0]),
    )


def memory_to_pin(tables: EngramTables) -> int:
    """Bytes that `place_tables` would pin, without those that are pinned already."""
    return bytes_to_pin([plane for planes in _planes(tables) for plane in planes])


def _planes(tables: EngramTables) -> list[list[np.ndarray]]:
    """Values and scales of each table, or values alone."""
    return [
        [_codes(plane) for plane in (table.values, table.scale) if plane is not None]
        for table in tables.tables
    ]


def _codes(plane: np.ndarray) -> np.ndarray:
    """E4M3 and UE8M0 as bytes, as `EngramRows` has them."""
    return plane.view(np.uint8) if plane.dtype.itemsize == 1 else plane


def _as(plane: jax.Array, dtype: np.dtype) -> Any:
    """Bytes u8[..., n] as another dtype."""
    if dtype.itemsize == 1:
        return plane
    return jax.lax.bitcast_convert_type(plane.reshape(*plane.shape[:-1], -1, dtype.itemsize), dtype)
