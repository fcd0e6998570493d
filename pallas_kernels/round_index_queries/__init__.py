"""Index queries: RoPE, then rounding as index keys are rounded."""

from pallas_kernels.round_index_queries.op import round_index_queries

__all__ = ["round_index_queries"]
