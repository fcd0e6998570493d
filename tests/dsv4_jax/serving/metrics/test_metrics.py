"""What an operator sees: counters that add up, and the same through Prometheus."""

import copy
import dataclasses
import functools
import importlib
import pickle
import weakref

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import dsv4_jax as ds
from dsv4_jax.serving import Histogram
from dsv4_jax.serving.engine_state import read_state
from dsv4_jax.serving.metrics import prometheus
from dsv4_jax.serving.metrics.metrics import METRICS, Gauges, Metrics
from dsv4_jax.serving.requests.calls import UndoLog
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
    assert metrics.free_blocks + metrics.cached_blocks == engine.plan.pools.num_blocks


def test_bytes_are_those_of_the_arrays(engine):
    request = engine.submit([1, 2, 3], max_new_tokens=4)
    engine.step()
    used, plan = engine.metrics.used_bytes, engine.plan.pools
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
    for metric in METRICS:
        assert any(metric.removesuffix("_s") in name for name in names) or (
            f"# HELP dsv4_{metric}_total" in text
        ), metric  # drafts by depth: there were none


def test_every_metric_is_told_once_and_read_by_its_name(engine):
    """A field of `Gauges` without an attribute of `Metrics`, or the reverse, would be missing."""
    metrics = engine.metrics
    for of in (Metrics, Gauges):
        assert {field.name for field in dataclasses.fields(of)} < METRICS.keys()
    for name, about in METRICS.items():
        value = getattr(metrics, name)
        assert isinstance(value, Histogram) == (about.kind == "histogram"), name
        assert isinstance(value, int) == (about.kind != "histogram" and about.label is None), name
    for field in dataclasses.fields(Gauges):
        assert getattr(metrics, field.name) == getattr(metrics.gauges, field.name)
    state = read_state(engine)
    numbers = {name for name, value in vars(metrics).items() if isinstance(value, int)}
    assert numbers < state["counters"].keys()
    kinds = {name: about.kind for name, about in METRICS.items()}
    collected = {one.name: one.type for one in prometheus.MetricsCollector(metrics).collect()}
    assert {collected[f"dsv4_{name}"] for name in kinds if kinds[name] == "counter"} == {"counter"}
    assert collected["dsv4_running"] == collected["dsv4_used_bytes"] == "gauge"


def test_gauges_are_of_the_moment_they_are_read_at(monkeypatch):
    """In a call too; a copy stays as it was."""
    engine = make_engine()
    metrics, seen = engine.metrics, []
    copied = copy.deepcopy(metrics)
    request = engine.submit([1, 2, 3], max_new_tokens=4)
    assert (metrics.running, metrics.waiting, engine.num_unfinished) == (0, 1, 1)
    devices = engine.loop.runner.devices

    def launch(*arguments, plain=devices.launch, **options):
        seen.append((metrics.running, metrics.waiting, engine.num_unfinished))
        plain(*arguments, **options)

    monkeypatch.setattr(devices, "launch", launch)
    engine.step()
    assert seen[0] == (1, 0, 1)
    assert metrics.used_blocks == metrics.data_shards[0].used_blocks > 0
    held = pickle.loads(pickle.dumps(metrics))
    engine.cancel(request)
    assert (metrics.running, metrics.used_blocks, engine.num_unfinished) == (0, 0, 0)
    assert (held.running, held.used_blocks > 0, copied.running, copied.waiting) == (1, True, 0, 0)


def test_metrics_outlive_their_engine():
    engine = make_engine()
    engine.submit([1, 2, 3], max_new_tokens=4)
    metrics, itself = engine.metrics, weakref.ref(engine)
    assert metrics.waiting == 1
    del engine
    assert itself() is None  # they do not keep its arrays
    assert (metrics.submitted, metrics.gauges) == (1, Gauges())


def test_after_a_call_that_raised_nothing_is_held_and_all_wait():
    """As the next call finds it, which computes everything again."""
    engine = make_engine()
    engine.submit([1, 2, 3], max_new_tokens=4)
    engine.step()
    launch = engine.loop.runner.devices.launch
    engine.loop.runner.devices.launch = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    metrics = engine.metrics
    assert (metrics.running, metrics.waiting, metrics.used_blocks) == (0, 1, 0)
    assert metrics.free_blocks == engine.plan.pools.num_blocks
    assert not any(metrics.used_bytes.values())
    engine.loop.runner.devices.launch = launch
    engine.step()
    assert (metrics.running, metrics.waiting) == (1, 0)


def test_the_first_value_of_a_change_that_is_taken_back_leaves_nothing():
    histogram, plain = ds.serving.Histogram(), ds.serving.Histogram()
    undo = UndoLog(histogram)
    with undo:
        histogram.add(0.5)
        undo.roll_back()
    assert vars(histogram) == vars(plain)


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
