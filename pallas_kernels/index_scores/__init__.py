"""Scores of index keys for each query."""
