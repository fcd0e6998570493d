"""Sizes from counts and from budgets: what is planned is what is allocated, and what fits fits."""

import dataclasses

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_jax as ds
from dsv4_jax.allocator import pool_plan
from dsv4_jax.cache.model_cache import tree_bytes

CONFIG = ds.DSV4Config.tiny()
SIZES = {"max_requests": 3, "max_context_tokens": 500}


def allocated(config, plan, cache_format):
    def build():
        cache = ds.init_cache(
            config, max_requests=plan.max_requests, max_context_tokens=plan.max_context_tokens,
            num_blocks=plan.num_blocks, cache_format=cache_format,
        )  # fmt: skip
        return cache, ds.cache.init_snapshot_store(cache, plan.num_snapshots)

    return tree_bytes(jax.eval_shape(build))


@pytest.mark.parametrize("cache_format", ["f32", "fp8_ue8m0"])
def test_the_plan_has_the_bytes_of_the_arrays(cache_format):
    plan = ds.allocator.plan_pools(CONFIG, cache_format=cache_format, **SIZES)
    assert (plan.num_blocks, plan.num_snapshots) == (12, 24)
    assert plan.memory_bytes == allocated(CONFIG, plan, cache_format)


def test_every_default_number_of_snapshots_is_the_same():
    """Of the plan, of a manager and of an engine."""
    expected = 3 * pool_plan.SNAPSHOTS_PER_SLOT
    assert ds.allocator.plan_pools(CONFIG, **SIZES).num_snapshots == expected
    assert ds.KVCacheManager(CONFIG, **SIZES).plan.num_snapshots == expected
    config = dataclasses.replace(CONFIG, num_mtp_layers=0)
    engine = ds.Engine(config, ds.init_params(config, jax.random.key(0)), **SIZES)
    assert engine.loop.shards.managers[0].plan.num_snapshots == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40_000_000), st.sampled_from([None, 0, 7]), st.sampled_from([None, 5]))
def test_a_budget_is_filled_and_never_passed(memory_bytes, num_snapshots, num_blocks):
    counts = {"num_snapshots": num_snapshots, "num_blocks": num_blocks}
    try:
        plan = ds.allocator.plan_pools(CONFIG, memory_bytes=memory_bytes, **counts, **SIZES)
    except ValueError as error:
        assert f"memory_bytes={memory_bytes} is too little" in str(error)  # noqa: PT017
        least = ds.allocator.plan_pools(
            CONFIG, num_blocks=num_blocks or 4, num_snapshots=num_snapshots or 0, **SIZES
        )
        # A tenth may go to snapshots: refused only where the rest is too little.
        assert 0.9 * memory_bytes < least.memory_bytes
        return
    assert plan.memory_bytes == allocated(CONFIG, plan, "fp8_ue8m0") <= memory_bytes
    assert plan.num_blocks >= 4
    if num_blocks is None:
        assert memory_bytes - plan.memory_bytes < plan.bytes_per_block


def test_flash_snapshots_have_the_published_size():
    """3.5 MiB: the window and half a CSA window of both compressors."""
    trunk = dataclasses.replace(ds.DSV4Config.flash(), num_mtp_layers=0)
    plan = ds.allocator.plan_pools(trunk, max_requests=1, max_context_tokens=4096)
    window, half = 43 * 128 * 584, 21 * 4 * (512 + 128) * 2 * 4
    assert plan.bytes_per_snapshot == window + half
    assert plan.bytes_per_snapshot / 2**20 == pytest.approx(3.5, abs=0.05)
    assert plan.bytes_per_block == 21 * 32 * (584 + 68) + 20 * 584


def test_admission_uses_the_plans_arithmetic():
    manager = ds.KVCacheManager(CONFIG, num_blocks=5, **SIZES)
    assert [manager.plan.blocks_needed(n, m) for n, m in ((1, 0), (128, 0), (128, 1), (1, 127))] \
        == [1, 1, 2, 1]  # fmt: skip
    slot = manager.admit(128)
    assert (manager.block_table[slot] >= 0).sum() == 1
    small = ds.KVCacheManager(CONFIG, num_blocks=2, **SIZES)
    with pytest.raises(ValueError, match=r"300 tokens take 3 blocks of 128 tokens, .* has 2;"):
        small.admit(300)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
        ({"max_context_tokens": 0}, "max_context_tokens must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_snapshots": -1}, "num_snapshots must be at least 0, got -1"),
        ({"memory_bytes": 1000}, "memory_bytes=1000 is too little: 3 slots of"),
    ],
)
def test_sizes_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ds.allocator.plan_pools(CONFIG, **(SIZES | changes))


class FakeDevice:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_a_share_of_the_devices_memory(monkeypatch):
    stats = {"bytes_limit": 1000, "bytes_in_use": 300}
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice(stats)])
    assert pool_plan.device_memory_bytes(0.9) == 600
    with pytest.raises(ValueError, match="gpu_memory_fraction must be above 0 and at most 1"):
        pool_plan.device_memory_bytes(1.5)
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice(None)])
    with pytest.raises(ValueError, match="give memory_bytes or num_blocks"):
        pool_plan.device_memory_bytes(0.5)
