"""The three attention types, on the cache and over whole sequences."""

from dsv4_jax.attention.full_sequence import Selection, Selector, select_by_score

__all__ = ["Selection", "Selector", "select_by_score"]
