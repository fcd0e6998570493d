"""Split and batch invariance: how a history was cut into calls, and beside what, changes no bit."""

import dataclasses

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from helpers.schedules import (
    assert_same_bytes,
    jit_prefill_all,
    live_rows,
    poison,
    random_cuts,
    run_cuts,
    step_input,
)

pytestmark = pytest.mark.unoptimised

NUM_TOKENS = 24
LENGTHS = (150, 61, 97)
SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA


def trunk(**changes):
    config = dataclasses.replace(ds.DSV4Config.tiny(), num_mtp_layers=0, hc_sinkhorn_iters=1)
    if "layer_types" in changes:
        hashed = (ds.RouterType.HASH,)
        rest = (ds.RouterType.LEARNED,) * (len(changes["layer_types"]) - 1)
        changes["router_types"] = hashed + rest
    return dataclasses.replace(config, **changes)


def small(**changes):
    """One layer of each type: compiles in half the time."""
    return trunk(layer_types=(SWA, CSA, HCA), **changes)


SMALL = small()
PAGED = trunk(layer_types=(CSA, HCA))
"""Both have a ring as a layer of the window alone has, and compile in two thirds of the time."""


def make(config, cache_format, max_context_tokens=200):
    cache = ds.init_cache(
        config, max_requests=4, max_context_tokens=max_context_tokens, cache_format=cache_format
    )
    return ds.init_params(config, jax.random.key(0)), cache


def sequences(config, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, config.vocab_size, n).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("cache_format", "config"),
    [
        pytest.param("fp8_ue8m0", PAGED, id="fp8_ue8m0"),
        pytest.param("fp8_ue8m0", SMALL, id="fp8_ue8m0-all", marks=pytest.mark.slow),
        pytest.param("fp8_per_entry", SMALL, id="fp8_per_entry", marks=pytest.mark.slow),
        pytest.param("f32", SMALL, id="f32", marks=pytest.mark.slow),
        # Seven layers, some of them scanned.
        pytest.param("fp8_ue8m0", trunk(), id="fp8_ue8m0-scanned", marks=pytest.mark.slow),
    ],
)
def test_any_split_in_any_batch_gives_the_bytes_of_serial_decoding(cache_format, config):
    """One bucket: random chunks, rows, slots, padding, and poisoned storage; bit for bit.

    Known bugs B1, B8, B19, B32: stale strides and rows, boundary steps, split paths, poison.
    """
    params, cache = make(config, cache_format)
    texts = sequences(config)
    serial = run_cuts(
        config, params, cache, texts, [[1] * n for n in LENGTHS], slots=[0, 1, 2],
        num_tokens=NUM_TOKENS,
    )  # fmt: skip
    for seed in range(3):
        rng = np.random.default_rng(seed)
        slots = rng.permutation(4)[:3].tolist()
        mixed = run_cuts(
            config, params, poison(cache), texts, [random_cuts(rng, n, 23) for n in LENGTHS],
            slots=slots, num_tokens=NUM_TOKENS, rng=rng,
        )  # fmt: skip
        for i, slot in enumerate(slots):
            np.testing.assert_array_equal(np.stack(mixed.logits[i]), np.stack(serial.logits[i]))
            assert_same_bytes(live_rows(mixed.cache, slot), live_rows(serial.cache, i))


@pytest.mark.slow
def test_a_request_alone_in_a_batch_of_one_equals_itself_in_a_batch():
    """Decode at B = 1 and B = 3: shapes differ, so within tolerance."""
    config = SMALL
    params, cache = make(config, "f32")
    text = sequences(config, (70,))[0]
    cuts = [[24, 24, 22], [], []]
    filled = run_cuts(
        config, params, cache, [text, [], []], cuts, slots=[1, 2, 3], num_tokens=NUM_TOKENS
    ).cache
    decode = jax.jit(ds.decode_step, static_argnames="config")
    alone, together = (
        decode(
            params,
            filled,
            step_input([[5]] + [[]] * (rows - 1), range(rows), [1, -1, -1][:rows], num_tokens=rows),
            config=config,
        )[1]
        for rows in (1, 3)
    )
    np.testing.assert_allclose(together[0], alone[0], atol=2e-5, rtol=0)
    assert not np.any(np.asarray(together[1:]))


def test_a_batch_of_padding_only_changes_nothing():
    """Known bug B5: all lengths zero."""
    config = PAGED
    params, cache = make(config, "fp8_ue8m0")
    call = step_input([[], [], []], range(3), [-1, -1, -1], num_tokens=NUM_TOKENS)
    after, logits = jit_prefill_all(params, cache, call, config=config, all_logits=True)
    assert not np.any(np.asarray(logits))
    jax.tree.map(np.testing.assert_array_equal, after, cache)
