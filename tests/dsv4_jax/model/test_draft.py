"""The draft (MTP) block against an oracle in NumPy and float64, which transformers lacks.

The oracle is written token by token from deepseek_v4.md sections 1.2 to 1.6.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers.tolerance import INTERMEDIATE

pytestmark = pytest.mark.unoptimised

# The clamp is low enough to bind, and the history passes the window.
CONFIG = dataclasses.replace(ds.DSV4Config.tiny(), swiglu_limit=1.0)
BATCH, T = 2, 24
EPS = 1e-6

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


def rms(x, weight=1.0):
    return x / np.sqrt(np.mean(x**2) + EPS) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def mixed(mix, x):
    """Step 1 of section 1.2, for one token's streams [S, D]."""
    flat = x.reshape(-1)
    return mix.fn @ flat / np.sqrt(np.mean(flat**2) + EPS)


def read(mix, x, config):
    """Steps 2 to 8: post [S], comb [S, S] and the collapsed vector [D]."""
    num = config.hc_mult
    raw = mixed(mix, x)
    pre = sigmoid(raw[:num] * mix.scale[0] + mix.base[:num]) + EPS
    post = 2 * sigmoid(raw[num : 2 * num] * mix.scale[1] + mix.base[num : 2 * num])
    z = (raw[2 * num :] * mix.scale[2] + mix.base[2 * num :]).reshape(num, num)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True) + EPS
    p = p / (p.sum(axis=0, keepdims=True) + EPS)
    for _ in range(config.hc_sinkhorn_iters - 1):
        p = p / (p.sum(axis=1, keepdims=True) + EPS)
        p = p / (p.sum(axis=0, keepdims=True) + EPS)
    return post, p, pre @ x


def write(post, comb, x, y):
    """Step 9: stream k gets post_k y + sum_j comb_jk x_j."""
    return np.stack([post[k] * y + comb[:, k] @ x for k in range(len(post))])


def rope(x, position, config):
    """Rotates the last R dims of [..., C] by the main table, pairs side by side."""
    turn = config.rope_theta ** (-np.arange(0, config.rope_dim, 2) / config.rope_dim) * position
    pairs = x[..., -config.rope_dim :: 2] + 1j * x[..., -config.rope_dim + 1 :: 2]
    pairs = pairs * np.exp(1j * turn)
    rotated = np.stack([pairs.real, pairs.imag], axis=-1).reshape(*x.shape[:-1], -1)
    return np.concatenate([x[..., : -config.rope_dim], rotated], axis=-1)


def attention(attn, hidden, config):
    """Window attention of a whole history [T, D] -> [T, D]."""
    heads, dim, groups = config.num_attention_heads, config.head_dim, config.o_groups
    kv = [rope(rms(attn.wkv @ h, attn.kv_norm), p, config) for p, h in enumerate(hidden)]
    outputs = []
    for p, h in enumerate(hidden):
        latent = rms(attn.wq_a @ h, attn.q_norm)
        queries = (attn.wq_b @ latent).reshape(heads, dim)
        queries = rope(np.stack([rms(q) for q in queries]), p, config)
        keys = np.stack(kv[max(0, p - config.sliding_window + 1) : p + 1])
        weights = np.exp(queries @ keys.T / np.sqrt(dim))
        attended = weights @ keys / (weights.sum(axis=1) + np.exp(attn.attn_sink))[:, None]
        attended = rope(attended, -p, config).reshape(groups, -1)
        z = np.concatenate(
            [a @ o for a, o in zip(np.split(attn.wo_a, groups), attended, strict=True)]
        )
        outputs.append(attn.wo_b @ z)
    return outputs


def expert(w1, w2, w3, x, limit):
    return w2 @ (silu(np.minimum(w1 @ x, limit)) * np.clip(w3 @ x, -limit, limit))


def experts(ffn, x, config):
    """Learned routing: chosen by score and bias, weighted by score."""
    score = np.sqrt(np.log1p(np.exp(ffn.gate @ x)))
    ranked = np.argsort(-(score + ffn.bias))
    picked, next_best = np.split(ranked, [config.num_experts_per_token])
    margin = (score + ffn.bias)[picked[-1]] - (score + ffn.bias)[next_best[0]]
    assert margin > 1e-4, "a near tie: float32 may pick another expert"
    weights = score[picked] / score[picked].sum() * config.routed_scaling_factor
    limit = config.swiglu_limit
    routed = sum(
        w * expert(ffn.w1[e], ffn.w2[e], ffn.w3[e], x, limit)
        for w, e in zip(weights, picked, strict=True)
    )
    return routed + expert(ffn.shared_w1, ffn.shared_w2, ffn.shared_w3, x, limit)


def sublayer(mix, norm, function, x):
    """One sublayer over a history of streams [T, S, D]; `function` takes and gives [T, D]."""
    reads = [read(mix, token, CONFIG) for token in x]
    outputs = function([rms(collapsed, norm) for _, _, collapsed in reads])
    return [
        write(post, comb, token, y)
        for (post, comb, _), token, y in zip(reads, x, outputs, strict=True)
    ]


def draft_logits(params, streams, next_token_ids, config=CONFIG):
    """Section 1.6 for one row: streams [T, S, D], ids [T] -> [T, V]."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    draft, block = params.mtp, params.mtp.block
    x = [
        np.stack([draft.h_proj @ rms(stream, draft.hnorm) for stream in token])
        + draft.e_proj @ rms(params.embed[next_id], draft.enorm)
        for token, next_id in zip(streams.astype(np.float64), next_token_ids, strict=True)
    ]
    x = sublayer(block.hc_attn, block.attn_norm, lambda h: attention(block.attn, h, config), x)
    x = sublayer(
        block.hc_ffn, block.ffn_norm, lambda hs: [experts(block.ffn, h, config) for h in hs], x
    )
    result = []
    for token in x:
        mix = draft.hc_head
        pre = sigmoid(mixed(mix, token) * mix.scale[0] + mix.base) + EPS
        result.append(params.head @ rms(pre @ token, draft.norm))
    return np.stack(result)


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
    with pytest.raises(ValueError, match=r"params\.mtp is None"):
        ds.model.forward_draft(
            dataclasses.replace(params, mtp=None), streams, token_ids[:, 1:], config=CONFIG
        )
