"""MetricsCollector: an engine's `Metrics` for Prometheus to scrape."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dsv4_jax import checks
from dsv4_jax.serving.metrics.histogram import Histogram
from dsv4_jax.serving.metrics.metrics import METRICS, About, Metrics, ShardGauges


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
        """One family per metric; gauges are all of one moment."""
        gauges = self._metrics.gauges
        for name, about in METRICS.items():
            value = getattr(gauges if hasattr(gauges, name) else self._metrics, name)
            if about.kind == "histogram":
                yield _histogram(f"{self._prefix}_{name}", about, value)
            elif about.label == "data":
                yield from _shard_families(f"{self._prefix}_{name}", value)
            else:
                family = CounterMetricFamily if about.kind == "counter" else GaugeMetricFamily
                labels = [] if about.label is None else [about.label]
                metric = family(f"{self._prefix}_{name}", about.told, labels=labels)
                for key, count in value.items() if labels else [("", value)]:
                    metric.add_metric([key] if labels else [], count)
                yield metric


def _histogram(name: str, about: About, value: Histogram) -> HistogramMetricFamily:
    seen, buckets = 0, []
    for bound, count in zip((*value.bounds, "+Inf"), value.counts, strict=True):
        seen += count
        buckets.append((str(bound), seen))
    return HistogramMetricFamily(
        name.removesuffix("_s") + "_seconds", about.told, buckets, value.total
    )


def _shard_families(prefix: str, shards: tuple[ShardGauges, ...]) -> Iterator[Metric]:
    """Gauges of each data shard, by its number; bytes by family too."""
    for field in dataclasses.fields(ShardGauges):
        about = METRICS[field.name]
        by_family = [] if about.label is None else [about.label]
        told = f"on a data shard, {about.told}"
        metric = GaugeMetricFamily(f"{prefix}_{field.name}", told, labels=["data", *by_family])
        for number, shard in enumerate(shards):
            value = getattr(shard, field.name)
            for key, count in value.items() if by_family else [("", value)]:
                metric.add_metric([str(number), *([key] if by_family else [])], count)
        yield metric
