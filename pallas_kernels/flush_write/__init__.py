"""Entries into their blocks."""

from pallas_kernels.flush_write.op import flush_write

__all__ = ["flush_write"]
