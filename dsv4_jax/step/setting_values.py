"""Settings of a request that are more than a number: they become plain, immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv4_jax import checks

MAX_LOGIT_BIAS = 300
"""Tokens with a bias of their own."""

MAX_STOP_TEXTS = 64
MAX_STOP_CHARS = 1024
"""The longest stop text: every drawn token looks that far back."""


def plain_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and its bias, by id; a mapping or pairs come in."""
    items = bias.items() if isinstance(bias, Mapping) else bias
    if not isinstance(bias, Mapping | tuple | list):
        checks.refuse("logit_bias", "a mapping of token ids to numbers", bias)
    pairs = []
    for pair in checks.sequence("logit_bias", items, of="tokens", limit=MAX_LOGIT_BIAS):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            checks.refuse("logit_bias", "a mapping of token ids to numbers", bias)
        token = checks.integer("logit_bias", pair[0], 0)
        pairs.append((token, checks.number("logit_bias", pair[1], -100, 100, rule="-100 to 100")))
    if len(dict(pairs)) < len(pairs):
        checks.refuse("logit_bias", "one number for each token id", bias)
    return tuple(sorted(pairs))


def plain_texts(texts: Any) -> tuple[str, ...]:
    """Stop texts as a tuple; an iterable of texts comes in."""
    rule = "a list of texts, none empty"
    if isinstance(texts, str):
        checks.refuse("stop_texts", rule, texts)
    items = checks.sequence("stop_texts", texts, of="texts", limit=MAX_STOP_TEXTS)
    if not all(isinstance(item, str) and item for item in items):
        checks.refuse("stop_texts", rule, items)
    return tuple(checks.text("stop_texts", item, max_chars=MAX_STOP_CHARS) for item in items)
