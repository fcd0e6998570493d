"""Windows that close, compressed into entries and written to their blocks."""

from pallas_kernels.compressor.op import flush_csa, flush_hca, flush_write
from pallas_kernels.compressor.reference import Compressor

__all__ = ["Compressor", "flush_csa", "flush_hca", "flush_write"]
