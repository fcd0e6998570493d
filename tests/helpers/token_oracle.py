"""What the ops must compute, token by token, in NumPy: float64 where there is maths.

Written from deepseek_v4.md, section by section, and from no other implementation.
"""

import math

import numpy as np


def append_ring(ring, rows, slots, positions, *, layer):
    """Section 1.7: token p of a slot goes to row p mod W."""
    ring = {name: plane.copy() for name, plane in ring.items()}
    for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot >= 0:
            for name, plane in ring.items():
                plane[layer, slot, position % plane.shape[2]] = rows[name][token]
    return ring


def locate(table, segment, entry, entries_per_block):
    """An entry's physical block and its place there, None if there is no such entry."""
    logical = entry // entries_per_block
    if segment < 0 or entry < 0 or logical >= table.shape[1] or table[segment, logical] < 0:
        return None
    return int(table[segment, logical]), int(entry % entries_per_block)


def flush_write(pool, rows, table, segment_ids, entries, *, layer):
    """Section 2.4: entry j of a request at index j of its blocks."""
    pool = {name: plane.copy() for name, plane in pool.items()}
    entries_per_block = next(iter(pool.values())).shape[2]
    for i, (segment, entry) in enumerate(zip(segment_ids, entries, strict=True)):
        place = locate(table, segment, entry, entries_per_block)
        if place is not None:
            for name, plane in pool.items():
                plane[layer, *place] = rows[name][i]
    return pool


def window_positions(position, window):
    """Section 1.3: a query at p sees positions max(0, p - W + 1) to p."""
    return range(max(0, position - window + 1), position + 1)


def csa_window(kv, z, ape, entry):
    """Section 2.2: the values and scores that CSA entry j pools.

    Args:
      kv: [tokens, 2 * C], b-stream then a-stream.
      z: [tokens, 2 * C], gates without position bias.
      ape: [m, 2 * C].
      entry: j.
    """
    m, c = ape.shape[0], kv.shape[1] // 2
    values, scores = [], []
    for t in range(max(0, (entry - 1) * m), (entry + 1) * m):
        half = slice(0, c) if t < entry * m else slice(c, 2 * c)
        values.append(kv[t, half])
        scores.append(z[t, half] + ape[t % m, half])
    return np.array(values), np.array(scores)


def hca_window(kv, z, ape, entry):
    """Section 2.2: the values and scores that HCA entry j pools."""
    m = ape.shape[0]
    tokens = range(entry * m, (entry + 1) * m)
    return np.array([kv[t] for t in tokens]), np.array([z[t] + ape[t % m] for t in tokens])


def pool(values, scores):
    """A softmax over tokens for each channel, in two passes.

    Returns:
      f64[C], the mean of the values, and f64[C], that of their magnitudes.
    """
    values, scores = np.float64(values), np.float64(scores)
    weights = np.exp(scores - scores.max(axis=0))
    weights /= weights.sum(axis=0)
    return (weights * values).sum(axis=0), (weights * abs(values)).sum(axis=0)


def running_pool(values, scores):
    """f64[3, C]: the largest score, the sum of exp(score - largest), that sum times value."""
    values, scores = np.float64(values), np.float64(scores)
    if not len(values):
        return np.stack([np.full(values.shape[1], -np.inf), *np.zeros((2, values.shape[1]))])
    largest = scores.max(axis=0)
    weights = np.exp(scores - largest)
    return np.stack([largest, weights.sum(axis=0), (weights * values).sum(axis=0)])


def rms_norm(x, weight, *, eps):
    """Section 2.2: x / rms(x) times a weight, f64."""
    return np.float64(x) / math.sqrt(np.mean(np.float64(x) ** 2) + eps) * np.float64(weight)


def rotate(x, position, frequencies):
    """Section 1.4: rotates pairs of neighbours among the last dims; the angle is an f32 product."""
    x = np.array(x, np.float64)
    first = len(x) - 2 * len(frequencies)
    for i, frequency in enumerate(frequencies):
        angle = float(np.float32(position) * np.float32(frequency))
        a, b = x[first + 2 * i : first + 2 * i + 2]
        x[first + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        x[first + 2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return x


def index_scores(queries, weights, keys):
    """Section 3, steps 4 and 5: f64[E], of queries [IH, IC], weights [IH] and keys [E, IC]."""
    num_heads, dim = queries.shape
    scores = np.zeros(len(keys))
    for e, key in enumerate(np.float64(keys)):
        for query, weight in zip(np.float64(queries), np.float64(weights), strict=True):
            scores[e] += weight * max(query @ key, 0.0)
    return scores / math.sqrt(num_heads * dim)


def best_entries(scores, k):
    """The k best, lower index first among equals, NaN last; ascending by index, then -1."""

    def rank(entry):
        score = float(scores[entry])
        return (1, 0.0, entry) if math.isnan(score) else (0, -score, entry)

    chosen = sorted(sorted(range(len(scores)), key=rank)[:k])
    return chosen + [-1] * (k - len(chosen))


def attend(queries, keys, sink, *, scale, values=None):
    """Section 1.3, step 9: f64[H, C], of queries [H, C], keys [S, C] and sink [H].

    `values` are the keys unless given.
    """
    values = keys if values is None else values
    out = np.zeros(queries.shape)
    for head, query in enumerate(np.float64(queries)):
        if not len(keys):
            continue
        logits = np.array([query @ key for key in np.float64(keys)]) * scale
        largest = max(logits.max(), sink[head])
        weights = np.exp(logits - largest)
        out[head] = weights @ np.float64(values) / (weights.sum() + math.exp(sink[head] - largest))
    return out
