"""Benchmarks of prefixes that lie elsewhere, at sizes for a CPU: they compare what they say."""

import pytest

import dsv4_jax as ds
from benchmarks import bench_agents
from benchmarks import bench_prefix_traffic as traffic
from helpers.serving import one_layer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return one_layer(num_mtp_layers=0)


@pytest.fixture(autouse=True)
def compile_as_needed(monkeypatch):
    """A warm-up compiles all that a server may need."""
    monkeypatch.setattr(ds.Engine, "warmup", lambda engine: iter(()))


def test_requests_run_on_while_prefixes_come_and_go(model):
    """In windows of each kind the bytes move that its name says, and nothing is lost."""
    args = traffic.Args(
        tokens=1024, answer=4000, seconds=0.4, warm_seconds=0.1, rounds=1, host_cache="64MiB"
    )
    engine = traffic.build(*model, args, 2)
    rows = traffic.run(engine, args, 2)
    quiet, back, both = (rows[kind] for kind in traffic.KINDS)
    for row in rows.values():
        assert min(row["tokens_s"], row["of_quiet"]) > 0
    assert (quiet["back_gb_s"], quiet["prefixes"]) == (0, 0)
    # What leaves is on the host, but for blocks of requests that have ended.
    assert quiet["there_gb_s"] < 0.5 * both["there_gb_s"]
    assert back["prefixes"] > 0
    assert back["there_gb_s"] < 0.5 * back["back_gb_s"]
    assert min(both["there_gb_s"], both["back_gb_s"], both["prefixes"]) > 0
    metrics = engine.metrics
    assert metrics.host_lost_bytes == metrics.preempted == metrics.damaged_pages == 0
    traffic.evict(engine)  # what the benchmark made holds rows that nobody wrote
    assert not engine.verify().problems


def test_no_more_bytes_move_than_were_asked_for(model):
    """Prefixes that have begun come; no other follows them."""
    args = traffic.Args(
        tokens=1024, answer=4000, seconds=0.4, warm_seconds=0.1, rounds=1, host_cache="64MiB",
        gb_s=1e-9,
    )  # fmt: skip
    rows = traffic.run(traffic.build(*model, args, 2), args, 2)
    quiet, *moving = (rows[kind]["prefixes"] for kind in traffic.KINDS)
    assert quiet == 0
    assert all(1 <= count <= args.asked for count in moving)


def test_agents_that_come_back_find_their_conversations_on_the_host(model):
    """Both engines are asked the same, and one of them computes it again."""
    command = "--returns --agents 6 --groups 2 --turns 2 --turn-tokens 60 --own-tokens 300 400"
    command += " --concurrent 2 --snapshots 16 --prefill-tokens 64"
    rows = bench_agents.compare(*model, bench_agents.read_args(command.split()))
    far, near = rows["later, host"], rows["later, the device alone"]
    assert far["asked_tokens"] == near["asked_tokens"] > 6 * 500
    assert far["requests"] == near["requests"] >= 6
    assert (near["host_hit_tokens"], near["moved_bytes"]) == (0, 0)
    assert far["asked_tokens"] - far["hit_tokens"] < 6 * (2 * 128 + 60)
    assert near["asked_tokens"] - near["hit_tokens"] > 6 * 300
    ratios = rows["host / the device alone"]
    assert ratios["requests_min"] == far["requests_min"] / near["requests_min"]
