"""PageOwners: which devices, and so which processes, have the rows of a block or a snapshot.

Rows are numbered through all data shards, as the second axis of the pools is. All devices of a data
shard have the same ones, but for the blocks of a cache that is split: of these each has a part.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh


class PageOwners:
    """Arithmetic of one engine's pools on a mesh."""

    def __init__(self, mesh: Mesh, num_rows: Mapping[str, int], *, splits_blocks: bool) -> None:
        """For pools of so many rows.

        Args:
          mesh: with the axes `data` and `model`.
          num_rows: of "blocks" and of "snapshots", of all data shards.
          splits_blocks: blocks are dealt over the devices of a data shard.
        """
        self.processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
        self._num_rows, self._splits_blocks = dict(num_rows), splits_blocks

    def is_split(self, of: str) -> bool:
        """Whether each device of a data shard has rows of its own."""
        return self._splits_blocks and of == "blocks"

    def shard_of(self, of: str, rows: np.ndarray) -> np.ndarray:
        """Of rows i32[n] the data shard; of -1 it is arbitrary."""
        return rows // (self._num_rows[of] // self.processes.shape[0])

    def deal(self, of: str, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """For each device of a data shard, which of the rows i32[n] it has: ascending places."""
        everything, (data, model) = np.arange(len(rows)), self.processes.shape
        if not self.is_split(of):
            return (everything,) * model
        owners = rows // (self._num_rows[of] // (data * model)) % model
        return tuple(everything[owners == place] for place in range(model))

    def own(self, of: str, rows: np.ndarray, data: int, model: int) -> np.ndarray:
        """Rows i32[n] as they are numbered on a device; -1 for those that it lacks."""
        shards, places = self.processes.shape
        count = self._num_rows[of] // (shards * places if self.is_split(of) else shards)
        first = (data * places + model if self.is_split(of) else data) * count
        is_there = (rows >= first) & (rows < first + count)
        return np.where(is_there, rows - first, -1).astype(np.int32)

    def bytes_at(self, of: str, rows: np.ndarray, row_bytes: int) -> tuple[int, ...]:
        """What each process keeps of rows of one data shard, which all of them keep once."""
        (shard,) = set(self.shard_of(of, rows).tolist())
        counts = [len(dealt) for dealt in self.deal(of, rows)]
        found = [0] * (int(self.processes.max()) + 1)
        for place, process in enumerate(self.processes[shard].tolist()):
            more = found[process] + counts[place] if self.is_split(of) else len(rows)
            found[process] = more
        return tuple(count * row_bytes for count in found)
