"""MetricsCollector: an engine's `Metrics` for Prometheus to scrape."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dsv4_jax import checks
from dsv4_jax.serving.metrics.metrics import Histogram, Metrics, ShardGauges

_GAUGES = ("running", "waiting", "free_blocks", "cached_blocks", "used_blocks")


class MetricsCollector(Collector):
    """Reads a `Metrics` when Prometheus scrapes: `REGISTRY.register(MetricsCollector(...))`."""

    def __init__(self, metrics: Metrics, prefix: str = "dsv4") -> None:
        """Collects from one engine's metrics.

        Args:
          metrics: metrics of the engine.
          prefix: first part of every name.

        Raises:
          ValueError: an argument is of another type, or the prefix no name for Prometheus.
        """
        self._metrics = checks.instance("metrics", metrics, Metrics)
        self._prefix = checks.text("prefix", prefix, max_chars=200)
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", self._prefix):
            checks.refuse("prefix", "letters, digits, _ and :, no digit first", prefix)

    def collect(self) -> Iterator[Metric]:
        """One family per attribute."""
        told_by_field = typing.get_type_hints(Metrics, include_extras=True)
        for field in dataclasses.fields(self._metrics):
            name, value = f"{self._prefix}_{field.name}", getattr(self._metrics, field.name)
            told = told_by_field[field.name].__metadata__[0]
            if isinstance(value, Histogram):
                seen, buckets = 0, []
                for bound, count in zip((*value.bounds, "+Inf"), value.counts, strict=True):
                    seen += count
                    buckets.append((str(bound), seen))
                name = name.removesuffix("_s") + "_seconds"
                yield HistogramMetricFamily(name, told, buckets, value.total)
            elif field.name == "data_shards":
                yield from _shard_families(name, value)
            elif isinstance(value, dict):
                label = "reason" if field.name == "finished" else "family"
                family = CounterMetricFamily if field.name == "finished" else GaugeMetricFamily
                metric = family(name, told, labels=[label])
                for key, count in value.items():
                    metric.add_metric([key], count)
                yield metric
            elif field.name in _GAUGES:
                yield GaugeMetricFamily(name, told, value)
            else:
                yield CounterMetricFamily(name, told, value)


def _shard_families(prefix: str, shards: tuple[ShardGauges, ...]) -> Iterator[Metric]:
    """Gauges of each data shard, by its number; bytes by family too."""
    told_by_field = typing.get_type_hints(Metrics, include_extras=True)
    for field in dataclasses.fields(ShardGauges):
        by_family = ["family"] if field.name == "used_bytes" else []
        told = f"on a data shard, {told_by_field[field.name].__metadata__[0]}"
        name = f"{prefix}_{field.name}"
        metric = GaugeMetricFamily(name, told, labels=["data", *by_family])
        for number, shard in enumerate(shards):
            value = getattr(shard, field.name)
            for key, count in value.items() if by_family else [("", value)]:
                metric.add_metric([str(number), *([key] if by_family else [])], count)
        yield metric
