"""Metrics: what an operator wants to know, as a plain object."""

from __future__ import annotations

import bisect
import dataclasses

import jax

from dsv4_jax import checks
from dsv4_jax.allocator.manager import KVCacheManager

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
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = dataclasses.field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        """One bucket more than bounds."""
        given, least = self.bounds, -checks.FLOAT32_MAX
        bounds = checks.sequence("bounds", given, of="numbers", limit=1000)
        self.bounds = tuple(checks.number("bounds", one, least) for one in bounds)
        if not self.bounds or list(self.bounds) != sorted(set(self.bounds)):
            checks.refuse("bounds", "ascending numbers", given)
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

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

    def quantile(self, share: float) -> float:
        """The bound that this share of values is at or below; infinity above the last bound."""
        share = checks.number("share", share, 0, 1, rule="0 to 1")
        needed, seen = share * self.count, 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            if seen >= needed:
                return bound
        return float("inf")


@dataclasses.dataclass
class Metrics:
    """Counters since the engine was built, and what holds now.

    Attributes:
      submitted: requests submitted.
      finished: requests that ended, by finish reason.
      preempted: times a running request gave its blocks back.
      steps: steps run.
      prompt_tokens: tokens of prompts that were submitted.
      hit_tokens: tokens that a prefix hit spared.
      prefix_hits: admissions with a hit.
      prefix_misses: admissions without one.
      generated_tokens: tokens drawn.
      drafted_tokens: drafts checked.
      accepted_tokens: drafts that were what was drawn.
      evicted_blocks: blocks of cached prefixes that gave way.
      snapshots: snapshots kept.
      evicted_snapshots: snapshots that gave way to others.
      compiles: programs compiled since the engine was built.
      running: requests in a slot.
      waiting: requests in the queue.
      free_blocks: blocks that hold nothing.
      cached_blocks: blocks that only cached prefixes hold.
      used_blocks: blocks of requests.
      used_bytes: bytes in use by family: those of requests' blocks, slots and snapshots.
      queue_s: seconds from submission to a slot.
      first_token_s: seconds from submission to the first token.
      token_s: seconds between tokens after the first.
    """

    submitted: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    preempted: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    evicted_blocks: int = 0
    snapshots: int = 0
    evicted_snapshots: int = 0
    compiles: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    used_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    queue_s: Histogram = dataclasses.field(default_factory=Histogram)
    first_token_s: Histogram = dataclasses.field(default_factory=Histogram)
    token_s: Histogram = dataclasses.field(default_factory=Histogram)

    @property
    def acceptance(self) -> float:
        """Share of drafts that were kept; 0 before any."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """Those of its attributes that are histograms."""
        return tuple(value for value in vars(self).values() if isinstance(value, Histogram))

    def count_cache(self, manager: KVCacheManager, unit_bytes: dict[str, int]) -> None:
        """Brings the gauges of the cache up to date.

        Args:
          manager: who holds which slot and blocks.
          unit_bytes: by family, bytes of one block or one slot.
        """
        plan = manager.plan
        self.cached_blocks = manager.num_cached_blocks
        self.free_blocks = manager.num_free_blocks - manager.num_cached_blocks
        self.used_blocks = plan.num_blocks - manager.num_free_blocks
        self.used_bytes = {
            family: used * (self.used_blocks if is_paged(family) else self.running)
            for family, used in unit_bytes.items()
        } | {"snapshots": manager.prefixes.num_held_snapshots * plan.bytes_per_snapshot}


def is_paged(family: str) -> bool:
    """Whether a family of arrays grows by block; others are there once for every slot."""
    return family.endswith(("entries", "keys"))
