"""The three attention types, on the cache and over whole sequences."""

from dsv4_jax.attention.pooling import Pooling, WindowTokens
from dsv4_jax.attention.selection import Selection, Selector, select_by_score

__all__ = ["Pooling", "Selection", "Selector", "WindowTokens", "select_by_score"]
