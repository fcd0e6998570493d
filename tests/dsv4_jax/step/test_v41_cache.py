"""DeepSeek-V4.1 on a cache: any way of cutting a prompt into calls gives the oracle's logits."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.config.idea import Idea
from helpers.v41_cache import CONTEXT, SIZE, SLOTS, call_of, fresh, model, recorded, run
from pallas_kernels.common import chunks

pytestmark = pytest.mark.unoptimised

TESTS = pathlib.Path(__file__).parents[2]
CLOSE = 1e-4
"""Of logits of f32, which differ from the oracle's float64 by 4e-6 (CPU, jax 0.12.0)."""


def cut(tokens, sizes):
    ends = np.cumsum(sizes)
    assert ends[-1] == len(tokens)
    return np.split(tokens, ends[:-1])


CUTTINGS = [
    [20, 21],
    [1] * 41,
    [3, 1, 1, 5, 7, 2, 1, 21],
]
"""Pairs lie in one call and in two, and so do windows, blocks of candidates and n-grams."""


@pytest.mark.parametrize("cache_format", ["f32", pytest.param("fp4_e4m3", marks=pytest.mark.slow)])
def test_every_cutting_gives_the_logits_of_the_oracle_and_the_same_bits(cache_format):
    name = "tiny" if cache_format == "f32" else "tiny_cache"
    wanted, runs = recorded(name), []
    for number, sizes in enumerate(CUTTINGS):
        parts = cut(wanted["token_ids"][0], sizes)
        found, _ = run([[(number % SLOTS, part)] for part in parts], cache_format=cache_format)
        runs.append(np.concatenate(found))
        off = np.abs(runs[-1] - wanted["logits"][0])
        if cache_format == "f32":
            assert off.max() < CLOSE
        assert np.mean(off.max(-1) < 1e-3) > 0.9
    for other in runs[1:]:
        np.testing.assert_array_equal(other, runs[0])


@pytest.mark.slow
def test_selections_in_chunks_of_tokens_are_the_same(monkeypatch):
    """As those of many tokens of long requests are, whose scores would not fit at once."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 3 * CONTEXT)
    config, params = model()
    prefill = jax.jit(functools.partial(ds.prefill, config=config, all_logits=True))
    wanted = recorded("tiny")
    tokens = wanted["token_ids"][0][:SIZE]
    _, logits = prefill(params, fresh(config), call_of([(1, tokens)]))
    assert np.abs(np.asarray(logits) - wanted["logits"][0][:SIZE]).max() < CLOSE


def test_requests_beside_each_other_are_as_alone():
    """At different places, in other slots and rows, with one that begins while others go on."""
    wanted = recorded("tiny")
    first, second = (
        cut(ids, sizes)
        for ids, sizes in zip(wanted["token_ids"], ([9, 12, 20], [4, 15, 3, 19]), strict=True)
    )
    calls = [
        [(2, first[0])],
        [(0, second[0]), (2, first[1])],
        [(0, second[1])],
        [(2, first[2]), (0, second[2])],
        [(0, second[3])],
    ]
    found, cache = run(calls)
    of_first = [found[0], found[1][4:], found[3][:20]]
    of_second = [found[1][:4], found[2], found[3][20:], found[4]]
    for parts, logits in zip((of_first, of_second), wanted["logits"], strict=True):
        np.testing.assert_allclose(np.concatenate(parts), logits, rtol=0, atol=CLOSE)
    assert cache.length_tokens.tolist() == [41, 0, 41]


@pytest.mark.slow
def test_a_step_of_one_token_each_is_the_same_and_a_loop_on_the_device_too():
    config, params = model()
    wanted = recorded("tiny")
    _, cache = run([[(1, wanted["token_ids"][0][:11])], [(2, wanted["token_ids"][1][:12])]])
    for place in range(4):
        tokens = [wanted["token_ids"][row][11 + row + place] for row in range(2)]
        step_input = ds.StepInput(
            token_ids=jnp.asarray(tokens, jnp.int32),
            request_ids=jnp.arange(2, dtype=jnp.int32),
            request_slots=jnp.asarray([1, 2], jnp.int32),
        )
        cache, logits = ds.jit_decode_step(params, cache, step_input, config=config)
        for row in range(2):
            wanted_row = wanted["logits"][row, 11 + row + place]
            np.testing.assert_allclose(logits[row], wanted_row, rtol=0, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_tokens_that_are_taken_back_leave_nothing(kept):
    """Neither a token that waits for its second, nor an id that n-grams look back to."""
    config, params = model()
    ids = recorded("tiny")["token_ids"][0]
    stage = jax.jit(ds.stage_step, static_argnames="config")
    for settled in (10, 11):
        _, cache = run([[(0, ids[:settled])]])
        drafts = ids[settled : settled + 3].copy()
        drafts[kept:] = (drafts[kept:] + 7) % config.vocab_size
        cache, staged, _ = stage(params, cache, call_of([(0, drafts)]), config=config)
        cache = ds.commit(cache, staged, jnp.asarray([kept] + [0] * (SLOTS - 1), jnp.int32))
        rest = ids[settled + kept : settled + kept + 9]
        _, logits = ds.jit_prefill(
            params, cache, call_of([(0, rest)]), config=config, all_logits=True
        )
        place = settled + kept
        wanted = recorded("tiny")["logits"][0, place : place + 9]
        np.testing.assert_allclose(logits[:9], wanted, rtol=0, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "model"])
def test_two_devices_give_the_logits_of_the_oracle(axis):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-m", "helpers.v41_mesh", axis]
    path = os.pathsep.join([*sys.path, str(TESTS)])
    done = subprocess.run(
        program,
        env=os.environ | flags | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < CLOSE


def test_sizes_of_a_cache_are_what_layers_make_and_keep():
    """Rings of every layer and stage, blocks of the layers that make entries, and what waits."""
    config, _ = model()
    shapes = ds.cache.cache_shapes(
        config, max_requests=2, max_context_tokens=256, cache_format="fp4_e4m3"
    )
    window = {family: pool.window for family, pool in shapes.state.items()}
    assert window["csa"]["codes"].shape == (6, 2, 8, 32)
    assert window["swa"]["codes"].shape == (2 + 2, 2, 8, 32)
    assert window["token ids"]["ids"].shape == (1, 2, 3)
    assert shapes.state["csa2"].pending["values"].shape == (2, 2, 1, 32)
    entries = {family: pool.entries["codes"].shape for family, pool in shapes.paged.items()}
    assert entries == {"csa1": (1, 4, 128, 16), "csa2": (2, 4, 64, 16)}
    assert {"csa1", "csa2"} == {schema.entry_family for schema in shapes.schemas} - {""}


def test_what_a_cache_does_not_do_is_refused():
    config, params = model()
    sizes = {"max_requests": 1, "max_context_tokens": 128}
    with pytest.raises(NotImplementedError, match="cache_format must be 'f32' or 'bf16'"):
        ds.init_cache(config, cache_format="fp8_ue8m0", **sizes)
    with pytest.raises(NotImplementedError, match="split_cache does not deal the blocks"):
        ds.init_cache(config, split_cache=True, **sizes)
    selects = Idea(selector=lambda selection: selection.scores > 0).applied_to(config)
    with pytest.raises(NotImplementedError, match="the config's idea has a selector"):
        ds.init_cache(selects, **sizes)
    with pytest.raises(ValueError, match=r"idea\.pooling must be None beside sources"):
        Idea(pooling=lambda tokens: tokens).applied_to(config)
    without = dataclasses.replace(config, engram=None)
    cache = ds.init_cache(without, **sizes)
    with pytest.raises(ValueError, match="one of a model without Engram tables"):
        ds.prefill(params, cache, call_of([(0, np.zeros(2, int))], 2), config=config)
