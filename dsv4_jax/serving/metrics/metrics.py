"""Metrics: what an operator wants to know, as a plain object."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import numpy as np

from dsv4_jax import checks
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.cache.schema import FamilyKind

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histograms, in seconds."""

_compiles = [0]


def count_compiles() -> int:
    """Programs that this process has compiled since the first call."""
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_on_event)
        _listening.append(True)
    return _compiles[0]


_listening: list[bool] = []


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    _compiles[0] += event == "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Histogram:
    """Counts of values by size.

    Attributes:
      bounds: upper bounds, ascending; a last bucket takes what is above.
      counts: values in each bucket.
      total: sum of all values.
      least: the smallest value that was added.
      most: the largest one.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = dataclasses.field(default_factory=list)
    total: float = 0.0
    least: float = dataclasses.field(default=math.inf, init=False)
    most: float = dataclasses.field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        """One bucket more than bounds."""
        given, least = self.bounds, -checks.FLOAT32_MAX
        bounds = checks.sequence("bounds", given, of="numbers", limit=1000)
        self.bounds = tuple(checks.number("bounds", one, least) for one in bounds)
        if not self.bounds or list(self.bounds) != sorted(set(self.bounds)):
            checks.refuse("bounds", "ascending numbers", given)
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        if self.count:
            self.least, self.most = min(0.0, self.bounds[0]), self.bounds[-1]

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Counts a value; `counts` is a new list then."""
        value = checks.number("value", value, -checks.FLOAT32_MAX)
        counts = list(self.counts)
        counts[bisect.bisect_left(self.bounds, value)] += 1
        self.counts = counts
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)

    def quantile(self, share: float) -> float:
        """An estimate of the value that this share of values is at or below.

        The bucket of that value is known, and its place there is not: values are taken to lie
        evenly between the bucket's bounds, and within `least` and `most`.

        Args:
          share: 0 to 1.

        Returns:
          The estimate; NaN before any value.

        Raises:
          ValueError: the share is out of range.
        """
        rank, seen = checks.number("share", share, 0, 1, rule="0 to 1") * self.count, 0
        lows, highs = (-math.inf, *self.bounds), (*self.bounds, math.inf)
        for low, high, count in zip(lows, highs, self.counts, strict=True):
            if count and seen + count >= rank:
                low, high = max(low, self.least), min(high, self.most)
                return low + (high - low) * (rank - seen) / count
            seen += count
        return math.nan


def add_values(histogram: Histogram, values: np.ndarray, times: np.ndarray) -> None:
    """`Histogram.add` of finite values f64[n], each so many times i64[n], at least once."""
    if not len(values):
        return
    places = np.searchsorted(np.array(histogram.bounds), values)
    added = np.bincount(places, weights=times, minlength=len(histogram.counts)).tolist()
    histogram.counts = [old + int(n) for old, n in zip(histogram.counts, added, strict=True)]
    histogram.total += float(values @ times)
    histogram.least = min(histogram.least, float(values.min()))
    histogram.most = max(histogram.most, float(values.max()))


@dataclasses.dataclass(frozen=True)
class ShardGauges:
    """What holds now on one data shard; fields as in `Metrics`."""

    running: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    used_bytes: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Metrics:
    """Counters since the engine was built, and what holds now.

    Beside each type stands what the field is, which Prometheus shows too.
    """

    submitted: Annotated[int, "requests submitted"] = 0
    finished: Annotated[dict[str, int], "requests that ended, by finish reason"] = (
        dataclasses.field(default_factory=dict)
    )
    preempted: Annotated[int, "times a running request gave its blocks back"] = 0
    steps: Annotated[int, "steps run"] = 0
    step_calls: Annotated[int, "launches that ran them; fewer where calls make several"] = 0
    prompt_tokens: Annotated[int, "tokens of prompts that were submitted"] = 0
    hit_tokens: Annotated[int, "tokens that a prefix hit spared"] = 0
    prefix_hits: Annotated[int, "admissions with a hit"] = 0
    prefix_misses: Annotated[int, "admissions without one"] = 0
    generated_tokens: Annotated[int, "tokens drawn"] = 0
    drafted_tokens: Annotated[int, "drafts checked"] = 0
    accepted_tokens: Annotated[int, "drafts that were what was drawn"] = 0
    evicted_blocks: Annotated[int, "blocks of cached prefixes that gave way"] = 0
    snapshots: Annotated[int, "snapshots kept"] = 0
    evicted_snapshots: Annotated[int, "snapshots that gave way to others"] = 0
    compiles: Annotated[int, "programs compiled since the engine was built"] = 0
    running: Annotated[int, "requests in a slot"] = 0
    waiting: Annotated[int, "requests in the queue"] = 0
    free_blocks: Annotated[int, "blocks that hold nothing"] = 0
    cached_blocks: Annotated[int, "blocks that only cached prefixes hold"] = 0
    used_blocks: Annotated[int, "blocks of requests"] = 0
    used_bytes: Annotated[
        dict[str, int], "bytes in use by family: those of requests' blocks, slots and snapshots"
    ] = dataclasses.field(default_factory=dict)
    data_shards: Annotated[
        tuple[ShardGauges, ...], "what holds now on each data shard; one device is one shard"
    ] = ()
    queue_s: Annotated[Histogram, "seconds from submission to a slot"] = dataclasses.field(
        default_factory=Histogram
    )
    first_token_s: Annotated[Histogram, "seconds from submission to the first token"] = (
        dataclasses.field(default_factory=Histogram)
    )
    token_s: Annotated[Histogram, "seconds between tokens after the first"] = dataclasses.field(
        default_factory=Histogram
    )

    @property
    def acceptance(self) -> float:
        """Share of drafts that were kept; 0 before any."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """Those of its attributes that are histograms."""
        return tuple(value for value in vars(self).values() if isinstance(value, Histogram))

    def count_cache(
        self, managers: Sequence[KVCacheManager], unit_bytes: dict[str, UnitBytes]
    ) -> None:
        """Brings the gauges of the cache up to date.

        Args:
          managers: who holds which slot and blocks, of each data shard.
          unit_bytes: by family, bytes of one block or one slot.
        """
        self.data_shards = tuple(_gauges(manager, unit_bytes) for manager in managers)
        for name in ("cached_blocks", "free_blocks", "used_blocks"):
            setattr(self, name, sum(getattr(shard, name) for shard in self.data_shards))
        self.used_bytes = {
            family: sum(shard.used_bytes[family] for shard in self.data_shards)
            for family in self.data_shards[0].used_bytes
        }


class UnitBytes(NamedTuple):
    """Bytes of one block of a family of a cache's arrays, or of one slot, by its kind."""

    kind: FamilyKind
    num_bytes: int


def _gauges(manager: KVCacheManager, unit_bytes: dict[str, UnitBytes]) -> ShardGauges:
    plan = manager.plan
    running = plan.max_requests - manager.num_free_slots
    used_blocks = plan.num_blocks - manager.num_free_blocks
    used_bytes = {
        family: unit.num_bytes * (used_blocks if unit.kind.is_paged else running)
        for family, unit in unit_bytes.items()
    }
    return ShardGauges(
        running=running,
        free_blocks=manager.num_free_blocks - manager.num_cached_blocks,
        cached_blocks=manager.num_cached_blocks,
        used_blocks=used_blocks,
        used_bytes=used_bytes
        | {"snapshots": manager.prefixes.tree.num_held_snapshots * plan.bytes_per_snapshot},
    )
