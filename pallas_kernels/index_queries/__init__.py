"""Index queries as projected to what meets the index keys."""

from pallas_kernels.index_queries.op import round_index_queries

__all__ = ["round_index_queries"]
