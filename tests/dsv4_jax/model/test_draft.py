"""The draft (MTP) block against an oracle in NumPy and float64, which transformers lacks.

The oracle is written token by token from deepseek_v4.md sections 1.2 to 1.6.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers.block_oracle import attention, collapsed, experts, rms, sublayer
from helpers.tolerance import INTERMEDIATE

pytestmark = pytest.mark.unoptimised

# The clamp is low enough to bind, and the history passes the window.
CONFIG = dataclasses.replace(ds.DSV4Config.tiny(), swiglu_limit=1.0)
BATCH, T = 2, 24

jit_forward_draft = jax.jit(ds.model.forward_draft, static_argnames=("config", "cache_format"))


@pytest.fixture(scope="module")
def case():
    """Parameters, streams [B, T, S, D] of some trunk, and the token after each position."""
    params = ds.init_params(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    streams = rng.standard_normal((BATCH, T, CONFIG.hc_mult, CONFIG.hidden_size))
    token_ids = rng.integers(0, CONFIG.vocab_size, (BATCH, T + 1))
    return params, streams.astype(np.float32), token_ids.astype(np.int32)


@pytest.fixture(scope="module")
def logits(case):
    params, streams, token_ids = case
    return np.asarray(jit_forward_draft(params, streams, token_ids[:, 1:], config=CONFIG))


def draft_logits(params, streams, next_token_ids, config=CONFIG):
    """Section 1.6 for one row: streams [T, S, D], ids [T] -> [T, V]."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    draft, block = params.mtp, params.mtp.block
    x = [
        np.stack([draft.h_proj @ rms(stream, draft.hnorm) for stream in token])
        + draft.e_proj @ rms(params.embed[next_id], draft.enorm)
        for token, next_id in zip(streams.astype(np.float64), next_token_ids, strict=True)
    ]
    x = sublayer(
        block.hc_attn, block.attn_norm, lambda hs: attention(block.attn, hs, config), x, config
    )
    x = sublayer(
        block.hc_ffn,
        block.ffn_norm,
        lambda hs: [experts(block.ffn, h, config) for h in hs],
        x,
        config,
    )
    return np.stack([params.head @ rms(collapsed(draft.hc_head, token), draft.norm) for token in x])


def difference(actual, params, streams, next_token_ids, config=CONFIG):
    return max(
        np.abs(actual[row] - draft_logits(params, streams[row], next_token_ids[row], config)).max()
        for row in range(BATCH)
    )


def test_draft_logits_are_those_of_the_oracle(case, logits):
    params, streams, token_ids = case
    assert logits.shape == (BATCH, T, CONFIG.vocab_size)
    assert logits.dtype == np.float32
    assert difference(logits, params, streams, token_ids[:, 1:]) < INTERMEDIATE


def swapped(mtp):
    return dataclasses.replace(mtp, enorm=mtp.hnorm, hnorm=mtp.enorm)


def crossed(mtp):
    return dataclasses.replace(mtp, e_proj=mtp.h_proj, h_proj=mtp.e_proj)


def without_sink(mtp):
    attn = dataclasses.replace(mtp.block.attn, attn_sink=jnp.full(4, -jnp.inf))
    return dataclasses.replace(mtp, block=dataclasses.replace(mtp.block, attn=attn))


@pytest.mark.parametrize("change", [swapped, crossed, without_sink])
def test_the_oracle_tells_wrong_parameters(case, logits, change):
    params, streams, token_ids = case
    wrong = dataclasses.replace(params, mtp=change(params.mtp))
    assert difference(logits, wrong, streams, token_ids[:, 1:]) > 100 * INTERMEDIATE


@pytest.mark.parametrize("name", ["hc_head", "norm"])
def test_the_head_is_the_drafts_own(case, logits, name):
    """The trunk's collapse or final norm in its place would show."""
    params, streams, token_ids = case
    mtp = dataclasses.replace(params.mtp, **{name: getattr(params, name)})
    wrong = dataclasses.replace(params, mtp=mtp)
    assert difference(logits, wrong, streams, token_ids[:, 1:]) > 100 * INTERMEDIATE


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": CONFIG.compress_rope_theta},
        {"sliding_window": CONFIG.sliding_window - 1},
        {"swiglu_limit": 10.0},
    ],
)
def test_the_oracle_tells_a_wrong_table_window_or_clamp(case, logits, changes):
    """Known bug B16: a draft block with another layer's RoPE base."""
    params, streams, token_ids = case
    wrong = dataclasses.replace(CONFIG, **changes)
    assert difference(logits, params, streams, token_ids[:, 1:], wrong) > 100 * INTERMEDIATE


def test_tokens_are_those_that_follow(case, logits):
    """Position i takes the token at i + 1; the one at i itself would show."""
    params, streams, token_ids = case
    assert difference(logits, params, streams, token_ids[:, :-1]) > 100 * INTERMEDIATE


def test_a_later_token_changes_no_earlier_logits(case, logits):
    params, streams, token_ids = case
    changed = token_ids[:, 1:].copy()
    changed[0, 10] = (changed[0, 10] + 1) % CONFIG.vocab_size
    other = np.asarray(jit_forward_draft(params, streams, changed, config=CONFIG))
    np.testing.assert_array_equal(other[0, :10], logits[0, :10])
    np.testing.assert_array_equal(other[1], logits[1])
    assert np.all(np.abs(other[0, 10:] - logits[0, 10:]).max(axis=-1) > 0)


def test_a_model_without_a_draft_block_is_refused(case):
    params, streams, token_ids = case
    with pytest.raises(ValueError, match=r"params\.mtp must be a draft \(MTP\) block, and is None"):
        ds.model.forward_draft(
            dataclasses.replace(params, mtp=None), streams, token_ids[:, 1:], config=CONFIG
        )
