"""Which rows of the tables the n-grams that end at each token stand for.

For x_0, the normalised id of a token, and x_s, that of the token s before it,

    r_n = x_0 m_0 ^ ... ^ x_(n-1) m_(n-1)       row(n, head) = r_n mod prime(n, head) + offset

in 64 bits, which NumPy has; programs have 32, and `device_hashes`.
"""

from __future__ import annotations

import numpy as np

from dsv4_jax.config.engram import EngramConfig

RELEASED_MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
"""Of DeepSeek-V4.1-Flash, by layer; stored, since NumPy may change what its generators draw."""
_RELEASED_IDS, _SEED = 99_092, 10_007


def multipliers(config: EngramConfig) -> np.ndarray:
    """i64[L, max_ngram], odd: what an id is multiplied with by how far back it lies."""
    released = _RELEASED_IDS, len(RELEASED_MULTIPLIERS[1])
    if (config.num_normalized_ids, config.max_ngram) == released:
        of_layers = [RELEASED_MULTIPLIERS.get(layer) for layer in config.layers]
        if all(of_layers):
            return np.array(of_layers, np.int64)
    bound = max(np.iinfo(np.int64).max // config.num_normalized_ids // 2, 1)
    drawn = [
        np.random.default_rng(_SEED * layer).integers(0, bound, config.max_ngram, np.int64)
        for layer in config.layers
    ]
    return 2 * np.stack(drawn) + 1


def look_back(config: EngramConfig, normalized: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Normalised ids of each token and of those before it.

    Args:
      config: sizes of the tables.
      normalized: i64[V], of `normalize_ids`.
      token_ids: i[..., T], whole sequences.

    Returns:
      i64[..., T, max_ngram]; before the start of a sequence that of `pad_token_id`.
    """
    ids = np.asarray(token_ids)
    past = np.full((*ids.shape[:-1], config.max_ngram - 1), -1, ids.dtype)
    whole = np.concatenate([past, ids], axis=-1)
    back = np.lib.stride_tricks.sliding_window_view(whole, config.max_ngram, axis=-1)[..., ::-1]
    return normalize(config, normalized, back)


def normalize(config: EngramConfig, normalized: np.ndarray, back: np.ndarray) -> np.ndarray:
    """Normalised ids i64[..., n] of tokens and of those before them; -1 is of `pad_token_id`."""
    return normalized[np.where(back < 0, config.pad_token_id, back)]


def hash_rows(config: EngramConfig, normalized: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Rows of each table: i64[..., T, L, columns]; arguments as of `look_back`."""
    return hash_ngrams(config, look_back(config, normalized, token_ids))


def hash_ngrams(config: EngramConfig, back: np.ndarray) -> np.ndarray:
    """Rows of each table of normalised ids i64[..., max_ngram]: i64[..., L, columns]."""
    products = back[..., None, :] * multipliers(config)  # i64[..., T, L, max_ngram], below 2**63
    mixed = np.bitwise_xor.accumulate(products, axis=-1)[..., 1:]  # of 2 tokens, 3 and so on
    primes = np.array(config.primes, np.int64)  # i64[L, columns]
    offsets = np.cumsum(primes, axis=-1) - primes
    return np.repeat(mixed, config.num_heads, axis=-1) % primes + offsets
