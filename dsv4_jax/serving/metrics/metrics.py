"""Metrics: what an operator wants to know, as a plain object."""

from __future__ import annotations

import dataclasses
import functools
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, overload

import jax
import numpy as np

from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.pool_plan import PoolPlan
from dsv4_jax.cache.schema import FamilyKind
from dsv4_jax.serving.metrics.histogram import FINE_SECONDS, Histogram

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


@dataclasses.dataclass(frozen=True)
class About:
    """What a metric is, for all who show it; it stands beside the field's type.

    Attributes:
      kind: counters only rise; histograms are of seconds.
      told: what it counts.
      label: what the keys of a dict, or the places of a tuple, are; None is one number.
    """

    kind: Literal["counter", "gauge", "histogram"]
    told: str
    label: str | None = None


_counter = functools.partial(About, "counter")
_gauge = functools.partial(About, "gauge")
_histogram = functools.partial(About, "histogram")
_fine_histogram = functools.partial(Histogram, FINE_SECONDS)


@dataclasses.dataclass(frozen=True)
class ShardGauges:
    """What holds now on one data shard; fields as in `Gauges`."""

    running: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    used_bytes: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gauges:
    """What holds at one moment, computed when somebody reads it."""

    compiles: Annotated[int, _counter("programs compiled since the engine was built")] = 0
    running: Annotated[int, _gauge("requests in a slot")] = 0
    waiting: Annotated[int, _gauge("requests in the queue")] = 0
    free_blocks: Annotated[int, _gauge("blocks that hold nothing")] = 0
    cached_blocks: Annotated[int, _gauge("blocks that only cached prefixes hold")] = 0
    used_blocks: Annotated[int, _gauge("blocks of requests")] = 0
    used_bytes: Annotated[
        dict[str, int],
        _gauge("bytes in use by family: those of requests' blocks, slots and snapshots", "family"),
    ] = dataclasses.field(default_factory=dict)
    data_shards: Annotated[
        tuple[ShardGauges, ...],
        _gauge("what holds now on each data shard; one device is one shard", "data"),
    ] = ()

    @classmethod
    def of(
        cls, shards: Sequence[ShardGauges], *, compiles: int, running: int, waiting: int
    ) -> Gauges:
        """Sums over data shards, at least one, beside what is counted for all of them."""
        return cls(
            compiles=compiles,
            running=running,
            waiting=waiting,
            free_blocks=sum(shard.free_blocks for shard in shards),
            cached_blocks=sum(shard.cached_blocks for shard in shards),
            used_blocks=sum(shard.used_blocks for shard in shards),
            used_bytes={
                family: sum(shard.used_bytes[family] for shard in shards)
                for family in shards[0].used_bytes
            },
            data_shards=tuple(shards),
        )


class _Read[T]:
    """An attribute of `Metrics` that is the one of its name in `Gauges`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, metrics: None, owner: type) -> _Read[T]: ...

    @overload
    def __get__(self, metrics: Metrics, owner: type) -> T: ...

    def __get__(self, metrics: Metrics | None, owner: type) -> _Read[T] | T:
        return self if metrics is None else getattr(metrics.gauges, self._name)


@dataclasses.dataclass
class Metrics:
    """Counters since the engine was built, and what holds now.

    What holds is read from the engine whenever it is asked for, in a call too; `gauges` is all of
    it, of one moment. After a call that raised it is what the next one begins with: nothing runs.
    """

    submitted: Annotated[int, _counter("requests submitted")] = 0
    finished: Annotated[
        dict[str, int], _counter("requests that ended, by finish reason", "reason")
    ] = dataclasses.field(default_factory=dict)
    preempted: Annotated[int, _counter("times a running request gave its blocks back")] = 0
    steps: Annotated[int, _counter("steps run")] = 0
    step_calls: Annotated[
        int, _counter("launches that ran them; fewer where calls make several")
    ] = 0
    prompt_tokens: Annotated[int, _counter("tokens of prompts that were submitted")] = 0
    hit_tokens: Annotated[int, _counter("tokens that a prefix hit spared")] = 0
    rested_tokens: Annotated[
        int, _counter("tokens that the layers above the last entries did not run")
    ] = 0
    prefix_hits: Annotated[int, _counter("admissions with a hit")] = 0
    prefix_misses: Annotated[int, _counter("admissions without one")] = 0
    generated_tokens: Annotated[int, _counter("tokens drawn")] = 0
    drafted_tokens: Annotated[int, _counter("drafts checked")] = 0
    accepted_tokens: Annotated[int, _counter("drafts that were what was drawn")] = 0
    drafted_at: Annotated[
        dict[str, int], _counter("drafts checked, by their place after the last token", "depth")
    ] = dataclasses.field(default_factory=dict)
    accepted_at: Annotated[
        dict[str, int], _counter("drafts that were what was drawn, likewise", "depth")
    ] = dataclasses.field(default_factory=dict)
    evicted_blocks: Annotated[int, _counter("blocks of cached prefixes that gave way")] = 0
    snapshots: Annotated[int, _counter("snapshots kept")] = 0
    evicted_snapshots: Annotated[int, _counter("snapshots that gave way to others")] = 0
    host_hit_tokens: Annotated[
        int, _counter("tokens that prefixes from the host's memory spared")
    ] = 0
    host_stored_bytes: Annotated[int, _counter("bytes copied to the host's memory")] = 0
    host_loaded_bytes: Annotated[int, _counter("bytes copied back from it")] = 0
    host_evicted_bytes: Annotated[int, _counter("bytes that gave way there")] = 0
    host_lost_bytes: Annotated[
        int, _counter("bytes of known prefixes that gave way and could not be copied")
    ] = 0
    disk_hit_tokens: Annotated[int, _counter("tokens that prefixes from the disk spared")] = 0
    disk_stored_bytes: Annotated[int, _counter("bytes written to the disk")] = 0
    disk_loaded_bytes: Annotated[int, _counter("bytes read back from it")] = 0
    disk_evicted_bytes: Annotated[int, _counter("bytes that gave way there")] = 0
    damaged_pages: Annotated[
        int, _counter("blocks and snapshots that came back with a wrong checksum")
    ] = 0
    engram_rows: Annotated[int, _counter("rows of Engram tables that the host read for steps")] = 0
    engram_waits: Annotated[int, _counter("pages that it read from a disk for that")] = 0
    engram_s: Annotated[Histogram, _histogram("seconds that it took for a step")] = (
        dataclasses.field(default_factory=_fine_histogram)
    )
    host_wait_s: Annotated[
        Histogram, _histogram("seconds that a request waited for what lay on the host")
    ] = dataclasses.field(default_factory=_fine_histogram)
    queue_s: Annotated[Histogram, _histogram("seconds from submission to a slot")] = (
        dataclasses.field(default_factory=Histogram)
    )
    first_token_s: Annotated[
        Histogram, _histogram("seconds from submission to the first token")
    ] = dataclasses.field(default_factory=Histogram)
    token_s: Annotated[Histogram, _histogram("seconds between tokens after the first")] = (
        dataclasses.field(default_factory=_fine_histogram)
    )
    prompt_step_s: Annotated[
        Histogram, _histogram("seconds of a step with prompts, where the host saw all of it")
    ] = dataclasses.field(default_factory=_fine_histogram)
    predicted_s: Annotated[
        Histogram, _histogram("seconds that those steps were predicted to take")
    ] = dataclasses.field(default_factory=_fine_histogram)

    compiles = _Read[int]()
    running = _Read[int]()
    waiting = _Read[int]()
    free_blocks = _Read[int]()
    cached_blocks = _Read[int]()
    used_blocks = _Read[int]()
    used_bytes = _Read[dict[str, int]]()
    data_shards = _Read[tuple[ShardGauges, ...]]()

    def __post_init__(self) -> None:
        """Nothing holds until it watches an engine."""
        self._read: Callable[[], Callable[[], Gauges] | None] = lambda: Gauges

    def count_drafts(self, checked: np.ndarray, kept: np.ndarray) -> None:
        """Counts drafts, those checked and those kept: i32[n, m], of m steps of each row."""
        self.drafted_tokens += int(checked.sum())
        self.accepted_tokens += int(kept.sum())
        self.drafted_at = _with_depths(self.drafted_at, checked.ravel())
        self.accepted_at = _with_depths(self.accepted_at, kept.ravel())

    def watch(self, read: Callable[[], Gauges]) -> None:
        """What a method gives is what holds, as long as its object lives."""
        self._read = weakref.WeakMethod(read)  # type: ignore[arg-type]

    @property
    def gauges(self) -> Gauges:
        """What holds at this moment; nothing where the engine is gone."""
        return (self._read() or Gauges)()

    def __getstate__(self) -> dict[str, Any]:
        """A copy shows what held when it was made."""
        return vars(self) | {"_read": functools.partial(_constant, self.gauges)}

    @property
    def unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return self.submitted - sum(self.finished.values())

    @property
    def acceptance(self) -> float:
        """Share of drafts that were kept; 0 before any."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """Those of its attributes that are histograms."""
        return tuple(value for value in vars(self).values() if isinstance(value, Histogram))


def _with_depths(counts: Mapping[str, int], numbers: np.ndarray) -> dict[str, int]:
    """New counts, with i32[n] drafts of rows: one with d drafts has one at each of 1 to d.

    The old ones stay as they are, for a call that is taken back.
    """
    rows = np.bincount(numbers)[::-1].cumsum()[::-1][1:].tolist()
    found = dict(counts)
    for depth, count in enumerate(rows, 1):
        found[str(depth)] = found.get(str(depth), 0) + count
    return found


def _constant(gauges: Gauges) -> Callable[[], Gauges]:
    return lambda: gauges


METRICS: Mapping[str, About] = {
    field.name: typing.get_type_hints(of, include_extras=True)[field.name].__metadata__[0]
    for of in (Metrics, Gauges)
    for field in dataclasses.fields(of)
}
"""Every metric by name; each is an attribute of `Metrics`."""


class UnitBytes(NamedTuple):
    """Bytes of one block of a family of a cache's arrays, or of one slot, by its kind."""

    kind: FamilyKind
    num_bytes: int


def shard_gauges(manager: KVCacheManager, unit_bytes: Mapping[str, UnitBytes]) -> ShardGauges:
    """What a data shard's manager holds.

    Args:
      manager: who holds which slot and blocks.
      unit_bytes: by family, bytes of one block or one slot.
    """
    plan = manager.plan
    return _gauges(
        plan,
        unit_bytes,
        running=plan.max_requests - manager.num_free_slots,
        used_blocks=plan.num_blocks - manager.num_free_blocks,
        cached_blocks=manager.num_cached_blocks,
        snapshots=manager.prefixes.tree.num_held_snapshots,
    )


def idle_gauges(plan: PoolPlan, unit_bytes: Mapping[str, UnitBytes]) -> ShardGauges:
    """The same of a shard that holds nothing."""
    return _gauges(plan, unit_bytes, running=0, used_blocks=0, cached_blocks=0, snapshots=0)


def _gauges(
    plan: PoolPlan,
    unit_bytes: Mapping[str, UnitBytes],
    *,
    running: int,
    used_blocks: int,
    cached_blocks: int,
    snapshots: int,
) -> ShardGauges:
    used_bytes = {
        family: unit.num_bytes * (used_blocks if unit.kind.is_paged else running)
        for family, unit in unit_bytes.items()
    }
    return ShardGauges(
        running=running,
        free_blocks=plan.num_blocks - used_blocks - cached_blocks,
        cached_blocks=cached_blocks,
        used_blocks=used_blocks,
        used_bytes=used_bytes | {"snapshots": snapshots * plan.bytes_per_snapshot},
    )
