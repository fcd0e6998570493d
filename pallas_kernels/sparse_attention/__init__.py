"""Attention over window and entries."""

from pallas_kernels.sparse_attention.op import sparse_attention

__all__ = ["sparse_attention"]
