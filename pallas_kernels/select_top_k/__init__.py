"""The best k of each row of scores."""

from pallas_kernels.select_top_k.op import select_top_k

__all__ = ["select_top_k"]
