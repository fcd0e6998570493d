"""Attention over window and entries."""

from pallas_kernels.sparse_attention.op import sparse_attention
from pallas_kernels.sparse_attention.parts import attend_in_part, join_parts
from pallas_kernels.sparse_attention.reference import AttentionPart

__all__ = ["AttentionPart", "attend_in_part", "join_parts", "sparse_attention"]
