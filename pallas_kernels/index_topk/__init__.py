"""Indexer scores and the K best entries."""

from pallas_kernels.index_topk.op import index_topk

__all__ = ["index_topk"]
