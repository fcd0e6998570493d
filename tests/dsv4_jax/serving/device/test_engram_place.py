"""Where an engine's steps read the Engram tables, and that its answers do not depend on it."""

import contextlib
import dataclasses
import types
import warnings

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax import cuda_driver
from dsv4_jax.engram import EngramTables, PinError, PlacedTables, pinned_memory, place_tables
from dsv4_jax.serving.device import engram_place
from dsv4_jax.serving.device.engram_place import SlowTablesWarning, with_placed_tables
from dsv4_jax.serving.options import EngineOptions
from helpers.v41_cache import greedy, model

pytestmark = pytest.mark.unoptimised

SIZES = {"max_requests": 3, "max_context_tokens": 256, "cache_format": "f32"}
SIZES |= {"prefill_tokens": (16,)}


def prompts():
    config, _ = model()
    rng = np.random.default_rng(0)
    return [rng.integers(3, config.vocab_size, count).tolist() for count in (41, 1, 18, 33)]


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("pinned", {}),
        pytest.param("device", {}, marks=pytest.mark.slow),
        pytest.param("host", {}, marks=pytest.mark.slow),
        pytest.param("pinned", {"draft_tokens": 2}, marks=pytest.mark.slow),
        pytest.param("device", {"steps_per_call": 3}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_answers_are_the_model_s_wherever_tables_lie(where, options):
    config, params = model()
    engine = ds.Engine(config, params, engram_tables=where, **SIZES | options)
    assert engine.plan.overlap == (where != "host")
    found = engine.generate(prompts(), max_new_tokens=6, stop_token_ids=())
    assert [one.token_ids for one in found] == [greedy(prompt, 6) for prompt in prompts()]
    assert (engine.metrics.engram_rows > 0) == (where == "host")
    assert not engine.verify().problems


def test_a_step_follows_one_whose_tokens_nobody_has_read():
    """What a drawn token reads is looked up on the device."""
    config, params = model()
    engine = ds.Engine(config, params, engram_tables="pinned", **SIZES)
    request = engine.submit(prompts()[2], max_new_tokens=6, stop_token_ids=())
    engine.step()
    assert engine.loop.flight is not None
    while engine.num_unfinished:
        engine.step()
    assert engine.completion(request).token_ids == greedy(prompts()[2], 6)


def placed(params=None, **options):
    config, given = model()
    return with_placed_tables(config, params or given, EngineOptions(**options)).engram


def on_a_gpu(monkeypatch, *, free=2**40, refusal=None):
    memory = types.SimpleNamespace(name="the host", free_bytes=free, total_bytes=2**40)
    monkeypatch.setattr(engram_place, "is_on_gpu", lambda mesh: True)
    monkeypatch.setattr(engram_place, "host_memory", lambda: memory)
    # A CPU reads what is pinned without that.
    monkeypatch.setattr(pinned_memory, "_pin_pages", lambda arrays: None)
    monkeypatch.setattr(pinned_memory, "_first_gpu", lambda: 0)
    monkeypatch.setattr(cuda_driver, "on_gpu", lambda ordinal: contextlib.nullcontext())
    if refusal:

        def refuse(tables, where, *, on_gpu):
            assert on_gpu
            raise PinError(refusal)

        monkeypatch.setattr(engram_place, "place_tables", refuse)


def test_a_cpu_leaves_tables_to_the_host():
    assert isinstance(placed(), EngramTables)
    assert isinstance(placed(engram_tables="host"), EngramTables)


def test_a_gpu_reads_pinned_tables(monkeypatch):
    on_a_gpu(monkeypatch)
    with warnings.catch_warnings(action="error"):
        found = placed()
        assert isinstance(found, PlacedTables)
        assert found.addresses is not None
        _, params = model()
        again = placed(dataclasses.replace(params, engram=found))
    assert again is found


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"free": 1}, r"they take .*, and the host has 1 B free"),
        ({"refusal": "the CUDA driver refuses"}, "the CUDA driver refuses; engram_tables="),
    ],
    ids=["no memory", "no driver"],
)
def test_a_gpu_that_cannot_read_them_says_so(monkeypatch, given, reason):
    on_a_gpu(monkeypatch, **given)
    with pytest.warns(SlowTablesWarning, match=f"the tables cannot be pinned: {reason}"):
        assert isinstance(placed(), EngramTables)
    with warnings.catch_warnings(action="error"):
        assert isinstance(placed(engram_tables="host"), EngramTables)


def test_a_refusal_is_an_error_where_pinned_tables_were_asked_for(monkeypatch):
    on_a_gpu(monkeypatch, refusal="error 2")
    with pytest.raises(PinError, match="error 2"):
        placed(engram_tables="pinned")


def test_tokens_without_a_normalised_id_stay_with_the_host(monkeypatch):
    _, params = model()
    tables = dataclasses.replace(params.engram, normalized=params.engram.normalized[:-1])
    short = dataclasses.replace(params, engram=tables)
    said = rf"the tokenizer has {len(tables.normalized)} tokens, and the model vocab_size="
    with pytest.raises(ValueError, match=rf"engram_tables='pinned' cannot be: {said}"):
        placed(short, engram_tables="pinned")
    on_a_gpu(monkeypatch)
    with pytest.warns(SlowTablesWarning, match=said):
        assert placed(short) is tables
    own = dataclasses.replace(params, engram=place_tables(tables, "pinned", on_gpu=False))
    with pytest.raises(ValueError, match=rf"params\.engram cannot be of placed tables: {said}"):
        placed(own)


def test_a_device_without_the_memory_does_not_take_them(monkeypatch):
    little = types.SimpleNamespace(name="NVIDIA H200", free_bytes=99, total_bytes=2**37)
    monkeypatch.setattr(engram_place, "find_memory", lambda: little)
    with pytest.raises(ValueError, match=r"cannot be: they take .*, and NVIDIA H200 has 99 B free"):
        placed(engram_tables="device")


def test_several_processes_read_tables_of_their_own(monkeypatch):
    monkeypatch.setattr(engram_place, "hosts_of", lambda mesh: object())
    with pytest.raises(
        ValueError, match="engram_tables='device' cannot be: the mesh spans several"
    ):
        placed(engram_tables="device")


def test_arrays_lie_on_the_default_device_of_who_builds_the_engine(monkeypatch):
    chosen, place = jax.devices()[0], engram_place.place_tables

    def watch(*given, **named):
        assert jax.config.jax_default_device is chosen
        return place(*given, **named)

    monkeypatch.setattr(engram_place, "place_tables", watch)
    with jax.default_device(chosen):
        assert isinstance(placed(engram_tables="device"), PlacedTables)


def test_models_without_tables_stay_as_they_are():
    params = dataclasses.replace(model()[1], engram=None)
    assert with_placed_tables(model()[0], params, EngineOptions(engram_tables="pinned")) is params


def test_no_such_place():
    with pytest.raises(ValueError, match="engram_tables must be"):
        EngineOptions(engram_tables="disk")


def test_placed_tables_are_saved_and_run_whole_sequences(tmp_path):
    config, params = model()
    found = placed(engram_tables="pinned")
    there = dataclasses.replace(params, engram=found)
    ids = jax.numpy.asarray([prompts()[2]])
    np.testing.assert_array_equal(
        ds.forward(there, ids, config=config), ds.forward(params, ids, config=config)
    )
    for name, given in (("one", params), ("other", there)):
        ds.save_checkpoint(config, given, tmp_path / name)
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "other")
    )
    assert one == other
