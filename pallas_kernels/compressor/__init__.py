"""Windows that close, compressed into entries and written to their blocks."""

from pallas_kernels.compressor.op import flush_csa, flush_hca, flush_write

__all__ = ["flush_csa", "flush_hca", "flush_write"]
