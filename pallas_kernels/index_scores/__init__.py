"""Scores of index keys for each query."""

from pallas_kernels.index_scores.op import index_scores, listed_scores

__all__ = ["index_scores", "listed_scores"]
