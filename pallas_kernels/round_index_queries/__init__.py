"""Index queries, rotated and rounded as index keys are."""

from pallas_kernels.round_index_queries.op import round_index_queries

__all__ = ["round_index_queries"]
