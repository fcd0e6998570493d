"""A decoder block in NumPy and float64, token by token, from deepseek_v4.md sections 1.2 to 1.5."""

import numpy as np

EPS = 1e-6


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


def window_key(attn, hidden, position, config):
    """What a token [D] leaves in the window, key and value in one: [C]."""
    return rope(rms(attn.wkv @ hidden, attn.kv_norm), position, config)


def attend(attn, hidden, position, keys, config):
    """One token [D] at a position over keys [K, C], with a sink -> [D]."""
    heads, dim, groups = config.num_attention_heads, config.head_dim, config.o_groups
    latent = rms(attn.wq_a @ hidden, attn.q_norm)
    queries = (attn.wq_b @ latent).reshape(heads, dim)
    queries = rope(np.stack([rms(q) for q in queries]), position, config)
    weights = np.exp(queries @ keys.T / np.sqrt(dim))
    attended = weights @ keys / (weights.sum(axis=1) + np.exp(attn.attn_sink))[:, None]
    attended = rope(attended, -position, config).reshape(groups, -1)
    z = [a @ o for a, o in zip(np.split(attn.wo_a, groups), attended, strict=True)]
    return attn.wo_b @ np.concatenate(z)


def attention(attn, hidden, config):
    """Window attention of a whole history [T, D] -> [T, D]."""
    kv = [window_key(attn, h, p, config) for p, h in enumerate(hidden)]
    window = [np.stack(kv[max(0, p - config.sliding_window + 1) : p + 1]) for p in range(len(kv))]
    return [
        attend(attn, h, p, keys, config)
        for p, (h, keys) in enumerate(zip(hidden, window, strict=True))
    ]


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


def sublayer(mix, norm, function, x, config):
    """One sublayer over a history of streams [T, S, D]; `function` takes and gives [T, D]."""
    reads = [read(mix, token, config) for token in x]
    outputs = function([rms(collapsed, norm) for _, _, collapsed in reads])
    return [
        write(post, comb, token, y)
        for (post, comb, _), token, y in zip(reads, x, outputs, strict=True)
    ]


def collapsed(mix, x):
    """The collapse of streams [S, D] before a head: [D]."""
    pre = sigmoid(mixed(mix, x) * mix.scale[0] + mix.base) + EPS
    return pre @ x
