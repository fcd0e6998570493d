"""What requests with penalties have drawn, counted for the device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np

from dsv4_jax.serving.requests.request import Request
from dsv4_jax.step.draws import DrawnCounts


class CountKeeper:
    """Counts what each request with penalties has drawn, a token at a time.

    The entries of all requests have to fit into arrays of one size, since another would be another
    program. Where they do not, the youngest sit steps out until others have ended; one request
    always fits. A request that is computed again, or forked, is counted again from its tokens.
    """

    def __init__(self, num_entries: int, *, slots: int, shards: int = 1) -> None:
        """Counts nothing yet.

        Args:
          num_entries: E on each data shard, at least the different tokens that one request can
            draw.
          slots: slots of a data shard, which are its rows.
          shards: data shards.
        """
        self._num_entries = num_entries
        self._slots = slots
        self._shards = shards
        self._tallies: weakref.WeakKeyDictionary[Request, _Tally] = weakref.WeakKeyDictionary()

    def fitting(self, running: Mapping[int, Request]) -> dict[int, Request]:
        """Requests by slot, but for the youngest whose counts find no room beside the others."""
        counted = [one for one in running.values() if one.sampling.penalises and one.num_drawn]
        used, served = [0] * self._shards, dict(running)
        for request in sorted(counted, key=lambda one: one.request_id):
            size, shard = self._tally(request).size, request.slot // self._slots
            if self._has_room(used[shard] + size):
                used[shard] += size
            else:
                del served[request.slot]
        return served

    def counts_of(self, running: Mapping[int, Request]) -> DrawnCounts | None:
        """Entries of requests by slot, one data shard after the other; None if there are none."""
        counted = {
            slot: self._tally(request)
            for slot, request in running.items()
            if request.sampling.penalises and request.num_drawn
        }
        if not counted:
            return None
        rows, token_ids, counts = self._arrays()
        starts = [shard * self._num_entries for shard in range(self._shards)]
        for slot, tally in counted.items():
            shard, row = divmod(slot, self._slots)
            part = slice(starts[shard], starts[shard] + tally.size)
            rows[part] = row
            token_ids[part] = tally.token_ids[: tally.size]
            counts[part] = tally.counts[: tally.size]
            starts[shard] += tally.size
        return DrawnCounts(rows=rows, token_ids=token_ids, counts=counts)  # type: ignore[arg-type]

    def no_entries(self) -> DrawnCounts:
        """E entries of nobody for each data shard, in NumPy."""
        rows, token_ids, counts = self._arrays()
        return DrawnCounts(rows=rows, token_ids=token_ids, counts=counts)  # type: ignore[arg-type]

    def _arrays(self) -> np.ndarray:
        """i32[3, shards * E]: rows, which are -1, token ids and counts."""
        arrays = np.zeros((3, self._shards * self._num_entries), np.int32)
        arrays[0] = -1
        return arrays

    def _has_room(self, num_entries: int) -> bool:
        return num_entries <= self._num_entries

    def _tally(self, request: Request) -> _Tally:
        tally = self._tallies.get(request)
        if tally is None or tally.num_counted > request.num_drawn:
            tally = self._tallies[request] = _Tally()
        tally.count(request.known[request.prompt_tokens + tally.num_counted :])
        return tally


class _Tally:
    """What one request has drawn: entries 0 to `size` of its arrays."""

    def __init__(self) -> None:
        self.token_ids = np.zeros(64, np.int32)
        self.counts = np.zeros(64, np.int32)
        self.num_counted = 0
        self._places: dict[int, int] = {}

    @property
    def size(self) -> int:
        return len(self._places)

    def count(self, drawn: np.ndarray) -> None:
        """Counts tokens i32[n] that follow those counted."""
        for token in drawn.tolist():
            index = self._places.setdefault(token, self.size)
            if index == len(self.counts):
                self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.token_ids[index] = token
            self.counts[index] += 1
            self.num_counted += 1
