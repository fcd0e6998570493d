"""A closed window into one entry."""

from pallas_kernels.compress_tail.op import compress_csa, compress_hca

__all__ = ["compress_csa", "compress_hca"]
