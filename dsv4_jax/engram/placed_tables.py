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
from dsv4_jax.config.engram import GROUP, EngramConfig
from dsv4_jax.engram.device_hashes import hash_ngrams
from dsv4_jax.engram.pinned_memory import bytes_to_pin, pin
from dsv4_jax.engram.rows import EngramRows
from dsv4_jax.engram.tables import EngramTable, EngramTables
from pallas_kernels.gather_host_rows import gather_host_rows
from pallas_kernels.gather_host_rows.op import split_address

PINNED, DEVICE = "pinned", "device"
PLACES = (PINNED, DEVICE)
_DTYPES = tuple(map(np.dtype, (np.uint8, np.float16, jnp.bfloat16, np.float32)))
"""Of values: codes, or dense."""
_MOST_ROWS = 2**31 - 1


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process, which has the tables elsewhere, places them anew."""
        return place_tables, (self.source, DEVICE if self.addresses is None else PINNED)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedTables:
        """Itself: nothing of it can be changed, and a copy of the tables would lie elsewhere."""
        return self

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
            widths = self.config.head_dim, -(-self.config.head_dim // GROUP)
            sizes = [w * dtype.itemsize for w, dtype in zip(widths, self.dtypes, strict=False)]
            planes = gather_host_rows(hashed, self.addresses, row_bytes=sizes)
            found = [_as(plane, dtype) for plane, dtype in zip(planes, self.dtypes, strict=True)]
        return EngramRows(values=found[0], scale=found[1] if len(found) > 1 else None)

    def rows(self, token_ids: jax.Array) -> jax.Array:
        """f32[B, T, L, width], what every token of whole sequences i32[B, T] reads."""
        width = self.config.max_ngram
        past = jnp.full((token_ids.shape[0], width - 1), -1, jnp.int32)
        whole = jnp.concatenate([past, token_ids.astype(jnp.int32)], axis=1)
        num = token_ids.shape[1]
        back = jnp.stack([whole[:, width - 1 - s :][:, :num] for s in range(width)], axis=-1)
        found = self.take(back.reshape(-1, width))
        rows = [found.of_table(n) for n in range(len(self.config.layers))]
        return jnp.stack(rows, axis=1).reshape(*token_ids.shape, len(rows), -1)


def place_tables(tables: EngramTables, where: str, *, on_gpu: bool | None = None) -> PlacedTables:
    """The tables where programs read them.

    Args:
      tables: in the host's memory, or mapped there.
      where: one of `PLACES`. What is pinned stays so until the process ends, and the tables stay in
        memory as long.
      on_gpu: whether GPUs will read pinned ones; None is whether JAX's default device is one.

    Raises:
      ValueError: there is no such place; or programs cannot read these tables there: they are not
        those of their config, of several dtypes or one that JAX has not, or not in one piece.
      PinError: the driver refuses to pin the memory.
    """
    checks.instance("tables", tables, EngramTables)
    checks.choice("where", where, PLACES)
    stored = _planes(tables)
    _check_planes(tables.config, stored, pinned=where == PINNED)
    addresses = arrays = None
    if where == DEVICE:
        arrays = tuple(tuple(map(jnp.asarray, table)) for table in stored)
    else:
        begin = iter(pin([plane for table in stored for plane in table], on_gpu=on_gpu))
        halves = [[split_address(next(begin)) for _ in table] for table in stored]
        addresses = jnp.asarray(halves, jnp.int32)
    return PlacedTables(
        normalized=jnp.asarray(tables.normalized, jnp.int32),
        addresses=addresses,
        arrays=arrays,
        source=tables,
        dtypes=tuple(plane.dtype for plane in stored[0]),
    )


def _check_planes(config: EngramConfig, stored: list[list[np.ndarray]], *, pinned: bool) -> None:
    """Refuses what the host may read and programs may not, by whose numbers nothing is checked."""
    widths = config.head_dim, -(-config.head_dim // GROUP)
    wanted = [[(rows, width) for width in widths[: len(stored[0])]] for rows in config.table_rows]
    shapes = [[plane.shape for plane in planes] for planes in stored]
    if shapes != wanted:
        raise ValueError(f"tables must be those of their config, of {wanted}, got {shapes}")
    dtypes = {tuple(str(plane.dtype) for plane in planes) for planes in stored}
    if len(dtypes) > 1:
        raise ValueError(f"tables must be of one dtype each, got {sorted(dtypes)}")
    for plane in stored[0]:
        if plane.dtype not in _DTYPES:
            names = [dtype.name for dtype in _DTYPES]
            raise ValueError(f"tables must be E4M3, or of one of {names}, got {plane.dtype}")
    if max(config.table_rows) > _MOST_ROWS:
        raise ValueError(
            f"tables must have at most {_MOST_ROWS} rows, by whose numbers programs find them, got "
            f"{max(config.table_rows)}; leave them to the host"
        )
    if not pinned:
        return
    for plane in (plane for planes in stored for plane in planes):
        if not plane.flags.c_contiguous:
            raise ValueError("tables must have rows that lie one after the other, got strided ones")


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
