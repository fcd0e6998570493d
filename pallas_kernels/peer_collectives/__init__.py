"""Collectives of a few rows: devices write into each other's memory, inside a CUDA graph."""

from pallas_kernels.peer_collectives.buffer import PeerLayout
from pallas_kernels.peer_collectives.op import all_gather, all_reduce, all_to_all, reduce_scatter

__all__ = ["PeerLayout", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"]
