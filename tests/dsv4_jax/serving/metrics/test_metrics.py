"""What an operator sees: counters that add up, and the same through Prometheus."""

import dataclasses
import functools
import importlib

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import dsv4_jax as ds
from dsv4_jax.serving.metrics import prometheus
from helpers.serving import make_engine, prompt, run_to_end


@functools.cache
def served():
    """Made inside a test: what a fixture of a module compiles, a test would compile again."""
    engine, rng = make_engine(), np.random.default_rng(0)
    head = prompt(rng, 130)
    for _ in range(2):
        ids = [engine.submit(head + prompt(rng, 5), max_new_tokens=9, stop_token_ids=())
               for _ in range(3)]  # fmt: skip
        engine.step()
        engine.preempt(ids[0])
        run_to_end(engine, *ids)
    engine.cancel(engine.submit(head, max_new_tokens=5))
    return engine


@pytest.fixture
def engine():
    return served()


def test_counters_add_up(engine):
    metrics = engine.metrics
    assert metrics.submitted == sum(metrics.finished.values()) == 7
    assert metrics.finished == {"length": 6, "cancelled": 1}
    assert metrics.generated_tokens == 6 * 9
    assert metrics.prompt_tokens == 6 * 135 + 130
    assert metrics.preempted == 2
    assert metrics.prefix_hits + metrics.prefix_misses == 6 + 2  # preempted ones twice
    assert metrics.hit_tokens == 128 * metrics.prefix_hits > 0
    assert metrics.first_token_s.count == metrics.queue_s.count == 6
    assert metrics.token_s.count == 6 * 8
    assert metrics.steps >= 2 * (135 // 24)
    assert 0 <= metrics.accepted_tokens <= metrics.drafted_tokens
    assert metrics.acceptance == metrics.accepted_tokens / metrics.drafted_tokens
    assert metrics.used_blocks == 0
    assert metrics.free_blocks + metrics.cached_blocks == engine._plan.pools.num_blocks


def test_bytes_are_those_of_the_arrays(engine):
    request = engine.submit([1, 2, 3], max_new_tokens=4)
    engine.step()
    used, plan = engine.metrics.used_bytes, engine._plan.pools
    cache = engine.cache
    entries = sum(leaf.nbytes for leaf in cache.paged["csa"].entries.values())
    assert used["csa entries"] * plan.num_blocks == entries
    window = sum(leaf.nbytes for leaf in cache.state["swa"].window.values())
    assert used["swa window"] * plan.max_requests == window
    engine.cancel(request)
    used = engine.metrics.used_bytes
    assert used.pop("snapshots") == plan.bytes_per_snapshot * engine.metrics.snapshots
    assert not any(used.values())


def test_prometheus_says_the_same(engine):
    registry = CollectorRegistry()
    registry.register(ds.serving.MetricsCollector(engine.metrics))
    text = generate_latest(registry).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, *sample.labels.values()] = sample.value
    metrics = engine.metrics
    assert samples["dsv4_generated_tokens_total",] == metrics.generated_tokens
    assert samples["dsv4_finished_total", "length"] == 6
    assert samples["dsv4_cached_blocks",] == metrics.cached_blocks
    assert samples["dsv4_used_bytes", "csa entries"] == metrics.used_bytes["csa entries"]
    assert samples["dsv4_data_shards_cached_blocks", "0"] == metrics.cached_blocks
    bytes_used = samples["dsv4_data_shards_used_bytes", "0", "csa entries"]
    assert bytes_used == metrics.used_bytes["csa entries"]
    assert samples["dsv4_first_token_seconds_count",] == metrics.first_token_s.count
    assert samples["dsv4_first_token_seconds_sum",] == pytest.approx(metrics.first_token_s.total)
    assert samples["dsv4_first_token_seconds_bucket", "+Inf"] == metrics.first_token_s.count
    assert "# HELP dsv4_evicted_blocks_total blocks of cached prefixes that gave way\n" in text
    names = {name for name, *_ in samples}
    for field in dataclasses.fields(metrics):
        assert any(field.name.removesuffix("_s") in name for name in names), field.name


def test_a_histogram_counts_and_estimates_quantiles():
    """By interpolation within a bucket, never beyond what was seen; never far from numpy's."""
    histogram = ds.serving.Histogram(bounds=(1.0, 2.0, 4.0))
    assert np.isnan(histogram.quantile(0.5))
    for value in (0.5, 1.0, 1.5, 3.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert (histogram.count, histogram.total) == (5, 15.0)
    assert [histogram.quantile(q) for q in (0, 0.2, 0.5, 0.7, 0.9, 1)] == [
        0.5, 0.75, 1.5, 3.0, 6.5, 9.0,
    ]  # fmt: skip
    values = np.random.default_rng(0).uniform(0.2, 3.7, 1000)
    histogram = ds.serving.Histogram(bounds=(1.0, 2.0, 4.0))
    for value in values:
        histogram.add(value)
    shares = np.linspace(0, 1, 41)
    found = [histogram.quantile(share) for share in shares]
    assert np.abs(found - np.quantile(values, shares)).max() < 0.1
    assert ds.serving.Histogram(bounds=(1.0, 2.0), counts=[0, 0, 3]).quantile(0.5) == 2.0


def test_prometheus_has_a_text_for_every_metric_without_docstrings(monkeypatch):
    """`python -OO` drops docstrings; what is shown must not come from them."""
    monkeypatch.setattr(ds.serving.Metrics, "__doc__", None)
    module = importlib.reload(prometheus)
    texts = {
        m.name: m.documentation for m in module.MetricsCollector(ds.serving.Metrics()).collect()
    }
    assert texts["dsv4_evicted_blocks"] == "blocks of cached prefixes that gave way"
    assert all(" " in text and text not in name for name, text in texts.items())
