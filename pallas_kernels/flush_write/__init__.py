"""Entries into their blocks."""

from pallas_kernels.flush_write.op import flush_csa, flush_hca, flush_write

__all__ = ["flush_csa", "flush_hca", "flush_write"]
