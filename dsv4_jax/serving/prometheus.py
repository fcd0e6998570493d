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
from dsv4_jax.serving.metrics import Histogram, Metrics

_HELP = dict(re.findall(r"^ {6}(\w+): (.+)\.$", Metrics.__doc__ or "", re.MULTILINE))
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
        for field in dataclasses.fields(self._metrics):
            name, value = f"{self._prefix}_{field.name}", getattr(self._metrics, field.name)
            told = _HELP.get(field.name, field.name)
            if isinstance(value, Histogram):
                seen, buckets = 0, []
                for bound, count in zip((*value.bounds, "+Inf"), value.counts, strict=True):
                    seen += count
                    buckets.append((str(bound), seen))
                name = name.removesuffix("_s") + "_seconds"
                yield HistogramMetricFamily(name, told, buckets, value.total)
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
