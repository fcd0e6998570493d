"""What a call takes beside weights and cache, estimated, against what XLA took."""

import argparse
import dataclasses

import pytest

import dsv4_jax as ds
from dsv4_jax.bench import decode
from dsv4_jax.bench.workspace import workspace_bytes
from dsv4_jax.cli import bench_checks, memory

GIB = 2**30
MILLION = 2**20


def estimate(name, tokens, context, *, experts=None, data=1, model=1, rows=1, **options):
    """GiB."""
    config = getattr(ds.DSV4Config, name)()
    if experts:
        config = dataclasses.replace(config, num_routed_experts=experts)
    sizes = {"context": context, "step_tokens": tokens, "logit_rows": rows}
    return workspace_bytes(config, data=data, model=model, **sizes, **options) / GIB


# Compiled for an H200 by jax 0.12 without one: docs/design/several_gpus.md.
@pytest.mark.parametrize(
    ("name", "experts", "tokens", "context", "measured"),
    [
        ("flash", 192, 2048, 2048, 0.36),
        ("flash", 192, 8192, 8192, 1.42),
        ("flash", 192, 16384, 16384, 4.57),
        ("flash", 192, 32768, 32768, 6.14),
        ("flash", 256, 32768, 32768, 7.13),
        ("flash", 256, 2048, MILLION, 2.35),
        ("flash", 256, 8192, MILLION, 9.40),
        ("pro", 384, 8192, 8192, 2.67),
        ("pro", 384, 32768, 32768, 20.87),
    ],
)
def test_a_prefill_call_takes_little_less(name, experts, tokens, context, measured):
    assert measured <= estimate(name, tokens, context, experts=experts) + 0.005
    assert estimate(name, tokens, context, experts=experts) < 1.12 * measured


def test_logits_are_of_the_rows_that_have_any():
    of_one = estimate("flash", 2048, 2048)
    assert estimate("flash", 2048, 2048, rows=257) == pytest.approx(
        of_one + 3 * 256 * 129_280 * 4 / GIB
    )


@pytest.mark.parametrize(
    ("name", "data", "model", "context", "measured"),
    [
        ("flash", 1, 2, 32768, 1.01),
        ("flash", 1, 4, 32768, 0.77),
        ("flash", 1, 8, 32768, 0.74),
        ("flash", 4, 1, 32768, 3.01),
        ("flash", 8, 1, 32768, 3.74),
        ("pro", 1, 8, 131072, 1.21),
        ("pro", 2, 4, 131072, 2.06),
    ],
)
def test_so_does_one_of_8192_tokens_of_each_shard(name, data, model, context, measured):
    found = estimate(name, 8192, context, data=data, model=model)
    assert measured <= found < 1.15 * measured


def test_a_split_cache_has_sums_of_all_heads():
    whole, split = (
        estimate("flash", 8192, MILLION, model=8, split_cache=splits) for splits in (False, True)
    )
    assert split - whole == pytest.approx(8192 * 64 * 512 * 22 / GIB)


@pytest.mark.parametrize(("call_tokens", "margin"), [(None, True), (2048, True), (32768, False)])
def test_a_benchmark_asks_for_as_much_as_its_calls_take(call_tokens, margin):
    args, config = argparse.Namespace(data=None, model=None), ds.DSV4Config.flash()
    asked = bench_checks._step_bytes(args, config, 32768, call_tokens)
    assert (asked == decode.MARGIN_BYTES) == margin
    assert asked >= decode.MARGIN_BYTES
    if not margin:
        assert asked / GIB == estimate("flash", 32768, 32768)


def test_an_engine_asks_for_as_much_as_its_largest_step_takes(monkeypatch):
    config, asked = ds.DSV4Config.flash(), []
    monkeypatch.setattr(memory, "check_memory", lambda needs, way_out: asked.append(needs))
    monkeypatch.setattr(memory, "stored_bytes", lambda *_, **__: 0)
    options = {"max_requests": 4, "max_context_tokens": 4096, "cache_format": "fp8_ue8m0"}
    options |= {"grammars": False}
    loading = memory.Loading(None, "bfloat16")
    for sizes in (None, (512, 8192)):
        chosen = ds.serving.EngineOptions(prefill_tokens=sizes, draft_tokens=1, **options)
        memory.check_engine_memory(config, chosen, loading, way_out="less")
    steps = [needs["a step"] / GIB for needs in asked]
    assert steps == [estimate("flash", tokens, 4096, rows=8) for tokens in (256, 8192)]
